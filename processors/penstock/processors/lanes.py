"""Lanes: one per model, the way from the scheduler to its engine, with the room that is left on it.

A lane loads its model when first asked for (the manager takes the grant from the ledger before it loads). Until then,
and while it is full, the scheduler passes over it without holding up other lanes.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from penstock.processors.core.admission import CannotLoad, MemoryShort
from penstock.processors.core.scheduler import Decision
from penstock.processors.engines.base import Engine
from penstock.processors.work import Work
from penstock.schemas.errors import EngineFailed, InternalError, PenstockError
from penstock.schemas.records import Requirements

logger = logging.getLogger(__name__)

MEMORY_POLL_S = 1.0
MAX_LOAD_FAILURES = 3
"""So often a load may fail in a row before those who wait for it are told; then each further failure tells them."""


class Models(Protocol):
    """What lanes need of the catalog and the model manager."""

    def resolve(self, task: str, model: str | None) -> Any: ...
    def engine(self, model: str) -> Engine | None: ...
    async def ensure_loaded(self, model: str) -> Engine: ...
    def check_fits(self, model: str, requirements: Requirements | None) -> None: ...


class Lane:
    """One model's engine, and the works that hold a place on it which the engine does not count yet."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.engine: Engine | None = None
        self.inline = False
        self.reserved = 0
        self.granted_tokens = 0
        self.waiting: deque[Work] = deque()
        self.loading: asyncio.Task[Engine] | None = None
        self.device: str | None = None
        self.measured_bytes: int | None = None
        self.load_span = (0.0, 0.0)
        self.not_before = 0.0
        self.failures = 0
        self.short = False
        """Its newest load found too little memory free: it waits for that."""

    def has_slot(self) -> bool:
        return self.engine is not None and self.engine.capacity().free_slots > self.reserved

    def grant(self, work: Work, need_tokens: int) -> bool:
        """Room for this many tokens now. The place is the engine's to count from the run on."""
        if self.engine is None:
            return False
        room = self.engine.capacity()
        if room.free_slots <= 0:  # an engine that has died tells no free tokens, and takes nothing
            return False
        if room.free_tokens is not None and need_tokens > room.free_tokens:
            return False
        self.release(work)
        return True

    def loading_ms(self, since: float, until: float) -> int:
        """How much of a time the newest load of this model took."""
        began, ended = self.load_span
        return max(0, round((min(until, ended) - max(since, began)) * 1000))

    def release(self, work: Work) -> None:
        if work.reserved:
            work.reserved = False
            self.reserved -= 1


class Lanes:
    """All lanes of a worker. `on_change` is called when a model became ready or room may have come."""

    def __init__(
        self,
        models: Models,
        on_change: Callable[[], None],
        fail_lane: Callable[[str, PenstockError], None],
        *,
        clock: Callable[[], float],
    ) -> None:
        self._clock = clock
        self._models = models
        self._on_change = on_change
        self._fail_lane = fail_lane
        self._lanes: dict[str, Lane] = {}

    def __getitem__(self, model: str) -> Lane:
        lane = self._lanes.get(model)
        if lane is None:
            lane = self._lanes[model] = Lane(model)
        return lane

    def __iter__(self) -> Iterator[Lane]:
        return iter(list(self._lanes.values()))

    def resolve(self, task: str, model: str | None) -> Any:
        """The catalog's entry. Raises ModelNotFound."""
        return self._models.resolve(task, model)

    def check_fits(self, model: str, requirements: Requirements | None) -> None:
        """Raises InsufficientCapacity, naming need and capacity, for what can never fit."""
        self._models.check_fits(model, requirements)

    def decide(self, model: str) -> tuple[Decision, str | None]:
        """Whether a run may start on this lane, and the status to show when it waits for the model."""
        lane = self[model]
        self._refresh(lane)
        if lane.engine is None:
            if self._clock() >= lane.not_before:
                self._load(lane)
            return Decision.BLOCK_LANE, "waiting_for_memory" if lane.short else "loading_model"
        if lane.waiting or not lane.has_slot():
            return Decision.BLOCK_LANE, None
        return Decision.GRANTED, None

    def take(self, work: Work) -> None:
        work.reserved = True
        self[work.lane].reserved += 1

    def give_back(self, work: Work) -> None:
        if work.reserved:
            self[work.lane].release(work)

    async def ready(self, model: str) -> Engine:
        """The lane's engine, loaded if need be. Raises PenstockError when it cannot be."""
        lane = self[model]
        self._refresh(lane)
        if lane.engine is None:
            await asyncio.shield(self._load(lane))
            self._refresh(lane)
        if lane.engine is None:
            raise RuntimeError(f"{model} was loaded but has no engine")
        return lane.engine

    async def close(self) -> None:
        for lane in self:
            if lane.loading is not None:
                lane.loading.cancel()

    def _refresh(self, lane: Lane) -> None:
        engine = self._models.engine(lane.model)
        if engine is not lane.engine:
            lane.engine = engine
            lane.inline = bool(getattr(engine, "prepares_inline", False))
            if engine is not None:
                info = engine.info()
                lane.device, lane.measured_bytes = info.device, engine.measured_memory()

    def _load(self, lane: Lane) -> asyncio.Task[Engine]:
        if lane.loading is None:
            lane.load_span = (self._clock(), float("inf"))
            lane.loading = asyncio.create_task(self._models.ensure_loaded(lane.model), name=f"load {lane.model}")
            lane.loading.add_done_callback(lambda task: self._loaded(lane, task))
        return lane.loading

    def _loaded(self, lane: Lane, task: asyncio.Task[Engine]) -> None:
        lane.loading = None
        lane.load_span = (lane.load_span[0], self._clock())
        if task.cancelled():
            return
        error = task.exception()
        lane.short = isinstance(error, MemoryShort)
        if error is None:
            lane.failures = 0
            self._refresh(lane)
        elif lane.short:
            lane.not_before = self._clock() + MEMORY_POLL_S
            logger.info("lane.waits_for_memory model=%s reason=%s", lane.model, error)
        else:
            delay_s = min(30.0, 0.5 * 2**lane.failures)
            lane.failures += 1
            lane.not_before = self._clock() + delay_s
            logger.error("lane.load_failed model=%s error=%r: again in %.1f s", lane.model, error, delay_s)
            known = error if isinstance(error, PenstockError) else InternalError(f"{lane.model} could not be loaded")
            if (
                isinstance(error, CannotLoad)
                or not isinstance(error, EngineFailed)
                or lane.failures >= MAX_LOAD_FAILURES
            ):
                self._fail_lane(lane.model, known)
        self._on_change()
