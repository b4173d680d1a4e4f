"""What operators are told: of the workers that live."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.common.clock import now_ms
from penstock.gateway.metrics import GatewayMetrics
from penstock.gateway.service.facts import Facts
from penstock.gateway.view.hub import Hub
from penstock.gateway.view.store import Store
from penstock.gateway.view.view import View
from penstock.schemas.records import DeviceState, InferenceRequest, ModelInfo, ModelState, Origin, WorkerState
from penstock.schemas.topics import TopicNames


@pytest.fixture
def view(tmp_path: Path) -> Iterator[View]:
    store = Store(tmp_path / "view.sqlite", "cluster")
    yield View(store, Hub(), TopicNames(), 1)
    store.close()


def worker(name: str, state: str) -> WorkerState:
    device = DeviceState(device="cuda:0", kind="gpu", total_bytes=100, reserved_bytes=20, used_bytes=10)
    return WorkerState(worker_id=name, state=state, started_at=1, updated_at=1, devices=[device])


def test_the_memory_of_workers_that_stopped_is_not_counted(view: View) -> None:
    """Their last word stands on the topic for a day; the device is the next worker's."""
    follower: Any = None
    facts = Facts(view, follower, Hub())
    view.fleet.workers = {
        name: worker(name, state) for name, state in (("a", "running"), ("b", "stopped"), ("c", "stopping"))
    }
    assert facts.gauges().device_memory[("cuda:0", "limit")] == 200


def test_a_dry_run_knows_the_turns_of_its_class_that_are_not_done(view: View) -> None:
    follower: Any = None
    facts = Facts(view, follower, Hub())
    at_ms = now_ms()
    info = ModelInfo(
        model="m", tasks=["text_generation"], engine="noop", state="ready", updated_at=at_ms, worker_id="w"
    )
    serves = ModelState(model="m", state="ready")
    view.fleet.models = {("m", ""): info}
    view.fleet.workers = {
        "w": WorkerState(worker_id="w", state="running", started_at=1, updated_at=at_ms, models=[serves])
    }

    def asked(request_id: str, conversation: str, priority: int) -> InferenceRequest:
        return InferenceRequest(
            request_id=request_id,
            tenant="t",
            task="text_generation",
            priority=priority,
            conversation_id=conversation,
            text_generation={"messages": []},
            created_at=at_ms,
        )

    place = Origin(topic="inference.request.medium", partition=0, offset=0, append_time_ms=at_ms)
    view.accepted(asked("first", "c1", 5), place)
    reasons = [
        (facts.plan(asked("next", conversation, priority))["waiting_for"] or {}).get("reason")
        for conversation, priority in (("c1", 5), ("c1", 0), ("c2", 5))
    ]
    assert reasons == ["conversation", None, None]


def test_no_gauge_tells_when_a_counter_began() -> None:
    assert "_created" not in GatewayMetrics().render().decode()
