"""Which models the live workers serve, of this pool and of others, as they report. Pure: reports are the only clock.

A worker hears its own reports too. If it hears none, because Kafka is away, then no time passes here: nothing becomes
late, and nothing is judged to be absent.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from typing import NamedTuple
from zlib import crc32

from penstock.schemas.records import ModelState, WorkerState

LATE_MS = 20_000
"""A worker whose newest report is older than this, compared with the newest one of all, is not counted as live."""


class Wanted(NamedTuple):
    """What a request asks of a worker. `model`: an id or an alias; None: any model for the task."""

    task: str
    model: str | None
    ability: str | None = None

    def is_served_by(self, one: ModelState) -> bool:
        """Whether the model serves the request. A worker of an earlier release reports ids alone."""
        if one.state == "failed":
            return False
        if not one.tasks:
            return self.model == one.model
        named = self.model is None or self.model == one.model or self.model in one.aliases
        return named and self.task in one.tasks and (self.ability is None or self.ability in one.abilities)


class Peers:
    """The newest report of each live worker, this one included. Those of this pool count, or others are named."""

    def __init__(self, worker_id: str | None = None, pool: str | None = None) -> None:
        self._worker_id = worker_id
        self._pool = pool
        self._live: dict[str, WorkerState] = {}
        self._in_other_pools: dict[str, WorkerState] = {}
        self._serving: dict[Wanted, list[WorkerState]] = {}
        self._loaded: dict[str, tuple[int, ModelState]] = {}
        """By model, when a worker other than this one last reported it as loaded."""
        self.now_ms = 0
        """When the newest report was made."""
        self.removed: Set[str] = frozenset()
        """Names of models that operators have removed: nobody is to serve them, and nobody waits for them."""

    def reported(self, states: Iterable[WorkerState]) -> None:
        for state in states:
            self.now_ms = max(self.now_ms, state.updated_at)
            self._live.pop(state.worker_id, None)
            self._in_other_pools.pop(state.worker_id, None)
            ours = state.pool == self._pool
            if state.state != "stopped":
                (self._live if ours else self._in_other_pools)[state.worker_id] = state
            if ours and state.worker_id != self._worker_id:
                self._note_loaded(state)
        self._live, self._in_other_pools = map(self._recent, (self._live, self._in_other_pools))
        self._serving.clear()

    def _recent(self, states: dict[str, WorkerState]) -> dict[str, WorkerState]:
        return {name: state for name, state in states.items() if state.updated_at >= self.now_ms - LATE_MS}

    def _note_loaded(self, state: WorkerState) -> None:
        for one in state.models:
            if one.state == "ready" and state.updated_at >= self._loaded.get(one.model, (0, one))[0]:
                self._loaded[one.model] = state.updated_at, one

    @property
    def running(self) -> list[WorkerState]:
        """The live workers that take requests."""
        return [state for state in self._live.values() if state.state == "running"]

    def serving(self, wanted: Wanted) -> list[WorkerState]:
        found = self._serving.get(wanted)
        if found is None:
            found = [state for state in self._live.values() if any(map(wanted.is_served_by, state.models))]
            self._serving[wanted] = found
        return found

    def other_pool(self, wanted: Wanted) -> str | None:
        """The pool, other than this one, of a live worker that serves the model of a request. It must name one."""
        pools = {
            state.pool
            for state in self._in_other_pools.values()
            if state.pool is not None and any(map(wanted.is_served_by, state.models))
        }
        return min(pools, default=None) if wanted.model is not None else None

    def loaded_elsewhere_ms(self, wanted: Wanted) -> int:
        """When a worker other than this one last reported a loaded model that serves a request; 0 if none has."""
        return max((at_ms for at_ms, one in self._loaded.values() if wanted.is_served_by(one)), default=0)

    def may_run_elsewhere(self, wanted: Wanted, since_ms: float) -> bool:
        """Whether another live worker serves a request, or one had its model loaded after `since_ms`."""
        others = any(state.worker_id != self._worker_id for state in self.serving(wanted))
        return others or self.loaded_elsewhere_ms(wanted) > max(since_ms, 0)

    def partition_for(self, wanted: Wanted, topic: str, request_id: str, since_ms: float) -> int | None:
        """A partition of the topic whose owner serves a request, and has reported that after `since_ms`.

        None if there is no such partition. The choice depends on the request: many are spread over all of them.
        """
        places = sorted(
            int(place.rpartition("/")[2])
            for state in self.serving(wanted)
            if state.worker_id != self._worker_id and state.state == "running" and state.updated_at > since_ms
            for place in state.assigned
            if place.rpartition("/")[0] == topic
        )
        return places[crc32(request_id.encode()) % len(places)] if places else None
