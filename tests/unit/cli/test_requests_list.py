"""`penstock requests list`: what waits is asked for by several statuses."""

from __future__ import annotations

import json

from kit.cli import Json, ScriptedGateway
from penstock.cli.commands.requests import WAITING


def one(request_id: str, status: str, created_at: str | None) -> Json:
    return {"request_id": request_id, "status": status, "done": False, "created_at": created_at}


def test_what_moves_on_between_two_calls_is_listed_once_as_it_stands_last(gateway: ScriptedGateway) -> None:
    """What was accepted before its request was read has no time yet."""
    pages = [{"data": [], "has_more": False} for _ in WAITING]
    pages[0]["data"] = [one("moves", "accepted", "2026-01-01T00:00:02Z"), one("new", "accepted", None)]
    pages[1]["data"] = [one("moves", "queued", "2026-01-01T00:00:02Z"), one("old", "queued", "2026-01-01T00:00:01Z")]
    gateway.play({"GET /v1/requests": pages})
    done = gateway.run("requests", "list", "--status", "waiting", "--json")
    assert done.exit_code == 0, done.output
    listed = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(found["request_id"], found["status"]) for found in listed] == [
        ("moves", "queued"),
        ("old", "queued"),
        ("new", "accepted"),
    ]
