"""A command without --url is about the `penstock up` that runs here."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import pytest

from kit.cli import ScriptedGateway, invoke
from penstock.cli.config import ClusterSettings, load
from penstock.cli.failures import CliFailure
from penstock.cli.paths import free_port
from penstock.cli.state import Home, PartState, SystemState, running_homes
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


def test_the_state_of_a_killed_one_is_not_that_of_the_next(start: Start, tmp_path: Path) -> None:
    """The next one had not yet written: clients sent their keys to the old port, and `down` ended the old pid."""
    home = start(tmp_path / "elsewhere", "http://127.0.0.1:1")
    state = (home.data_dir / "state.json").read_text()
    home.release()
    (home.data_dir / "state.json").write_text(state)
    home.acquire()
    assert (home.held(), home.running()) == (True, None)


def test_who_looks_at_the_lock_does_not_hold_it_for_others(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = start(tmp_path / "elsewhere", "http://127.0.0.1:1")
    state = (home.data_dir / "state.json").read_text()
    home.release()
    (home.data_dir / "state.json").write_text(state)
    flock, during = fcntl.flock, list[bool]()

    def looked_at(file: IO[str], how: int) -> None:
        flock(file, how)
        monkeypatch.setattr(fcntl, "flock", flock)
        during.append(home.held())

    monkeypatch.setattr(fcntl, "flock", looked_at)
    assert (home.held(), during) == (False, [False])


def test_an_entry_is_removed_while_no_other_can_start(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one wrote its entry between the look at its lock and the removal."""
    home = start(tmp_path / "elsewhere", "http://127.0.0.1:1")
    home.release()
    folder = tmp_path / "state/penstock/running"
    entry = folder / "1"
    entry.write_text(str(home.data_dir))
    unlink, locked = Path.unlink, list[bool]()

    def unlinked(path: Path, missing_ok: bool = False) -> None:
        with (home.data_dir / "up.lock").open("a") as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        locked.append(True)
        unlink(path, missing_ok)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", unlinked)
        assert (list(running_homes()), locked) == ([], [True])
    assert not entry.exists()


def test_what_another_user_left_is_not_trusted(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start(tmp_path / "elsewhere", "http://127.0.0.1:1")
    assert len(list(running_homes())) == 1
    monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)
    assert list(running_homes()) == []
    assert len(list((tmp_path / "state/penstock/running").iterdir())) == 1


@pytest.mark.parametrize("text", ['"text"', "[]", "{}", '{"parts": [1]}', '{"pid": 1, "parts": []}'])
def test_a_state_that_cannot_be_read_is_none(start: Start, tmp_path: Path, text: str) -> None:
    home = start(tmp_path / "elsewhere", "http://127.0.0.1:1")
    (home.data_dir / "state.json").write_text(text)
    assert home.running() is None


def test_the_state_of_a_newer_release_is_read(start: Start, tmp_path: Path) -> None:
    home = start(tmp_path / "elsewhere", "http://127.0.0.1:1")
    known = home.running()
    path = home.data_dir / "state.json"
    part: dict[str, Any] = {"name": "w", "pid": 1, "restarts": 0, "log": "l", "ready_url": None}
    path.write_text(json.dumps({**json.loads(path.read_text()), "parts": [{**part, "new": 1}], "new": 1}))
    assert known is not None
    assert home.running() == replace(known, parts=[PartState(**part)])


def test_a_refused_key_says_where_keys_are_made(start: Start, gateway: ScriptedGateway, tmp_path: Path) -> None:
    error = {"error": {"message": "send a key", "code": "unauthenticated"}}
    gateway.play({"GET /v1/requests": (401, error)})
    start(tmp_path / "share/penstock", gateway.url, keys_file="/keys/a b.json")
    done = invoke("requests", "list")
    cure = "give it by --key or PENSTOCK_API_KEY; `penstock keys create --file '/keys/a b.json'` creates one"
    assert done.stderr == f"penstock: send a key (unauthenticated): {cure}\n"


def test_commands_about_a_folder_name_the_one_that_runs(start: Start, tmp_path: Path) -> None:
    start(tmp_path / "elsewhere", "http://127.0.0.1:1")
    for command in ("status", "down"):
        assert f"--data-dir {tmp_path / 'elsewhere'}" in invoke(command).output


@pytest.mark.parametrize("count", [1, 2])
def test_a_command_that_asks_no_gateway_looks_for_none(start: Start, tmp_path: Path, count: int) -> None:
    for number in range(count):
        start(tmp_path / f"other-{number}", f"http://127.0.0.1:{number + 1}")
    done = invoke("dlq", "list", "--bootstrap-servers", f"127.0.0.1:{free_port()}")
    assert done.exit_code == 3
    assert done.stderr.startswith("penstock: no Kafka answers at ")


def test_a_folder_of_penstock_data_on_which_none_runs_is_refused(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(tmp_path / "elsewhere", "http://127.0.0.1:1")
    monkeypatch.setenv("PENSTOCK_DATA", str(tmp_path / "dead"))
    done = invoke("requests", "list")
    assert done.exit_code == 3
    assert done.stderr == (
        f"penstock: Penstock is not running on {tmp_path / 'dead'}, which PENSTOCK_DATA names: start it with"
        f" `penstock up`, or name a gateway by --url; one runs elsewhere: --data-dir {tmp_path / 'elsewhere'}\n"
    )


def test_one_that_only_begins_to_start_is_said(start: Start, tmp_path: Path) -> None:
    home = start(tmp_path / "share/penstock", "http://127.0.0.1:1")
    (home.data_dir / "state.json").unlink()
    done = invoke("requests", "list")
    assert done.exit_code == 3
    assert f"Penstock is only beginning to start on {home.data_dir}" in done.stderr
