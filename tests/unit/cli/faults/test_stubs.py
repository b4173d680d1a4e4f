"""The receiver of webhooks in a row of the fault table."""

from __future__ import annotations

import threading
from pathlib import Path

import httpx

from penstock.cli.faults.histories import History, read
from penstock.cli.faults.stubs import outside
from support import wait_until

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
