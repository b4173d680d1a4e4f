"""Dry runs: which model and device a request would get, what it needs, how long it would wait; and refusals."""

from __future__ import annotations

from typing import Any

import pytest

from kit.records import model_info, outcome, request
from kit.records import worker as worker_state
from kit.refusals import refused
from penstock.gateway.service import run_times
from penstock.gateway.service.planning import Plan, plan
from penstock.gateway.service.run_times import RunTimes
from penstock.schemas.errors import InsufficientCapacity, ModelNotFound
from penstock.schemas.records import (
    DeviceState,
    InferenceRequest,
    ModelInfo,
    ModelState,
    Requirements,
    ResultEvent,
    Timings,
    Usage,
    WaitingFor,
    WorkerState,
)

GIB = 1 << 30
CARD = DeviceState(
    device="cuda:0",
    kind="cuda",
    total_bytes=80 * GIB,
    used_bytes=0,
    limit_bytes=70 * GIB,
    reserved_bytes=10 * GIB,
    foreign_bytes=5 * GIB,
)


def state(model: str = "a", state: str = "ready", **fields: Any) -> ModelState:
    return ModelState(model=model, state=state, **fields)


def worker(*states: ModelState, **fields: Any) -> WorkerState:
    return worker_state("w", *states, devices=[CARD], **fields)


def planned(
    *workers: WorkerState, models: list[ModelInfo], request: InferenceRequest = request(), turns_before: int = 0
) -> Plan:
    return plan(request, models, workers, lambda name, tokens: 1_000.0, 50_000, turns_before=turns_before)


def reason(found: Plan) -> str | None:
    return None if found.waiting_for is None else found.waiting_for.reason


def test_a_ready_model_with_free_slots_starts_at_once() -> None:
    free = state(device="cuda:0", reserved_bytes=8 * GIB, running=1)
    found = planned(worker(free), models=[model_info("a", max_batch_size=4)])
    assert (found.model, found.device, found.need_bytes, found.free_bytes) == ("a", "cuda:0", 8 * GIB, 55 * GIB)
    assert (found.estimated_wait_ms, found.estimated_run_ms, found.waiting_for) == (0, 1_000, None)


LARGE = model_info("a", weights_bytes=60 * GIB, load_seconds=9.0)
BUSY = worker(state(running=4, queued=40), queued={"high": 10, "medium": 10, "low": 20})
FOUR = model_info("a", max_batch_size=4)


@pytest.mark.parametrize(
    ("workers", "model", "fields", "why", "wait_ms", "start_at"),
    [
        # Its class and those above count.
        ([BUSY], FOUR, {}, "class", 1_000 * (20 + 1) / 4, 55_250),
        ([BUSY], FOUR, {"request": request(priority=0)}, "class", 1_000 * (10 + 1) / 4, 52_750),
        # A worker without figures by model is taken as a whole.
        ([worker(state(), queued={"medium": 2}, running=1)], model_info("a"), {}, "class", 1_000 * (2 + 1), 53_000),
        # When others release memory, a pause ends or a turn ends is unknown.
        ([worker(state("a", "absent"))], LARGE, {}, "memory", None, None),
        ([worker(state(), paused=["a"])], model_info("a"), {}, "paused", None, None),
        ([worker(state(), paused=["model/a"])], model_info("a"), {}, "paused", None, None),
        ([worker(state(), paused=["class/medium"])], model_info("a"), {}, "paused", None, None),
        ([worker(state())], model_info("a"), {"turns_before": 2}, "conversation", None, None),
        ([worker(state(), paused=["model/a"])], model_info("a"), {"turns_before": 2}, "paused", None, None),
        ([], model_info("a"), {}, "no_worker", None, None),
    ],
)
def test_what_a_request_would_wait_for(
    workers: Any, model: ModelInfo, fields: Any, why: str, wait_ms: float | None, start_at: int | None
) -> None:
    found = planned(*workers, models=[model], **fields)
    assert (found.model, found.waiting_for.reason, found.estimated_wait_ms) == ("a", why, wait_ms)
    assert found.waiting_for.estimated_start_at == start_at
    if why == "memory":
        assert (found.waiting_for.need_bytes, found.need_bytes) == (60 * GIB, 60 * GIB)
    if why == "conversation":
        assert found.waiting_for == WaitingFor(reason="conversation")


def test_without_a_name_the_best_ready_model_is_taken_else_the_soonest() -> None:
    models = [model_info("busy"), model_info("free"), model_info("cold", load_seconds=30.0)]  # in the topic's order
    cold = state("cold", "absent")
    assert planned(worker(state("busy", queued=9), state("free", queued=1), cold), models=models).model == "free"
    loading = state("busy", "loading", progress=0.5, load_seconds=20.0)
    found = planned(worker(loading, cold), models=models)
    assert (found.model, found.estimated_wait_ms) == ("busy", 10_000)
    assert (found.model_reason, reason(found)) == ("none is ready; it is loading", "model_loading")


