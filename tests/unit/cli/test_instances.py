"""A command without --url is about the `penstock up` that runs here."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kit.cli import ScriptedGateway, invoke
from penstock.cli.config import ClusterSettings, load
from penstock.cli.failures import CliFailure
from penstock.cli.state import Home, SystemState
from penstock.cli.topics import kafka_settings

Start = Callable[..., Home]
STATS = {"GET /v1/requests": {"data": [], "has_more": False}}


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Runs an instance in a folder, as its state says; nothing else runs."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "share"))
    for name in ("PENSTOCK_DATA", "PENSTOCK_URL", "PENSTOCK_CONFIG", "PENSTOCK_KAFKA__BOOTSTRAP_SERVERS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    homes: list[Home] = []

    def run(folder: Path, url: str, bootstrap_servers: str = "127.0.0.1:1", keys_file: str | None = None) -> Home:
        home = Home(folder)
        home.acquire()
        homes.append(home)
        state = SystemState(
            pid=os.getpid(), phase="ready", url=url, bootstrap_servers=bootstrap_servers, models=[], started_at=1.0,
            keys_file=keys_file,
        )  # fmt: skip
        home.write(state)
        return home

    yield run
    for home in homes:
        home.release()


@pytest.mark.parametrize("where", ["share/penstock", "named", "elsewhere"])
def test_it_is_found_in_the_default_folder_in_penstock_data_and_by_itself(
    start: Start, gateway: ScriptedGateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    gateway.play(STATS)
    start(tmp_path / where, gateway.url)
    if where == "named":
        start(tmp_path / "other", "http://127.0.0.1:1")
        monkeypatch.setenv("PENSTOCK_DATA", str(tmp_path / where))
    done = invoke("requests", "list")
    assert (done.exit_code, done.stdout) == (0, "no requests\n"), done.output
    assert (str(tmp_path / where) in done.stderr) is (where == "elsewhere"), "one that nothing named is said"


def test_kafka_is_found_alike(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = start(tmp_path / "elsewhere", "http://127.0.0.1:1", "127.0.0.1:19999")
    found = lambda: kafka_settings(load(ClusterSettings), None, None).bootstrap_servers  # noqa: E731
    assert found() == "127.0.0.1:19999"
    monkeypatch.setenv("PENSTOCK_KAFKA__BOOTSTRAP_SERVERS", "named:1")
    assert found() == "named:1"
    monkeypatch.delenv("PENSTOCK_KAFKA__BOOTSTRAP_SERVERS")
    home.release()
    assert found() == "127.0.0.1:9092"


def test_an_option_and_a_variable_go_before_it(
    start: Start, gateway: ScriptedGateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway.play(STATS)
    start(tmp_path / "share/penstock", "http://127.0.0.1:1")
    assert gateway.run("requests", "list").exit_code == 0
    monkeypatch.setenv("PENSTOCK_URL", gateway.url)
    assert invoke("requests", "list").exit_code == 0


def test_of_several_none_is_taken_and_all_are_named(start: Start, tmp_path: Path) -> None:
    for number in (1, 2):
        start(tmp_path / f"other-{number}", f"http://127.0.0.1:{number}")
    with pytest.raises(CliFailure, match="several"):
        kafka_settings(load(ClusterSettings), None, None)
    done = invoke("requests", "list")
    assert done.exit_code == 2
    for number in (1, 2):
        assert f"http://127.0.0.1:{number} ({tmp_path / f'other-{number}'})" in done.stderr


def test_one_that_was_killed_is_not_found(start: Start, tmp_path: Path) -> None:
    home = start(tmp_path / "elsewhere", "http://127.0.0.1:1")
    state = (home.data_dir / "state.json").read_text()
    entry = next((tmp_path / "state/penstock/running").iterdir())
    home.release()
    (home.data_dir / "state.json").write_text(state)
    entry.write_text(str(home.data_dir))
    assert "no gateway at http://127.0.0.1:8000" in invoke("watch", "r").stderr
    assert not entry.exists()


def test_a_refused_key_says_where_keys_are_made(start: Start, gateway: ScriptedGateway, tmp_path: Path) -> None:
    error = {"error": {"message": "send a key", "code": "unauthenticated"}}
    gateway.play({"GET /v1/requests": (401, error)})
    start(tmp_path / "share/penstock", gateway.url, keys_file="/keys/a.json")
    done = invoke("requests", "list")
    cure = "give it by --key or PENSTOCK_API_KEY; `penstock keys create --file /keys/a.json` creates one"
    assert done.stderr == f"penstock: send a key (unauthenticated): {cure}\n"


def test_commands_about_a_folder_name_the_one_that_runs(start: Start, tmp_path: Path) -> None:
    start(tmp_path / "elsewhere", "http://127.0.0.1:1")
    for command in ("status", "down"):
        assert f"--data-dir {tmp_path / 'elsewhere'}" in invoke(command).output
