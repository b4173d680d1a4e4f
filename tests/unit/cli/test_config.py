"""Configuration: found in order, wrong fields named with the place to mend, secrets starred, TOML written as read."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cli.config import ClusterSettings, find_config, load, masked, to_toml
from penstock.cli.config_commands import checked
from penstock.cli.failures import CliFailure, ExitCode
from penstock.processors.settings import WorkerSettings


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("PENSTOCK_CONFIG", "PENSTOCK_KAFKA__BOOTSTRAP_SERVERS", "PENSTOCK_TOPICS__PARTITIONS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


def write(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "penstock.toml"
    path.write_text(text)
    monkeypatch.setenv("PENSTOCK_CONFIG", str(path))
    return path


def test_the_environment_goes_before_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, '[kafka]\nbootstrap_servers = "a:1"\ntopic_prefix = "x-"\n', monkeypatch)
    monkeypatch.setenv("PENSTOCK_KAFKA__BOOTSTRAP_SERVERS", "b:2")
    settings = load(ClusterSettings)
    assert (settings.kafka.bootstrap_servers, settings.kafka.topic_prefix) == ("b:2", "x-")


def test_a_wrong_field_is_named_with_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, "[topics]\npartitions = 0\n", monkeypatch)
    with pytest.raises(CliFailure, match=rf"topics\.partitions: .*not 0; mend it in {path}") as caught:
        load(ClusterSettings)
    assert caught.value.exit_code is ExitCode.USAGE
    assert "\n" not in str(caught.value)


def test_a_wrong_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_TOPICS__PARTITIONS", "many")
    with pytest.raises(CliFailure, match=r"topics\.partitions.*the variable PENSTOCK_TOPICS__PARTITIONS"):
        load(ClusterSettings)


def test_a_mistyped_key_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "[topics]\npartition = 4\n", monkeypatch)
    with pytest.raises(CliFailure, match=r"topics\.partition: there is no such setting; mend it in"):
        load(ClusterSettings)


def test_broken_toml_names_the_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "[kafka\n", monkeypatch)
    with pytest.raises(CliFailure, match=r"penstock\.toml is not valid TOML: .*line 1"):
        load(ClusterSettings)


def test_the_file_is_found_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_config() is None
    here = tmp_path / "penstock.toml"
    here.write_text("")
    assert find_config() == here
    other = tmp_path / "other.toml"
    other.write_text("")
    monkeypatch.setenv("PENSTOCK_CONFIG", str(other))
    assert find_config() == other
    assert find_config(here) == here
    with pytest.raises(CliFailure, match="no such configuration file"):
        find_config(tmp_path / "none.toml")


def test_secrets_are_starred() -> None:
    tree = {"kafka": {"security": {"sasl.password": "hush", "sasl.username": "u"}}, "auth": {"ticket_key": "k"}}
    assert masked(tree) == {
        "kafka": {"security": {"sasl.password": "***", "sasl.username": "u"}},
        "auth": {"ticket_key": "***"},
    }


scalars = st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False) | st.text()
keys = st.text(min_size=1)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=8,
)


@given(tables=st.dictionaries(keys, values, max_size=4))
def test_toml_reads_back_as_written(tables: dict[str, Any]) -> None:
    assert tomllib.loads(to_toml(tables)) == tables


def test_a_wrong_option_of_a_model_is_named_without_its_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "penstock.toml"
    table = (
        'id = "m"\nsource = "http://h"\nengine = "remote"\noptions = {headers = {x = "SECRET"}, timeout_s = "soon"}\n'
    )
    config.write_text(f"[[models]]\n{table}")
    monkeypatch.setenv("PENSTOCK_CONFIG", str(config))
    with pytest.raises(CliFailure) as caught:
        load(WorkerSettings)
    assert str(caught.value) == (
        "configuration: models.0: options.timeout_s takes a number above 0, not 'soon' (model m, engine remote);"
        f" mend it in {config}"
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[kafka]\nbootstrap_server = "a:1"', "kafka.bootstrap_server: "),
        ('[artifacts]\nlocaton = "/data"', "artifacts.locaton: "),
        ("[topics]\npartition = 4", "topics.partition: "),
        ("[conversations]\nmax_topic = 4", "conversations.max_topic: "),
        ("[gateway]\nport = 99999", "gateway.port: .*65535"),
        ("[gateway]\nport = 9000\n[worker]\nhealth_port = 9000", "gateway.port and worker.health_port are both 9000"),
        (
            '[worker]\nhealth_port = 9000\n[bridge]\nhealth_port = 9000\n[[queues]]\ntopic = "jobs"',
            "worker.health_port and bridge.health_port are both 9000",
        ),
        ("[worker]\nheartbeat_s = 30", "heartbeat_s is 30, and session_timeout_s 10"),
        ('[auth]\nkeys_file = "none.json"', "none.json is not there; `penstock keys create --file none.json`"),
        ('[[queues]]\ntopic = "inference.request.low"', "inference.request.low is a topic of Penstock's own"),
        ('[[queues]]\ntopic = "jobs"\nresult_topic = "conversation.c"', "conversation.c is a topic of Penstock's own"),
        ('[[models]]\nid = "m"\nsource = "o/m"\nengine = "text"\noptions = {slotz = 3}', "options.slotz: there is no"),
        ("[gatway]\nport = 1", r"\[gatway\] is no section"),
        ("[gateway]\ntrusted_proxies = ['proxy.local']", "'proxy.local' is no address"),
    ],
)
def test_what_cannot_be_right_is_named(text: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`config check` called all of these right: a typing slip meant the default broker, or the default folder."""
    write(tmp_path, text, monkeypatch)
    with pytest.raises(CliFailure, match=words) as caught:
        checked()
    assert caught.value.exit_code is ExitCode.USAGE


def test_what_is_right_together_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "keys.json").write_text("{}")
    text = '[kafka]\ntopic_prefix = "p-"\n[auth]\nkeys_file = "keys.json"\n[[queues]]\ntopic = "inference.result"\n'
    apart = '[gateway]\nhost = "127.0.0.1"\nport = 9000\n[worker]\nhealth_host = "10.0.0.1"\nhealth_port = 9000\n'
    write(tmp_path, text + apart, monkeypatch)
    assert checked()["queues"][0]["topic"] == "inference.result", "of somebody else: ours begin with p-"


@pytest.mark.parametrize(
    ("variable", "value"), [("penstock_gateway__port", "many"), ("PENSTOCK_GATEWAY", '{"port": "many"}')]
)
def test_a_variable_that_is_wrong_is_not_looked_for_in_the_file(
    variable: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "[gateway]\nport = 9000\n", monkeypatch)
    monkeypatch.setenv(variable, value)
    with pytest.raises(CliFailure, match=f"gateway.port.*the variable {variable}"):
        checked()
