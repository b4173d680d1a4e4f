"""What a request waits for, in each place that shows it: the object, lists, frames, and the view's file."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, cast

import pytest

from kit.gateway_records import model_info, request, status, worker
from kit.view_gateway import ViewGateway
from penstock.common.clock import now_ms
from penstock.gateway.service.facts import Facts
from penstock.gateway.service.subscriptions import Subscriptions
from penstock.gateway.view.entries import Entry
from penstock.gateway.view.frames import StatusFrame
from penstock.gateway.view.rows import facts_text, restored, snapshot
from penstock.schemas.records import ModelState, StatusEvent, WaitingFor
from penstock.schemas.topics import TopicNames

MEMORY = WaitingFor(reason="memory", position=3, need_bytes=70, free_bytes=20, estimated_start_at=1_763_735_000_123)
PUBLIC = {
    "reason": "memory",
    "position": 3,
    "need_bytes": 70,
    "free_bytes": 20,
    "estimated_start_at": "2025-11-21T14:23:20.123Z",
}


def waiting(why: WaitingFor | None, name: str = "queued", **fields: Any) -> StatusEvent:
    return status(name, position=None if why is None else why.position, waiting_for=why, **fields)


def entry(why: WaitingFor | None = MEMORY, **fields: Any) -> Entry:
    made = Entry("default", "r", 0, task="text_generation")
    made.on_status(waiting(why, **fields))
    return made


def test_object_and_frame_say_the_same() -> None:
    waits = entry(ttl_ms=60_000, model_reason="ready")
    shown = waits.to_json()
    assert shown["waiting_for"] == waits.status_frame().to_json()["waiting_for"] == PUBLIC
    assert (shown["ttl_ms"], shown["model_reason"]) == (60_000, "ready")
    assert entry(None, name="running").to_json()["waiting_for"] is None


def test_a_new_reason_is_news_and_a_new_estimate_is_none() -> None:
    waits = entry()
    assert waits.on_status(waiting(replace(MEMORY, estimated_start_at=9))) == []
    assert waits.to_json()["waiting_for"]["estimated_start_at"] == "1970-01-01T00:00:00.009Z"
    (frame,) = waits.on_status(waiting(WaitingFor(reason="class", position=3)))
    assert isinstance(frame, StatusFrame)
    assert frame.waiting_for is not None
    assert frame.waiting_for["reason"] == "class"


@pytest.mark.parametrize("later_fields", [3, 0])
def test_the_file_keeps_it(later_fields: int) -> None:
    """One of an earlier release has neither waiting_for nor what came after it."""
    waits = entry(MEMORY if later_fields else None)
    facts = json.loads(facts_text(snapshot(waits)))
    facts[6] = facts[6][: len(facts[6]) - 3 + later_fields]
    again = restored("default", "r", json.dumps(facts), accepted_ms=1, erased=False)
    assert again.status == waits.status


def test_without_a_worker_lists_and_first_frames_say_so(view_gateway: ViewGateway) -> None:
    gateway, follower = view_gateway, cast("Any", None)
    facts = Facts(gateway.view, follower, gateway.hub)
    parts = (gateway.view, follower, gateway.hub, TopicNames(), gateway.turns, facts.waits_unseen)
    waits = gateway.view.accepted(request())

    def shown() -> list[Any]:
        frame = Subscriptions(*parts).subscribe("default", "r").take_nowait()[0]
        return [facts.requests([waits])[0]["waiting_for"], frame.to_json()["waiting_for"]]

    assert shown() == [{**dict.fromkeys(PUBLIC), "reason": "no_worker"}] * 2
    gateway.view.fleet.workers["w"] = worker("w", ModelState(model="a", state="ready"), updated_at=now_ms())
    gateway.view.fleet.models["a", "w"] = model_info("a")
    assert shown() == [None, None]
