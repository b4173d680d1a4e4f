"""Dry runs: which model and device a request would get, what it needs, how long it would wait; and who is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from penstock.gateway.service.planning import Plan, plan
from penstock.gateway.service.run_times import RunTimes
from penstock.schemas.errors import InsufficientCapacity, ModelNotFound
from penstock.schemas.records import (
    DeviceState,
    InferenceRequest,
    ModelInfo,
    ModelState,
    Origin,
    Requirements,
    ResultEvent,
    Timings,
    Usage,
    WaitingFor,
    WorkerState,
)

GIB = 1 << 30
REQUEST = InferenceRequest(
    request_id="r", tenant="default", task="text_generation", priority=5, text_generation={"prompt": "x"}, created_at=1
)


def model(name: str, **fields: Any) -> ModelInfo:
    return ModelInfo(
        model=name, tasks=["text_generation"], engine="text", state="ready", updated_at=1, worker_id="w", **fields
    )


def card(name: str = "cuda:0", **fields: Any) -> DeviceState:
    sizes: dict[str, Any] = {"limit_bytes": 70 * GIB, "reserved_bytes": 10 * GIB, "foreign_bytes": 5 * GIB, **fields}
    return DeviceState(device=name, kind="cuda", total_bytes=80 * GIB, used_bytes=0, **sizes)


def worker(*states: ModelState, name: str = "w", **fields: Any) -> WorkerState:
    return WorkerState(
        worker_id=name, state="running", started_at=1, updated_at=1, models=list(states), devices=[card()], **fields
    )


def planned(*workers: WorkerState, models: list[ModelInfo], request: InferenceRequest = REQUEST) -> Plan:
    return plan(request, models, workers, lambda name, tokens: 1_000.0, 50_000)


def test_a_ready_model_with_free_slots_starts_at_once() -> None:
    state = ModelState(model="a", state="ready", device="cuda:0", reserved_bytes=8 * GIB, running=1)
    found = planned(worker(state), models=[model("a", max_batch_size=4)])
    assert (found.model, found.device, found.need_bytes, found.free_bytes) == ("a", "cuda:0", 8 * GIB, 55 * GIB)
    assert (found.estimated_wait_ms, found.estimated_run_ms, found.waiting_for) == (0, 1_000, None)


def test_the_wait_counts_its_class_and_those_above() -> None:
    state = ModelState(model="a", state="ready", running=4, queued=40)
    busy = worker(state, queued={"high": 10, "medium": 10, "low": 20})
    models = [model("a", max_batch_size=4)]
    medium = planned(busy, models=models)
    high = planned(busy, models=models, request=replace(REQUEST, priority=0))
    assert medium.estimated_wait_ms == 1_000 * (20 + 1) / 4
    assert high.estimated_wait_ms == 1_000 * (10 + 1) / 4
    assert medium.waiting_for is not None
    assert (medium.waiting_for.reason, medium.waiting_for.estimated_start_at) == ("class", 55_250)


def test_a_worker_that_tells_nothing_by_model_is_taken_as_a_whole() -> None:
    busy = worker(ModelState(model="a", state="ready"), queued={"medium": 2}, running=1)
    assert planned(busy, models=[model("a")]).estimated_wait_ms == 1_000 * (2 + 1)


def test_without_a_name_the_best_ready_model_is_taken_else_the_soonest() -> None:
    models = [model("busy"), model("free"), model("cold", load_seconds=30.0)]  # told in the order of the topic
    ready = [ModelState(model="busy", state="ready", queued=9), ModelState(model="free", state="ready", queued=1)]
    cold = ModelState(model="cold", state="absent")
    assert planned(worker(*ready, cold), models=models).model == "free"
    loading = ModelState(model="busy", state="loading", progress=0.5, load_seconds=20.0)
    found = planned(worker(loading, cold), models=models)
    assert (found.model, found.estimated_wait_ms) == ("busy", 10_000)
    assert found.model_reason == "none is ready; it is loading"
    assert found.waiting_for is not None
    assert found.waiting_for.reason == "model_loading"


def test_the_choice_is_that_of_a_worker() -> None:
    """By priority, then as they stand in its configuration: the order in which it tells them."""
    states = [ModelState(model=name, state="ready") for name in ("tiny", "second", "first")]
    models = [model("first"), model("second"), model("tiny", priority=6)]
    found = planned(worker(*states), models=models)
    assert (found.model, found.model_reason) == ("second", "it is ready; first in the configuration")
    only = planned(worker(*states[:1]), models=models[-1:])
    assert (only.model, only.model_reason) == ("tiny", "it is the only model for the task")
    paused = planned(worker(*states, paused=["model/second"]), models=models)
    assert paused.model == "first"


def test_a_model_that_does_not_fit_now_waits_for_memory() -> None:
    found = planned(
        worker(ModelState(model="a", state="absent")), models=[model("a", weights_bytes=60 * GIB, load_seconds=9.0)]
    )
    assert found.waiting_for is not None
    assert (found.waiting_for.reason, found.waiting_for.need_bytes) == ("memory", 60 * GIB)
    assert found.need_bytes == 60 * GIB
    # Nobody knows when others give memory back.
    assert (found.estimated_wait_ms, found.waiting_for.estimated_start_at) == (None, None)


def test_a_turn_waits_for_those_before_it_however_free_its_model_is() -> None:
    """A dry run said that it would start at once."""
    there = worker(ModelState(model="chat", state="ready"))
    found = plan(REQUEST, [model("chat")], [there], lambda name, tokens: 1_000.0, 50_000, turns_before=2)
    assert found.waiting_for == WaitingFor(reason="conversation")
    assert found.estimated_wait_ms is None
    paused = replace(there, paused=["model/chat"])
    found = plan(REQUEST, [model("chat")], [paused], lambda name, tokens: 1_000.0, 50_000, turns_before=2)
    assert found.waiting_for is not None
    assert found.waiting_for.reason == "paused"


@pytest.mark.parametrize("name", ["a", "model/a", "class/medium"])
def test_what_is_paused_has_no_time(name: str) -> None:
    found = planned(worker(ModelState(model="a", state="ready"), paused=[name]), models=[model("a")])
    assert found.waiting_for is not None
    assert (found.waiting_for.reason, found.waiting_for.estimated_start_at) == ("paused", None)


def test_without_a_worker_it_would_wait_for_one() -> None:
    found = planned(models=[model("a")])
    assert found.waiting_for is not None
    assert (found.model, found.waiting_for.reason, found.estimated_wait_ms) == ("a", "no_worker", None)


def test_what_can_never_fit_and_what_does_not_exist_is_refused() -> None:
    state = ModelState(model="a", state="ready")
    needs = replace(REQUEST, requirements=Requirements(vram_bytes=75 * GIB))
    with pytest.raises(InsufficientCapacity) as refused:
        planned(worker(state), models=[model("a")], request=needs)
    assert refused.value.details == {"need": 75 * GIB, "capacity": 70 * GIB, "unit": "bytes"}
    with pytest.raises(InsufficientCapacity) as too_large:
        planned(worker(state), models=[model("a", weights_bytes=600 * GIB)])
    assert too_large.value.details == {"need": 600 * GIB, "capacity": 70 * GIB, "unit": "bytes"}
    with pytest.raises(ModelNotFound):
        planned(worker(state), models=[model("a")], request=replace(REQUEST, model="b"))


ORIGIN = Origin(topic="t", partition=0, offset=0, append_time_ms=1)
DONE = ResultEvent(
    request_id="r",
    tenant="default",
    kind="terminal",
    origin=ORIGIN,
    attempt=1,
    epoch=1,
    task="text_generation",
    created_at=1,
    worker_id="w",
    status="completed",
    model="a",
    usage=Usage(prompt_tokens=5, completion_tokens=100, total_tokens=105),
    timings=Timings(queued_ms=0, run_ms=2_000),
    metadata={},
)


def test_run_times_are_means_of_what_completed() -> None:
    times = RunTimes()
    times.on_outcome(replace(DONE, status="failed"))
    assert times.run_ms("a") is None
    times.on_outcome(DONE)
    times.on_outcome(replace(DONE, timings=Timings(queued_ms=0, run_ms=3_000)))
    assert times.run_ms("a") == pytest.approx(2_100)
    assert times.run_ms("a", asking(50)) == pytest.approx(1_050)
    assert times.run_ms("a", asking(500)) == pytest.approx(2_100)
    assert times.run_ms("a", asking(None)) == pytest.approx(2_100)


def asking(max_tokens: int | None) -> InferenceRequest:
    return replace(REQUEST, text_generation={"prompt": "x", "max_tokens": max_tokens})


def test_what_is_drawn_takes_time_in_proportion_to_its_pixels_and_steps() -> None:
    times = RunTimes()

    def drawing(request_id: str, **payload: Any) -> InferenceRequest:
        given = {"prompt": "a cat", "width": 64, "height": 64, "inference_steps": 99, "n": 1, **payload}
        return InferenceRequest(request_id=request_id, task="image_generation", created_at=1, image_generation=given)

    def ran(request: InferenceRequest, run_ms: int, status: str = "completed") -> None:
        event = replace(DONE, request_id=request.request_id, task=request.task, status=status)
        times.on_outcome(replace(event, model="painter", timings=Timings(queued_ms=0, run_ms=run_ms)))

    small, large = drawing("small", width=640, height=640), drawing("large", width=1280, height=1280, n=4)
    assert times.run_ms("painter", small) is None
    ran(drawing("unheard"), 500)
    assert times.run_ms("painter", large) == 500, "of a request that nobody heard of only the time is known"
    times.on_request(small)
    ran(small, 1_000)
    assert times.run_ms("painter", small) == pytest.approx(1_000)
    assert times.run_ms("painter", large) == pytest.approx(16_000, rel=0.01)
    assert times.run_ms("painter", drawing("fewer", width=640, height=640, inference_steps=49)) == pytest.approx(
        500, rel=0.01
    )
    times.on_request(large)
    ran(large, 32_000, "failed")
    assert times.run_ms("painter", small) == pytest.approx(1_000), "only completed runs count"
    times.on_request(REQUEST)
    assert not times._costs, "what has ended is forgotten, and text is not remembered"  # pyright: ignore[reportPrivateUsage]
