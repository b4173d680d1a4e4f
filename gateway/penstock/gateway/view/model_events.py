"""Loads, unloads and evictions of models, as they follow from two reports of a worker. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, dataclass, replace
from typing import Any

from penstock.schemas.records import ModelState, WorkerState
from penstock.schemas.times import rfc3339

MOST_EVENTS, MOST_WORKERS = 1_000, 10_000
SILENT_MS = 60_000
"""After so long without a report of the newest process of a worker an earlier start counts: clocks are set back."""
LOADED = ("ready", "draining")
ENDING = ("unloading", "absent")
STOPPED = "stopped"
NO_EVICTION = frozenset({"desired", "keep_alive", "removed", "replaced", "too_small"})
"""Reasons of a replica's end that is not for another model."""
_NOTHING = ModelState(model="", state="absent")
ReplicaKey = tuple[str, int]
"""(model, replica)"""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelEvent:
    """`event`: loading, loaded, unloaded, evicted or failed. `cause` is for operators."""

    at_ms: int
    event: str
    model: str
    pool: str | None
    worker_id: str
    replica: int
    device: str | None
    load_seconds: float | None = None
    reason: str | None = None
    cause: str | None = None

    def to_json(self) -> dict[str, Any]:
        shown = asdict(self)
        return {"object": "model.event", "at": rfc3339(shown.pop("at_ms")), **shown}


class ModelEvents:
    """The newest `MOST_EVENTS`. The first report of a worker says what is loaded, not when it was: it is no event."""

    def __init__(self) -> None:
        self._events: deque[ModelEvent] = deque(maxlen=MOST_EVENTS)
        self._last: dict[str, tuple[WorkerState, int]] = {}
        """The last report of each worker, and when it was heard. What has ended is left out. The oldest is first."""

    def on_report(self, now: WorkerState, heard_ms: int) -> None:
        """The report as the worker wrote it. Of two processes with one id the one counts that started last."""
        before, before_ms = self._last.get(now.worker_id, (None, 0))
        if before is not None and now.started_at < before.started_at and heard_ms - before_ms < SILENT_MS:
            return
        self._keep(replace(now, models=[]) if now.state == STOPPED else now, heard_ms)
        if before is None:
            return
        was = {(one.model, one.replica): one for one in before.models}
        if (stays := _stays(before, now)) and before.started_at == now.started_at and now.state != STOPPED:
            now = replace(now, models=[*now.models, *stays])
            self._keep(now, heard_ms)
        if before.started_at != now.started_at:
            self._ended(before, was, now.started_at, "worker_restarted")
            was = {}
        if now.state == STOPPED:
            self._ended(before, was, now.updated_at, "worker_stopped")
            return
        are = {(one.model, one.replica): one for one in now.models}
        evicted = now.evictions_total > before.evictions_total
        for place in was.keys() | are.keys():
            then, state = was.get(place, _NOTHING), are.get(place, _NOTHING)
            if (found := _event(then, state, evicted=evicted)) is not None:
                event, reason = found
                made = _made(now, place, now.updated_at, event, reason)
                device, load_seconds = state.device or then.device, state.load_seconds if event == "loaded" else None
                cause = state.cause if event == "failed" else None
                self._events.append(replace(made, device=device, load_seconds=load_seconds, cause=cause))

    def on_lost(self, worker_id: str) -> None:
        """Nothing was heard of the worker for long, or its record was taken away."""
        if (last := self._last.get(worker_id)) is not None:
            state, heard_ms = last
            was = {(one.model, one.replica): one for one in state.models}
            self._ended(state, was, state.updated_at, "worker_lost")
            self._keep(replace(state, models=[]), heard_ms)

    def newest(self) -> list[ModelEvent]:
        """The newest first, by the times of the reports."""
        told = reversed(self._events)
        return sorted(told, key=lambda one: (one.at_ms, one.worker_id, one.model, one.replica), reverse=True)

    def _keep(self, state: WorkerState, heard_ms: int) -> None:
        self._last.pop(state.worker_id, None)
        self._last[state.worker_id] = (state, heard_ms)
        if len(self._last) > MOST_WORKERS:
            del self._last[next(iter(self._last))]

    def _ended(self, worker: WorkerState, was: dict[ReplicaKey, ModelState], at_ms: int, reason: str) -> None:
        for place, state in was.items():
            if state.state in LOADED:
                self._events.append(replace(_made(worker, place, at_ms, "unloaded", reason), device=state.device))


def _stays(before: WorkerState, now: WorkerState) -> list[ModelState]:
    """Replicas of models that the worker no longer serves and that still hold memory: requests run on them."""
    served = {one.model for one in now.models}
    held = {holder.model for device in now.devices for holder in device.holders} - served
    return [
        replace(one, state="draining", reason="removed")
        for one in before.models
        if one.state in LOADED and one.model in held
    ]


def _event(was: ModelState, now: ModelState, *, evicted: bool) -> tuple[str, str | None] | None:
    """(event, reason) of a replica, if something happened to it."""
    before, after = _state(was), _state(now)
    if after == "loading" and before != "loading":
        return "loading", now.reason
    if after == "ready" and before not in LOADED:
        return "loaded", None
    if after == "failed" and before != "failed":
        return "failed", now.reason
    if before in (*LOADED, "loading") and after in ENDING:
        reason = now.reason if after == "unloading" else was.reason
        is_for_another = evicted and before in LOADED and reason not in NO_EVICTION
        return "evicted" if is_for_another else "unloaded", reason
    return None


def _state(state: ModelState) -> str:
    """Its size is measured before it gets a device: that is no load."""
    return "absent" if state.state == "loading" and state.device is None else state.state


def _made(worker: WorkerState, place: ReplicaKey, at_ms: int, event: str, reason: str | None) -> ModelEvent:
    model, replica = place
    return ModelEvent(
        at_ms=at_ms,
        event=event,
        model=model,
        pool=worker.pool,
        worker_id=worker.worker_id,
        replica=replica,
        device=None,
        reason=reason,
    )
