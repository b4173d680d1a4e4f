"""What a request waits for, on every way out: the object, lists, frames, and the view's file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.common.clock import now_ms
from penstock.gateway.service.facts import Facts
from penstock.gateway.service.subscriptions import Subscriptions
from penstock.gateway.view.entries import Entry
from penstock.gateway.view.frames import StatusFrame
from penstock.gateway.view.hub import Hub
from penstock.gateway.view.rows import facts_text, restored, snapshot
from penstock.gateway.view.store import Store
from penstock.gateway.view.view import View
from penstock.schemas.records import (
    STATUS_RANKS,
    InferenceRequest,
    ModelInfo,
    ModelState,
    Origin,
    StatusEvent,
    WaitingFor,
    WorkerState,
)
from penstock.schemas.topics import TopicNames

ORIGIN = Origin(topic="inference.request.medium", partition=0, offset=1, append_time_ms=1_763_735_000_000)
MEMORY = WaitingFor(reason="memory", position=3, need_bytes=70, free_bytes=20, estimated_start_at=1_763_735_000_123)
PUBLIC = {
    "reason": "memory",
    "position": 3,
    "need_bytes": 70,
    "free_bytes": 20,
    "estimated_start_at": "2025-11-21T14:23:20.123Z",
}


def status(waiting: WaitingFor | None, name: str = "queued", **fields: Any) -> StatusEvent:
    return StatusEvent(
        request_id="r",
        tenant="default",
        status=name,
        done=False,
        rank=STATUS_RANKS[name],
        attempt=1,
        epoch=1,
        origin=ORIGIN,
        worker_id="w",
        created_at=1,
        position=None if waiting is None else waiting.position,
        waiting_for=waiting,
        **fields,
    )


def entry(waiting: WaitingFor | None = MEMORY, **fields: Any) -> Entry:
    made = Entry("default", "r", 0, task="text_generation")
    made.on_status(status(waiting, **fields))
    return made


def test_object_and_frame_say_the_same() -> None:
    waits = entry(ttl_ms=60_000, model_reason="ready")
    shown = waits.to_json()
    assert shown["waiting_for"] == waits.status_frame().to_json()["waiting_for"] == PUBLIC
    assert (shown["ttl_ms"], shown["model_reason"]) == (60_000, "ready")
    assert entry(None, name="running").to_json()["waiting_for"] is None


def test_a_new_reason_is_news_and_a_new_estimate_is_none() -> None:
    waits = entry()
    later = WaitingFor(reason="memory", position=3, need_bytes=70, free_bytes=20, estimated_start_at=9)
    assert waits.on_status(status(later)) == []
    assert waits.to_json()["waiting_for"]["estimated_start_at"] == "1970-01-01T00:00:00.009Z"
    (frame,) = waits.on_status(status(WaitingFor(reason="class", position=3)))
    assert isinstance(frame, StatusFrame)
    assert frame.waiting_for is not None
    assert frame.waiting_for["reason"] == "class"


def test_the_view_s_file_keeps_it() -> None:
    waits = entry()
    again = restored("default", "r", facts_text(snapshot(waits)), accepted_ms=1, erased=False)
    assert again.status == waits.status


def test_a_file_of_an_earlier_release_is_read() -> None:
    """Its statuses have neither waiting_for nor what came after it."""
    facts = json.loads(facts_text(snapshot(entry(None))))
    facts[6] = facts[6][:-3]
    again = restored("default", "r", json.dumps(facts), accepted_ms=1, erased=False)
    assert again.status == status(None)


@pytest.fixture
def view(tmp_path: Path) -> Iterator[View]:
    store = Store(tmp_path / "view.sqlite", "cluster")
    yield View(store, Hub(), TopicNames(), 1)
    store.close()


def test_without_a_worker_lists_and_first_frames_say_so_too(view: View) -> None:
    follower: Any = None
    hub = Hub()
    facts = Facts(view, follower, hub)
    subscriptions = Subscriptions(view, follower, hub, TopicNames(), facts.waits_for_worker)
    request = InferenceRequest(
        request_id="r", tenant="default", task="text_generation", text_generation={"prompt": "x"}, created_at=1
    )
    waits = view.accepted(request)

    def told() -> tuple[Any, Any]:
        listed = facts.requests([waits])[0]["waiting_for"]
        frame = subscriptions.subscribe("default", "r").take_nowait()[0]
        return listed, frame.to_json()["waiting_for"]

    nobody = {**dict.fromkeys(PUBLIC), "reason": "no_worker"}
    assert told() == (nobody, nobody)
    live = WorkerState(
        worker_id="w",
        state="running",
        started_at=1,
        updated_at=now_ms(),
        models=[ModelState(model="a", state="ready")],
    )
    view.fleet.workers["w"] = live
    view.fleet.models[("a", "w")] = ModelInfo(
        model="a", tasks=["text_generation"], engine="noop", state="ready", updated_at=1, worker_id="w"
    )
    assert told() == (None, None)