def test_the_choice_is_that_of_a_worker() -> None:
    """By priority, then in the order of its configuration, in which it reports them."""
    states = [state(name) for name in ("tiny", "second", "first")]
    models = [model_info("first"), model_info("second"), model_info("tiny", priority=6)]
    found = planned(worker(*states), models=models)
    assert (found.model, found.model_reason) == ("second", "it is ready; first in the configuration")
    only = planned(worker(*states[:1]), models=models[-1:])
    assert (only.model, only.model_reason) == ("tiny", "it is the only model for the task")
    paused = planned(worker(*states, paused=["model/second"]), models=models)
    assert paused.model == "first"
    klass = planned(worker(*states, paused=["class/medium"]), models=models)
    assert (klass.model, klass.model_reason) == ("second", "it is ready; first in the configuration")


@pytest.mark.parametrize(
    ("asked", "weights_gib", "need_gib"),
    [(request(requirements=Requirements(vram_bytes=75 * GIB)), None, 75), (request(), 600, 600)],
)
def test_a_request_that_can_never_run_is_refused(
    asked: InferenceRequest, weights_gib: int | None, need_gib: int
) -> None:
    large = model_info("a", weights_bytes=weights_gib and weights_gib * GIB)
    with refused(InsufficientCapacity, details={"need": need_gib * GIB, "capacity": 70 * GIB, "unit": "bytes"}):
        planned(worker(state()), models=[large], request=asked)
    with pytest.raises(ModelNotFound):
        planned(worker(state()), models=[large], request=request(model="b"))


# -- run times


def ran(asked: InferenceRequest, run_ms: int, status: str = "completed") -> ResultEvent:
    usage = Usage(prompt_tokens=5, completion_tokens=100, total_tokens=105)
    timings = Timings(queued_ms=0, run_ms=run_ms)
    return outcome(asked.request_id, task=asked.task, status=status, model="a", usage=usage, timings=timings)


def test_run_times_are_means_of_completed_runs() -> None:
    times = RunTimes()
    times.on_outcome(ran(request(), 2_000, "failed"))
    assert times.run_ms("a") is None
    times.on_outcome(ran(request(), 2_000))
    times.on_outcome(ran(request(), 3_000))
    assert times.run_ms("a") == pytest.approx(2_100)
    for max_tokens, run_ms in ((50, 1_050), (500, 2_100), (None, 2_100)):
        asked = request(text_generation={"prompt": "x", "max_tokens": max_tokens})
        assert times.run_ms("a", asked) == pytest.approx(run_ms)


def drawing(request_id: str, side: int = 64, steps: int = 99, n: int = 1) -> InferenceRequest:
    payload = {"prompt": "a cat", "width": side, "height": side, "inference_steps": steps, "n": n}
    return request(request_id, task="image_generation", image_generation=payload)


def test_drawing_takes_time_in_proportion_to_pixels_and_steps() -> None:
    times = RunTimes()
    small, large = drawing("small", 640), drawing("large", 1280, n=4)
    assert times.run_ms("a", small) is None
    times.on_outcome(ran(drawing("unknown"), 500))
    assert times.run_ms("a", large) == 500, "only the time of an unknown request is known"
    times.on_request(small)
    times.on_outcome(ran(small, 1_000))
    for asked, run_ms in ((small, 1_000), (large, 16_000), (drawing("fewer", 640, steps=49), 500)):
        assert times.run_ms("a", asked) == pytest.approx(run_ms, rel=0.01)
    times.on_request(large)
    times.on_outcome(ran(large, 32_000, "failed"))
    assert times.run_ms("a", small) == pytest.approx(1_000), "only completed runs count"


def test_only_the_newest_drawings_under_way_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_times, "MOST_UNDER_WAY", 2)
    times, large = RunTimes(), drawing("large", 1280)
    for asked in (drawing("a", 320), request("text"), drawing("b", 320)):
        times.on_request(asked)
    times.on_outcome(ran(drawing("b", 320), 10))
    assert times.run_ms("a", large) == pytest.approx(160), "16 times the pixels"
    times.on_request(drawing("c", 320))
    times.on_outcome(ran(drawing("a", 320), 20))
    assert times.run_ms("a", large) == pytest.approx(176)
    for name in ("d", "e"):
        times.on_request(drawing(name))
    times.on_outcome(ran(drawing("c", 320), 9_000))
    assert times.run_ms("a", large) == pytest.approx(176), "its size is forgotten"
