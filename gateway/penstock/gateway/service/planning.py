"""What would become of a request: which model, where, what it needs, how long it would wait and run. Pure.

Everything comes from what workers last told of themselves, some seconds ago at most; it is an estimate, not a promise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from penstock.gateway.service.models import find_model
from penstock.schemas.choosing import Candidate, Choice, choose, only
from penstock.schemas.errors import InsufficientCapacity
from penstock.schemas.records import TIMELESS_REASONS, InferenceRequest, ModelInfo, ModelState, WaitingFor, WorkerState
from penstock.schemas.topics import CLASSES, priority_class

READY, LOADING = "ready", "loading"
_SOONEST = (READY, LOADING, "absent", "unloading", "draining", "failed")
"""States of a model, the one that runs a request soonest first."""

RunMs = Callable[[str, InferenceRequest | None], float | None]
"""(model, the request; None: any) → milliseconds of a run, if that is known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Bytes and milliseconds; None is what nobody knows yet."""

    model: str | None
    model_reason: str
    klass: str
    worker_id: str | None = None
    device: str | None = None
    need_bytes: int | None = None
    free_bytes: int | None = None
    waiting_for: WaitingFor | None = None
    estimated_wait_ms: int | None = None
    estimated_run_ms: int | None = None


@dataclass(frozen=True, slots=True)
class _Place:
    """A model on a worker, all its engines there together."""

    worker: WorkerState
    state: str
    engines: tuple[ModelState, ...]

    @property
    def queued(self) -> int:
        """A worker that reports nothing by model counts as a whole."""
        told = any(one.queued for one in self.worker.models)
        return max(one.queued for one in self.engines) if told else sum(self.worker.queued.values())

    @property
    def running(self) -> int:
        told = any(one.running for one in self.worker.models)
        return sum(one.running for one in self.engines) if told else self.worker.running


def plan(
    request: InferenceRequest,
    models: Sequence[ModelInfo],
    workers: Iterable[WorkerState],
    run_ms: RunMs,
    now_ms: int,
    *,
    turns_before: int = 0,
) -> Plan:
    """`workers` are those that live; `turns_before` of its conversation and class are not done.

    Raises ModelNotFound, and InsufficientCapacity as a worker would.
    """
    klass = priority_class(request.priority)
    there = [worker for worker in workers if worker.pool == request.pool]
    known = {model.model: model for model in models if model.pool == request.pool and request.task in model.tasks}
    named = find_model(models, request.task, request.model, request.pool)
    choice = Choice(named or "", "it was named") if request.model is not None else _best(known, there)
    if choice is None or choice.model not in known:
        name = request.model if choice is None else choice.model
        return _unserved(name, "it is left to the worker" if choice is None else choice.reason, klass)
    name, reason = choice.model, choice.reason
    info = known[name]
    need_bytes = _need_bytes(request, info, there)
    _check_fits(request, info, there)
    place = min(_places(name, there), key=_soonness, default=None)
    if place is None:
        return _unserved(name, reason, klass, need_bytes)
    device, free_bytes = _device(place)
    wait_ms = _wait_ms(place, info, klass, run_ms(name, None))
    waiting = None
    if wait_ms != 0 or place.state != READY or _is_paused(place, name, klass):
        waiting = _waiting_for(place, name, klass, need_bytes, free_bytes)
        if waiting.reason in TIMELESS_REASONS:
            wait_ms = None
        elif wait_ms is not None:
            waiting = replace(waiting, estimated_start_at=now_ms + round(wait_ms))
    if turns_before and (waiting is None or waiting.reason != "paused"):
        # How long those run nobody has measured: a conversation's turns may ask anything of any model.
        waiting, wait_ms = WaitingFor(reason="conversation"), None
    return Plan(
        model=name,
        model_reason=reason or "",
        klass=klass,
        worker_id=place.worker.worker_id,
        device=device,
        need_bytes=need_bytes,
        free_bytes=free_bytes,
        waiting_for=waiting,
        estimated_wait_ms=_rounded(wait_ms),
        estimated_run_ms=_rounded(run_ms(name, request)),
    )


def _best(known: dict[str, ModelInfo], workers: list[WorkerState]) -> Choice | None:
    """As the worker chooses, to which it would come: the one where its model starts soonest."""
    if len(known) == 1:
        return only(next(iter(known)))
    candidates: list[Candidate] = []
    for name, info in known.items():
        if (place := min(_places(name, workers), key=_soonness, default=None)) is not None:
            candidates.append(_candidate(info, place))
    return choose(candidates)


def _candidate(info: ModelInfo, place: _Place) -> Candidate:
    order = [state.model for state in place.worker.models].index(info.model)  # workers tell them as configured
    loads = (info.load_seconds, *(one.load_seconds for one in place.engines))
    return Candidate(
        model=info.model,
        state=place.state,
        order=order,
        **({} if info.priority is None else {"priority": info.priority}),
        queued=place.queued + place.running,
        slots=max(1, info.max_batch_size or 1),
        load_s=next((seconds for seconds in loads if seconds is not None), None),
        paused=_is_paused(place, info.model),
    )


def _is_paused(place: _Place, model: str, klass: str | None = None) -> bool:
    """Whether the model is, or the class if one is given."""
    names = {model, f"model/{model}"} | (set() if klass is None else {klass, f"class/{klass}"})
    return not names.isdisjoint(place.worker.paused)


def _places(name: str, workers: list[WorkerState]) -> list[_Place]:
    places: list[_Place] = []
    for worker in workers:
        engines = tuple(state for state in worker.models if state.model == name)
        if engines:
            best = min(engines, key=lambda one: _rank(one.state)).state
            places.append(_Place(worker, best, engines))
    return places


def _rank(state: str) -> int:
    return _SOONEST.index(state) if state in _SOONEST else len(_SOONEST)


def _soonness(place: _Place) -> tuple[int, int]:
    return _rank(place.state), place.queued + place.running


def _need_bytes(request: InferenceRequest, info: ModelInfo, workers: list[WorkerState]) -> int | None:
    """What its model holds, or will; what the caller requires is a floor under it."""
    held = [one.reserved_bytes or one.memory_bytes for place in _places(info.model, workers) for one in place.engines]
    sizes = [size for size in (*held, info.weights_bytes) if size]
    asked = request.requirements
    floor = 0 if asked is None else max(asked.vram_bytes or 0, asked.cpu_memory_bytes or 0)
    return max([*sizes[:1], floor]) if sizes or floor else None


def _check_fits(request: InferenceRequest, info: ModelInfo, workers: list[WorkerState]) -> None:
    """Raises InsufficientCapacity for what no device of the pool could ever hold."""
    asked = request.requirements
    if asked is not None:
        _check_limit("the request", asked.vram_bytes, _limits(workers, on_cpu=False))
        _check_limit("the request", asked.cpu_memory_bytes, _limits(workers, on_cpu=True))
    everywhere = [*_limits(workers, on_cpu=False), *_limits(workers, on_cpu=True)]
    _check_limit(info.model, info.weights_bytes, everywhere)


def _limits(workers: list[WorkerState], *, on_cpu: bool) -> list[int]:
    """What the devices grant. Where there are no cards, main memory is asked for both."""
    return [
        device.total_bytes if device.limit_bytes is None else device.limit_bytes
        for worker in workers
        for device in worker.devices
        if (device.kind == "cpu") == on_cpu or all(one.kind == "cpu" for one in worker.devices)
    ]


def _check_limit(what: str, need: int | None, limits: list[int]) -> None:
    if need is not None and limits and need > max(limits):
        raise InsufficientCapacity(
            f"{what} needs {need / 2**20:.0f} MiB; the largest device grants {max(limits) / 2**20:.0f} MiB",
            details={"need": need, "capacity": max(limits), "unit": "bytes"},
        )


def _device(place: _Place) -> tuple[str | None, int | None]:
    """The device of its engine, or the one with the most room, and what is free there."""
    free = {
        device.device: max(
            0,
            (device.total_bytes if device.limit_bytes is None else device.limit_bytes)
            - device.reserved_bytes
            - (device.foreign_bytes or 0),
        )
        for device in place.worker.devices
    }
    own = next((one.device for one in place.engines if one.state == place.state and one.device), None)
    device = own or max(free, key=lambda name: free[name], default=None)
    return device, None if device is None else free.get(device)


def _wait_ms(place: _Place, info: ModelInfo, klass: str, mean_run_ms: float | None) -> float | None:
    """Those of its class and above it that wait for the model come before it; a slot becomes free every run ÷ slots."""
    load_ms = 0.0
    if place.state != READY:
        seconds = [s for s in (info.load_seconds, *(one.load_seconds for one in place.engines)) if s is not None]
        if not seconds:
            return None
        progress = max((one.progress or 0.0 for one in place.engines), default=0.0)
        load_ms = 1000 * seconds[0] * (1 - progress)
    queued = place.worker.queued
    share = sum(queued.get(one, 0) for one in CLASSES[: CLASSES.index(klass) + 1]) / max(1, sum(queued.values()))
    ahead = place.queued * share
    slots = max(1, info.max_batch_size or place.running)
    must_end = ahead + place.running - slots + 1
    if must_end <= 0 or (place.queued == 0 and info.max_batch_size is None):
        return load_ms
    return None if mean_run_ms is None else load_ms + mean_run_ms * must_end / slots


def _waiting_for(place: _Place, model: str, klass: str, need_bytes: int | None, free_bytes: int | None) -> WaitingFor:
    """What it would wait for, without a time."""
    if _is_paused(place, model, klass):
        reason = "paused"
    elif place.state == "absent" and (need_bytes or 0) > (free_bytes or 0):
        reason = "memory"
    else:
        reason = "class" if place.state == READY else "model_loading"
    memory = reason == "memory"
    return WaitingFor(
        reason=reason,
        position=place.queued,
        need_bytes=need_bytes if memory else None,
        free_bytes=free_bytes if memory else None,
    )


def _unserved(model: str | None, reason: str | None, klass: str, need_bytes: int | None = None) -> Plan:
    waiting = WaitingFor(reason="no_worker")
    return Plan(model=model, model_reason=reason or "", klass=klass, need_bytes=need_bytes, waiting_for=waiting)


def _rounded(value: float | None) -> int | None:
    return None if value is None else round(value)
