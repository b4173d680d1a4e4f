"""Configuration: found in order, wrong fields named with the place to mend, secrets starred, TOML written as read."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel
from pydantic_settings import BaseSettings

from penstock.cli.config import SECTIONS, ClusterSettings, find_config, load, masked, to_toml
from penstock.cli.config_commands import checked, import_models, settings_types
from penstock.cli.failures import CliFailure, ExitCode
from penstock.cli.imported_models import imported
from penstock.common.model_entry import ModelEntry
from penstock.gateway.settings import GatewaySettings
from penstock.processors.settings import WorkerSettings

Write = Callable[[str], Path]


@pytest.fixture(autouse=True)
def write(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Write:
    """Writes the configuration file of this test."""
    for name in ("PENSTOCK_CONFIG", "PENSTOCK_KAFKA__BOOTSTRAP_SERVERS", "PENSTOCK_TOPICS__PARTITIONS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)

    def write(text: str) -> Path:
        path = tmp_path / "penstock.toml"
        path.write_text(text)
        monkeypatch.setenv("PENSTOCK_CONFIG", str(path))
        return path

    return write


def test_a_folder_of_secrets_goes_before_the_file_and_behind_the_environment(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Kubernetes mounts a Secret: links to files in a hidden folder, which is replaced as a whole."""
    write('[kafka]\nbootstrap_servers = "a:1"\ntopic_prefix = "x-"\n[topics]\npartitions = 7\n')
    folder = tmp_path / "secrets"
    mounted = folder / "..2026_11_30"
    mounted.mkdir(parents=True)
    (folder / "..data").symlink_to(mounted.name)
    secrets = {"PENSTOCK_KAFKA__SECURITY": '{"sasl.password": "p"}\n', "PENSTOCK_KAFKA__TOPIC_PREFIX": "y-"}
    for name, value in secrets.items():
        (mounted / name).write_text(value)
        (folder / name).symlink_to(f"..data/{name}")
    monkeypatch.setenv("PENSTOCK_SECRETS", str(folder))
    monkeypatch.setenv("PENSTOCK_KAFKA__BOOTSTRAP_SERVERS", "b:2")
    settings = load(ClusterSettings)
    kafka = settings.kafka
    assert (kafka.bootstrap_servers, kafka.topic_prefix, kafka.security) == ("b:2", "y-", {"sasl.password": "p"})
    assert settings.topics.partitions == 7, "the file has the rest"

    (mounted / "PENSTOCK_TOPICS__PARTITIONS").write_text("many")
    (folder / "PENSTOCK_TOPICS__PARTITIONS").symlink_to("..data/PENSTOCK_TOPICS__PARTITIONS")
    with pytest.raises(CliFailure, match=r"topics.partitions.*the file .*/PENSTOCK_TOPICS__PARTITIONS"):
        load(ClusterSettings)
    monkeypatch.setenv("PENSTOCK_SECRETS", str(tmp_path / "none"))
    with pytest.raises(CliFailure, match=r"PENSTOCK_SECRETS names .*none, which is not a folder"):
        load(ClusterSettings)


