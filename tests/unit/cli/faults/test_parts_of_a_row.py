"""The parts of a row of the fault table: the store that is taken away, its system, the receiver of its webhooks."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest

from penstock.cli.faults.histories import History, read
from penstock.cli.faults.site import Supervised
from penstock.cli.faults.strikes import exchange
from penstock.cli.faults.stubs import outside
from penstock.cli.readiness import Readiness
from penstock.cli.supervisor import Part
from support import wait_until


def test_paths_change_places_and_back(tmp_path: Path) -> None:
    folder, file = tmp_path / "artifacts", tmp_path / "aside"
    folder.mkdir()
    (folder / "kept").write_text("x")
    file.touch()
    exchange(folder, file)
    assert folder.is_file()
    exchange(folder, file)
    assert (folder / "kept").read_text() == "x"


def test_without_the_other_path_it_fails(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        exchange(tmp_path, tmp_path / "missing" / "aside")


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_if_one_does_not_start_none_is_left(tmp_path: Path, error: type[BaseException]) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def launch() -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", "import signal; signal.pause()"]
        started.append(subprocess.Popen(command, start_new_session=True))
        return started[-1]

    def look(pid: int) -> Readiness:
        raise error

    part = Part(name="part", launch=launch, log=tmp_path / "log", look=look, grace_s=1.0)
    with pytest.raises(error):
        Supervised().start(part)
    assert [process.poll() is None for process in started] == [False]


CALL = {"data": {"request_id": "a", "status": "completed"}}


def call(url: str) -> int:
    return httpx.post(f"{url}/hook", json=CALL, headers={"webhook-id": "w"}, trust_env=False).status_code


def test_a_held_call_is_refused_and_only_the_next_one_is_noted(tmp_path: Path) -> None:
    history = History(tmp_path / "row.jsonl")
    answers: list[int] = []
    with outside(history) as server:
        server.answers.clear()
        caller = threading.Thread(target=lambda: answers.append(call(server.url)))
        caller.start()
        wait_until(lambda: server.held)
        server.answers.set()
        caller.join()
        assert answers == [503]
        assert history.named["webhook"] == set()
        assert call(server.url) == 200
    history.close()
    assert [(entry["request_id"], entry["status"]) for entry in read(tmp_path / "row.jsonl")] == [("a", "completed")]
