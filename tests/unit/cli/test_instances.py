"""A command without --url is about the `penstock up` that runs here."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import IO

import pytest

from kit.cli import Json, ScriptedGateway, invoke
from penstock.cli import up
from penstock.cli.config import ClusterSettings, load
from penstock.cli.failures import CliFailure
from penstock.cli.paths import free_port
from penstock.cli.state import Home, PartState, SystemState, running_homes
from penstock.cli.topics import kafka_settings

Start = Callable[..., Home]
NOWHERE = "http://127.0.0.1:1"
RUNNING, NAMED = "127.0.0.1:19999", "named:1"


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Runs an instance in a folder, as its state says; nothing else runs."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "share"))
    for name in ("PENSTOCK_DATA", "PENSTOCK_URL", "PENSTOCK_CONFIG", "PENSTOCK_KAFKA__BOOTSTRAP_SERVERS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    with ExitStack() as stack:

        def run(folder: str = "elsewhere", url: str = NOWHERE, keys_file: str | None = None) -> Home:
            home = Home(tmp_path / folder)
            home.acquire()
            stack.callback(home.release)
            state: Json = {"pid": os.getpid(), "phase": "ready", "models": [], "started_at": 1.0}
            home.write(SystemState(**state, url=url, bootstrap_servers=RUNNING, keys_file=keys_file))
            return home

        yield run


def kill(home: Home) -> None:
    """The process ends and leaves its state and its entry behind."""
    state, entry = home.data_dir / "state.json", Path(os.environ["XDG_STATE_HOME"]) / "penstock/running/1"
    text = state.read_text()
    home.release()
    state.write_text(text)
    entry.write_text(str(home.data_dir))


def test_status_has_columns_and_says_why_a_part_last_ended(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(up, "read_orders", lambda settings: None)
    home = start("share/penstock")
    state, log = home.read(), {"log": "l", "ready_url": None}
    assert state is not None
    ended = PartState(name="summarizer", pid=None, restarts=22, cause="exit code 1: its port cannot be bound", **log)
    home.write(replace(state, parts=[PartState(name="broker", pid=7, restarts=0, **log), ended]))
    done = invoke("status")
    parts = [line for line in done.stdout.splitlines() if " pid " in line[1:] and "http" not in line]
    assert {line.index(" pid ") for line in parts} == {parts[0].index(" pid ")}, done.stdout
    assert (done.exit_code, "it is not running (exit code 1: its port cannot be bound)" in done.stdout) == (1, True)


LIST, DLQ = "requests list", f"dlq list --bootstrap-servers 127.0.0.1:{free_port()}"
CASES: dict[str, tuple[Json, Json, str, int, str]] = {
    "in the default folder": ({"share/penstock": "{gateway}"}, {}, LIST, 0, ""),
    "in PENSTOCK_DATA": ({"a": "{gateway}", "b": NOWHERE}, {"PENSTOCK_DATA": "{folder}/a"}, LIST, 0, ""),
    "by itself, and then named": ({"a": "{gateway}"}, {}, LIST, 0, "{folder}/a"),
    "an option is preferred": ({"share/penstock": NOWHERE}, {}, f"{LIST} --url {{gateway}}", 0, ""),
    "a variable is preferred": ({"share/penstock": NOWHERE}, {"PENSTOCK_URL": "{gateway}"}, LIST, 0, ""),
    "one of several": ({"a": "http://h:1", "b": "http://h:2"}, {}, LIST, 2, "http://h:1 ({folder}/a)"),
    "another of several": ({"a": "http://h:1", "b": "http://h:2"}, {}, LIST, 2, "http://h:2 ({folder}/b)"),
    "its folder for status": ({"a": NOWHERE}, {}, "status", 3, "--data-dir {folder}/a"),
    "its folder for down": ({"a": NOWHERE}, {}, "down", 0, "--data-dir {folder}/a"),
    "not wanted": ({"a": NOWHERE}, {}, DLQ, 3, "penstock: no Kafka answers at "),
    "several, not wanted": ({"a": NOWHERE, "b": NOWHERE}, {}, DLQ, 3, "penstock: no Kafka answers at "),
    "none in PENSTOCK_DATA": (
        {"a": NOWHERE}, {"PENSTOCK_DATA": "{folder}/dead"}, LIST, 3,
        "penstock: Penstock is not running on {folder}/dead, which PENSTOCK_DATA names: start it with"
        " `penstock up`, or name a gateway by --url; one runs elsewhere: --data-dir {folder}/a\n",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("homes", "env", "command", "exit_code", "said"), CASES.values(), ids=CASES)
def test_which_instance_a_command_finds(
    start: Start, gateway: ScriptedGateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    homes: Json, env: Json, command: str, exit_code: int, said: str,
) -> None:  # fmt: skip
    gateway.play({"GET /v1/requests": {"data": [], "has_more": False}})
    facts = {"gateway": gateway.url, "folder": tmp_path}
    for folder, url in homes.items():
        start(folder, url.format(**facts))
    for name, value in env.items():
        monkeypatch.setenv(name, value.format(**facts))
    done = invoke(*command.format(**facts).split())
    assert (done.exit_code, said.format(**facts) in done.output) == (exit_code, True), done.output
    assert (done.stdout == "no requests\n") == (exit_code == 0 and command.startswith(LIST))
    assert said or not done.stderr, "the default and a chosen one are not named"


@pytest.mark.parametrize(
    ("option", "variable", "file", "runs", "found"),
    [
        (None, None, None, True, RUNNING),
        (NAMED, None, None, True, NAMED),
        (None, NAMED, None, True, NAMED),
        (None, None, NAMED, True, NAMED),
        (None, None, None, False, "127.0.0.1:9092"),
    ],
)
def test_commands_use_the_named_kafka_else_that_of_the_running_system(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str | None, variable: str | None,
    file: str | None, runs: bool, found: str,
) -> None:  # fmt: skip
    home = start()
    if variable is not None:
        monkeypatch.setenv("PENSTOCK_KAFKA__BOOTSTRAP_SERVERS", variable)
    if file is not None:
        (tmp_path / "penstock.toml").write_text(f'[kafka]\nbootstrap_servers = "{file}"\n')
        monkeypatch.setenv("PENSTOCK_CONFIG", str(tmp_path / "penstock.toml"))
    if not runs:
        kill(home)
    assert kafka_settings(load(ClusterSettings), option, None).bootstrap_servers == found
    if runs and found == RUNNING:
        start("another")
        with pytest.raises(CliFailure, match="several"):
            kafka_settings(load(ClusterSettings), None, None)


def test_one_that_was_killed_is_not_found_nor_taken_for_the_next(start: Start, tmp_path: Path) -> None:
    home = start()
    kill(home)
    assert "no gateway at http://127.0.0.1:8000" in invoke("watch", "r").stderr
    assert [*(tmp_path / "state/penstock/running").iterdir()] == []
    home.acquire()
    assert (home.held(), home.running()) == (True, None)


def test_who_looks_at_the_lock_does_not_hold_it_for_others(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    home = start()
    kill(home)
    flock, during = fcntl.flock, list[bool]()

    def looked_at(file: IO[str], how: int) -> None:
        flock(file, how)
        monkeypatch.setattr(fcntl, "flock", flock)
        during.append(home.held())

    monkeypatch.setattr(fcntl, "flock", looked_at)
    assert (home.held(), during) == (False, [False])


def test_an_entry_is_removed_while_no_other_can_start(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    home = start()
    kill(home)
    unlink, locked = Path.unlink, list[bool]()

    def unlinked(path: Path, missing_ok: bool = False) -> None:
        with (home.data_dir / "up.lock").open("a") as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        locked.append(True)
        unlink(path, missing_ok)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", unlinked)
        assert (list(running_homes()), locked) == ([], [True])


def test_what_another_user_left_is_not_trusted(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start()
    assert len(list(running_homes())) == 1
    monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)
    assert list(running_homes()) == []
    assert len(list((tmp_path / "state/penstock/running").iterdir())) == 1


PART: Json = {"name": "w", "pid": 1, "restarts": 0, "log": "l", "ready_url": None}


@pytest.mark.parametrize("text", ['"text"', "[]", "{}", '{"parts": [1]}', '{"pid": 1, "parts": []}', "newer"])
def test_a_state_is_read_if_it_is_of_a_newer_release_and_not_if_it_is_of_another_form(start: Start, text: str) -> None:
    home = start()
    known, path = home.running(), home.data_dir / "state.json"
    assert known is not None
    newer = json.dumps({**json.loads(path.read_text()), "parts": [{**PART, "new": 1}], "new": 1})
    path.write_text(newer if text == "newer" else text)
    assert home.running() == (replace(known, parts=[PartState(**PART)]) if text == "newer" else None)


def test_a_refused_key_says_where_keys_are_made(start: Start, gateway: ScriptedGateway) -> None:
    error = {"error": {"message": "send a key", "code": "unauthenticated"}}
    gateway.play({"GET /v1/requests": (401, error)})
    start("share/penstock", gateway.url, "/keys/a b.json")
    cure = "give it by --key or PENSTOCK_API_KEY; `penstock keys create --file '/keys/a b.json'` creates one"
    assert invoke("requests", "list").stderr == f"penstock: send a key (unauthenticated): {cure}\n"


def test_one_that_only_begins_to_start_is_said(start: Start) -> None:
    home = start("share/penstock")
    (home.data_dir / "state.json").unlink()
    done = invoke("requests", "list")
    assert (done.exit_code, f"Penstock is only beginning to start on {home.data_dir}" in done.stderr) == (3, True)
