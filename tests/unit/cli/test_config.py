"""Configuration: found in order, wrong fields named with the place to mend, secrets starred, TOML written as read."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cli.config import ClusterSettings, find_config, load, masked, to_toml
from penstock.cli.config_commands import checked, import_models
from penstock.cli.failures import CliFailure, ExitCode
from penstock.cli.imported_models import imported
from penstock.common.model_entry import ModelEntry
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


def test_the_environment_goes_before_the_file(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    write('[kafka]\nbootstrap_servers = "a:1"\ntopic_prefix = "x-"\n')
    monkeypatch.setenv("PENSTOCK_KAFKA__BOOTSTRAP_SERVERS", "b:2")
    settings = load(ClusterSettings)
    assert (settings.kafka.bootstrap_servers, settings.kafka.topic_prefix) == ("b:2", "x-")


def test_a_folder_of_secrets_goes_before_the_file_and_behind_the_environment(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Kubernetes mounts a Secret: links to files in a hidden folder, which is replaced as a whole."""
    write('[kafka]\nbootstrap_servers = "a:1"\ntopic_prefix = "x-"\n')
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
    kafka = load(ClusterSettings).kafka
    assert (kafka.bootstrap_servers, kafka.topic_prefix, kafka.security) == ("b:2", "y-", {"sasl.password": "p"})

    (mounted / "PENSTOCK_TOPICS__PARTITIONS").write_text("many")
    (folder / "PENSTOCK_TOPICS__PARTITIONS").symlink_to("..data/PENSTOCK_TOPICS__PARTITIONS")
    with pytest.raises(CliFailure, match=r"topics.partitions.*the file .*/PENSTOCK_TOPICS__PARTITIONS"):
        load(ClusterSettings)
    monkeypatch.setenv("PENSTOCK_SECRETS", str(tmp_path / "none"))
    with pytest.raises(CliFailure, match=r"PENSTOCK_SECRETS names .*none, which is not a folder"):
        load(ClusterSettings)


@pytest.mark.parametrize(
    ("variable", "value", "field"),
    [
        ("PENSTOCK_TOPICS__PARTITIONS", "many", "topics.partitions"),
        ("penstock_gateway__port", "many", "gateway.port"),
        ("PENSTOCK_GATEWAY", '{"port": "many"}', "gateway.port"),
    ],
)
def test_a_wrong_variable_is_named_and_not_the_file(
    write: Write, variable: str, value: str, field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("[gateway]\nport = 9000\n")
    monkeypatch.setenv(variable, value)
    with pytest.raises(CliFailure, match=f"{field}.*the variable {variable}"):
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
        security = {"sasl.password": password, "sasl.username": "u"}
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
    ],
)
def test_config_check_names_what_is_wrong(write: Write, text: str, words: str) -> None:
    path = write(text + "\n")
    with pytest.raises(CliFailure, match=words.replace("{path}", str(path))) as caught:
        checked()
    assert caught.value.exit_code is ExitCode.USAGE
    assert "\n" not in str(caught.value)


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
