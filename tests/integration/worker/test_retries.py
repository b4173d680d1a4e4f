"""Attempts that fail at a remote server run again until the deadline, unless a bound says otherwise."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from breakable_server import remote, serving
from system import System, eventually
from worker_requests import outcome, send, statuses

Make = Callable[..., System]


def asks(request_id: str, **fields: Any) -> dict[str, Any]:
    return {"request_id": request_id, "payload": {"prompt": request_id}, **fields}


def test_a_server_that_answers_500_for_a_while_fails_only_what_has_a_bound(make_system: Make) -> None:
    with serving(500) as server:
        system = make_system(models=[remote(server.server_port)])
        worker = system.worker().wait_ready()
        send(system, asks("hour"), asks("twice", max_attempts=2), asks("second", ttl_ms=4_000))
        bounded, late = outcome(system, "twice"), outcome(system, "second", 30)
        eventually(lambda: server.asked["hour"] > 4, 30, worker.tail)
        assert "hour" not in system.outcomes()
        server.status = 200
        ended = outcome(system, "hour", 30)
    assert (ended.status, ended.error) == ("completed", None), worker.tail()
    for event in (bounded, late):
        assert (event.status, event.error.code) == ("dead_lettered", "engine_failed")
    assert server.asked["twice"] == 2
    assert sorted(json.loads(letter.original)["request_id"] for letter in system.dead_letters()) == ["second", "twice"]


def test_a_server_that_is_not_there_spends_no_attempt(make_system: Make) -> None:
    with serving(200) as server:
        port = server.server_port
    system = make_system(models=[remote(port, patience_s=0.1)])
    worker = system.worker().wait_ready()
    send(system, asks("r", max_attempts=1))
    eventually(lambda: "retrying" in statuses(system, "r"), 30, worker.tail)
    with serving(200, port):
        ended = outcome(system, "r", 30)
    assert (ended.status, ended.error) == ("completed", None), worker.tail()