def test_a_variable_names_the_file_of_a_secret(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any setting, in tables too; a number stays the text that it is, and a setting that is a file's name stays one."""
    write('[kafka.security]\n"sasl.password" = "old"\n"sasl.username" = "u"\n')
    secret, keys = tmp_path / "secret", tmp_path / "keys.json"
    secret.write_text("0123\n")
    keys.write_text('{"keys": []}')
    for name in ("KAFKA__SECURITY__SASL_PASSWORD", "AUTH__TICKET_KEY", "SCHEMA_REGISTRY__TOKEN"):
        monkeypatch.setenv(f"PENSTOCK_{name}_FILE", str(secret))
    monkeypatch.setenv("PENSTOCK_AUTH__KEYS_FILE", str(keys))
    monkeypatch.setenv("PENSTOCK_ARTIFACTS__OPTIONS__AZURE_FEDERATED_TOKEN_FILE", "/token")
    settings = load(GatewaySettings)
    assert settings.kafka.security == {"sasl.username": "u", "sasl.password": "0123"}
    assert (settings.auth.ticket_key, settings.auth.keys_file) == ("0123", keys)
    assert list(settings.artifacts.options) == ["azure_federated_token_file"]
    registry = load(ClusterSettings).schema_registry
    assert registry.token is not None
    assert registry.token.get_secret_value() == "0123"
    assert "0123" not in str(settings) + str(registry) + json.dumps(masked(checked()))

    monkeypatch.setenv("PENSTOCK_AUTH__TICKET_KEY", "another")
    with pytest.raises(CliFailure, match="PENSTOCK_AUTH__TICKET_KEY and PENSTOCK_AUTH__TICKET_KEY_FILE are both set"):
        checked()
    monkeypatch.delenv("PENSTOCK_AUTH__TICKET_KEY")
    monkeypatch.setenv("PENSTOCK_AUTH__TICKET_KEY_FILE", str(tmp_path / "none"))
    with pytest.raises(CliFailure, match=r"PENSTOCK_AUTH__TICKET_KEY_FILE names .*none, which cannot be read: No such"):
        checked()


def test_no_secret_of_any_setting_is_shown() -> None:
    """All fields of all settings hold a marker. A new one with such a name is starred, or listed here as none."""
    shown: set[str] = set()
    hidden: set[str] = set()
    for settings_type in settings_types():
        for path in _texts(settings_type):
            value = masked(_nested(path, "marker"))
            (shown if "marker" in json.dumps(value) else hidden).add(".".join(path))
    assert hidden == {
        "auth.ticket_key",
        "schema_registry.key_password",
        "schema_registry.password",
        "schema_registry.token",
        "webhooks.secret",
        "webhooks.secrets",
    }
    suspicious = {path for path in shown if re.search("pass|secret|token|key|credential", path)}
    assert suspicious == {"auth.keys_file", "schema_registry.key_location"}


def _texts(model: type[BaseModel], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The paths of fields that may hold text."""
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _texts(field.annotation, (*path, name))
        elif re.search("str|Path|Secret", str(field.annotation)):
            yield (*path, name)


def _nested(path: tuple[str, ...], value: str) -> dict[str, Any]:
    first, *rest = path
    return {first: _nested(tuple(rest), value) if rest else value}


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("PENSTOCK_TOPICS__PARTITIONS", "many", "topics.partitions.*the variable PENSTOCK_TOPICS__PARTITIONS"),
        ("penstock_gateway__port", "many", "gateway.port.*the variable penstock_gateway__port"),
        ("PENSTOCK_GATEWAY", '{"port": "many"}', "gateway.port.*the variable PENSTOCK_GATEWAY"),
        ("PENSTOCK_LOG_LEVEL", "debug", "set PENSTOCK_LOG__LEVEL"),
    ],
)
def test_a_wrong_variable_is_named_and_not_the_file(
    write: Write, variable: str, value: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("[gateway]\nport = 9000\n")
    monkeypatch.setenv(variable, value)
    with pytest.raises(CliFailure, match=said):
        checked()


def test_the_file_is_found_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_config() is None
    here, other = tmp_path / "penstock.toml", tmp_path / "other.toml"
    here.touch()
    other.touch()
    assert find_config() == here
    monkeypatch.setenv("PENSTOCK_CONFIG", str(other))
    assert find_config() == other
    assert find_config(here) == here
    with pytest.raises(CliFailure, match="no such configuration file"):
        find_config(tmp_path / "none.toml")


def test_secrets_are_starred() -> None:
    def tree(password: str, key: str) -> dict[str, Any]:
        security = {"sasl.password": password, "ssl.key.pem": password, "sasl.username": "u"}
        return {"kafka": {"security": security}, "auth": {"ticket_key": key}}

    assert masked(tree("hush", "k")) == tree("***", "***")
    assert masked({"url": "https://key:hush@host:8081/x@y"}) == {"url": "https://***@host:8081/x@y"}


scalars = st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False) | st.text()
keys = st.text(min_size=1)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3), max_leaves=8
)


@given(tables=st.dictionaries(keys, values, max_size=4))
def test_toml_reads_back_as_written(tables: dict[str, Any]) -> None:
    assert tomllib.loads(to_toml(tables)) == tables


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[topics]\npartitions = 0", r"topics\.partitions: .*not 0; mend it in {path}"),
        ("[topics]\npartition = 4", r"topics\.partition: there is no such setting; mend it in {path}"),
        ("[kafka", r"penstock\.toml is not valid TOML: .*line 1"),
        (
            '[[models]]\nid = "m"\nsource = "http://h"\nengine = "remote"\n'
            'options = {headers = {x = "SECRET"}, timeout_s = "soon"}',
            r"^configuration: models\.0: options\.timeout_s takes a number above 0, not 'soon' "
            r"\(model m, engine remote\); mend it in {path}$",
        ),
        ('[kafka]\nbootstrap_server = "a:1"', "kafka.bootstrap_server: "),
        ('[artifacts]\nlocaton = "/data"', "artifacts.locaton: "),
        ("[conversations]\nmax_topic = 4", "conversations.max_topic: "),
        ("[gateway]\nport = 99999", "gateway.port: .*65535"),
        ("[gateway]\nport = 9000\n[worker]\nhealth_port = 9000", "gateway.port and worker.health_port are both 9000"),
        (
            '[worker]\nhealth_port = 9000\n[bridge]\nhealth_port = 9000\n[[queues]]\ntopic = "jobs"',
            "worker.health_port and bridge.health_port are both 9000",
        ),
        ("[worker]\nheartbeat_s = 30", "heartbeat_s is 30, and session_timeout_s 10"),
        ('[auth]\nkeys_file = "none.json"', "none.json is not there; `penstock keys create --file none.json`"),
        ('[[queues]]\ntopic = "inference.request.low"', "^configuration: queues: inference.request.low is a topic"),
        ('[[queues]]\ntopic = "jobs"\nresult_topic = "conversation.c"', "conversation.c is a topic of Penstock's own"),
        ('[[models]]\nid = "m"\nsource = "o/m"\nengine = "text"\noptions = {slotz = 3}', "options.slotz: there is no"),
        ("[gatway]\nport = 1", r"\[gatway\] is no section"),
        ("[gateway]\ntrusted_proxies = ['proxy.local']", "'proxy.local' is no address"),
        ("[gateway]\nuser_header = 'X-User'", "user_header needs user_proxies"),
        ("[gateway]\naccess_log = true", "penstock.gateway.edge.http_log=warning"),
        ("[log]\nlevel = 'loud'", "'loud' is no level"),
        (
            '[kafka.security]\n"sasl.mechanim" = "PLAIN"\n"acks" = "1"',
            "kafka.security: acks cannot be set here.*the nearest is sasl.mechanism; mend it in {path}",
        ),
        ('[schema_registry]\ntoken = "hush"\nusername = "u"', "are two ways: set one"),
        ('[schema_registry]\npassword = "hush"', "schema_registry.password needs schema_registry.username"),
        ('[schema_registry]\nca_location = "/none"', "schema_registry.ca_location names /none, which is not a file"),
        ('[topics.config."inference.dlq"]\n"cleanup.policy" = "delete"', "cleanup.policy cannot be set"),
        ('[topics.config."inference.dlq"]\n"retention.ms" = "60000"', "retention.ms must be -1 or at least 172800000"),
    ],
)
def test_config_check_names_what_is_wrong(write: Write, text: str, words: str) -> None:
    path = write(text + "\n")
    with pytest.raises(CliFailure, match=words.replace("{path}", str(path))) as caught:
        checked()
    assert caught.value.exit_code is ExitCode.USAGE
    assert not any(word in str(caught.value) for word in ("\n", "hush", "SECRET"))


def test_all_sections_of_all_processes_are_known() -> None:
    assert {name for one in settings_types() for name in one.model_fields} == SECTIONS


@pytest.mark.parametrize("settings_type", settings_types())
def test_no_process_starts_with_a_variable_of_an_unknown_section(
    settings_type: type[BaseSettings], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PENSTOCK_SECRETS", str(tmp_path))
    for name in ("PENSTOCK_LIMITS__REQUESTS_PER_S", "penstock_limit__a", "PENSTOCK_GATEWAY__DRAIN_S", "OTHER__A"):
        monkeypatch.setenv(name, "3")
        (tmp_path / name.replace("LIMIT", "QUOTA")).write_text("3")
    with pytest.raises(CliFailure) as caught:
        load(settings_type)
    assert {line.partition(", ")[0].partition(";")[0] for line in str(caught.value).splitlines()} == {
        "PENSTOCK_LIMITS__REQUESTS_PER_S: [limits] is no section that Penstock knows",
        "penstock_limit__a: [limit] is no section that Penstock knows",
        f"{tmp_path}/penstock_limit__a: [limit] is no section that Penstock knows",
        f"{tmp_path}/PENSTOCK_QUOTAS__REQUESTS_PER_S: [quotas] is no section that Penstock knows",
    }


def test_config_check_names_all_that_is_wrong_and_each_of_it_once(write: Write) -> None:
    """`(and 2 more)` did not say which, and a process that was looked at later had its faults named later."""
    write("[kafak]\n[kafka]\ntopic_prefixx = 'a'\n[worker]\nlanes = 1\nhealth_port = -1\n[gateway]\nport = -1\n")
    with pytest.raises(CliFailure) as caught:
        checked()
    lines = str(caught.value).splitlines()
    for field in ("kafka.topic_prefixx", "worker.lanes", "worker.health_port", "gateway.port", "[kafak]"):
        assert sum(field in line for line in lines) == 1, lines
    assert len(lines) == 5


def test_config_check_accepts_settings_that_fit_together(write: Write, tmp_path: Path) -> None:
    (tmp_path / "keys.json").write_text("{}")
    text = '[kafka]\ntopic_prefix = "p-"\n[auth]\nkeys_file = "keys.json"\n[[queues]]\ntopic = "inference.result"\n'
    apart = '[gateway]\nhost = "127.0.0.1"\nport = 9000\n[worker]\nhealth_host = "10.0.0.1"\nhealth_port = 9000\n'
    write(text + apart)
    assert checked()["queues"][0]["topic"] == "inference.result", "not one of ours, which begin with p-"


MODELS = Path(__file__).parents[2] / "messages" / "models_002.json"


def test_a_list_of_models_becomes_a_configuration_that_workers_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "made.toml"
    import_models(MODELS, output)
    monkeypatch.setenv("PENSTOCK_CONFIG", str(output))
    chat, *others = load(WorkerSettings).models
    assert (chat.id, chat.source, chat.engine, chat.tasks) == ("chat", "/models/chat", "text", ["text_generation"])
    assert (chat.vram_bytes, chat.priority, chat.max_batch_size) == (6000 * 2**20, 1, 8)
    assert chat.defaults == {"temperature": 0.7}
    said = capsys.readouterr().err
    assert "chat: loading_time_sec has no counterpart: workers measure how long a load takes" in said
    assert [one.id for one in others] == ["painter"]
    assert (others[0].source, others[0].defaults) == ("http://127.0.0.1:9000/v1", {"inference_steps": 30})
    assert others[0].options == {"image_fields": {"inference_steps": "steps"}}
    assert "painter:" not in said
    with pytest.raises(CliFailure, match="--force replaces it"):
        import_models(MODELS, output)
    import_models(MODELS, output, force=True)


GOOD = {"model_id": "m", "model_type": "text2text", "model_path": "/m"}
IMPORTED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"modelId": "m", "modelType": "text2text", "modelPath": "/m", "maxBatchSize": 2}, {"max_batch_size": 2}, ""),
    ({**GOOD, "model_path": None, "api_endpoint": "http://x/v1"}, {"engine": "remote", "source": "http://x/v1"}, ""),
    ({**GOOD, "model_type": "image_processing", "model_path": None}, {"engine": "imaging"}, ""),
    (
        {**GOOD, "model_type": "image_processing", "api_endpoint": "http://x/v1"},
        {},
        "left out: api_endpoint: the engine remote does not do image_processing",
    ),
    ({**GOOD, "model_type": "image2text"}, {"engine": "vision", "tasks": ["image_to_text"]}, ""),
    ({**GOOD, "model_type": "text2image", "parameters": {"steps": 4}}, {"defaults": {"inference_steps": 4}}, ""),
    ({**GOOD, "parameters": {"temperature": 9}}, {}, "parameters.temperature has no counterpart: defaults.temperature"),
    ({**GOOD, "parameters": {"beams": 2, "top_p": 0.5}}, {"defaults": {"top_p": 0.5}}, "beams has no counterpart"),
    ({**GOOD, "priority": -1}, {}, "priority has no counterpart"),
    ({**GOOD, "vram_required_mb": "6GB"}, {}, "vram_required_mb has no counterpart"),
    ({**GOOD, "gpu": 0}, {}, "gpu has no counterpart: there is no such field"),
    ({**GOOD, "model_type": "dance"}, {}, "left out: model_type is 'dance'"),
    ({**GOOD, "model_path": None}, {}, "left out: it has neither model_path nor api_endpoint"),
    ({**GOOD, "model_id": None}, {}, "model 1: left out: id"),
]


@pytest.mark.parametrize(("model", "fields", "note"), IMPORTED, ids=[str(at) for at in range(len(IMPORTED))])
def test_each_field_of_a_model_is_imported_or_named(model: dict[str, Any], fields: dict[str, Any], note: str) -> None:
    found = imported([model])
    for entry in found.entries:
        ModelEntry.model_validate(entry)
        assert {name: entry[name] for name in fields} == fields
    assert (len(found.entries) == 0) == ("left out" in note)
    assert len(found.notes) == bool(note)
    assert note in " ".join(found.notes)


def test_two_models_of_one_name_and_what_is_no_object_are_left_out() -> None:
    found = imported([GOOD, GOOD, 5])
    assert len(found.entries) == 1
    assert [("two models are called m" in note, "must be an object" in note) for note in found.notes] == [
        (True, False),
        (False, True),
    ]


@pytest.mark.parametrize("text", ["", "{}", "5", '[{"model_id": "m"}]'])
def test_a_file_without_models_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "models.json"
    path.write_text(text)
    with pytest.raises(CliFailure, match=r"models\.json"):
        import_models(path)
    with pytest.raises(CliFailure, match="cannot be read"):
        import_models(tmp_path / "none.json")
