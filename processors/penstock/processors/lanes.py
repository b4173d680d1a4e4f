"""Between the flow and the models: carries out loads, tells the flow of engines that come and go, and names lanes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from penstock.processors.core.flow import Flow
from penstock.processors.core.ledger import MemoryShort
from penstock.processors.core.work import Work
from penstock.processors.engines.base import Engine, Limits
from penstock.processors.metrics import Metrics
from penstock.processors.models.serving import Serving
from penstock.schemas.errors import PenstockError
from penstock.schemas.records import Requirements

logger = logging.getLogger(__name__)


class Lanes:
    """The flow's catalog, and what carries out its `Load` effects. `changed` is called after each event it gives."""

    def __init__(self, metrics: Metrics, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._metrics = metrics
        self._clock = clock
        self._tasks: set[asyncio.Task[None]] = set()
        self._serving: Serving
        self._flow: Flow
        self._changed: Callable[[], None]

    def connect(self, serving: Serving, flow: Flow, changed: Callable[[], None]) -> None:
        """Give it the parts that are made after it, since they need its callbacks."""
        self._serving, self._flow, self._changed = serving, flow, changed

    def load_all(self) -> None:
        """Load every configured model in the background, so that the first request does not wait for it."""
        for model in self._serving.models:
            self._flow.want(model)
        self._changed()

    async def close(self) -> None:
        """Give up the loads under way."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # -- the flow's catalog

    def resolve(self, task: str, model: str | None) -> str:
        """Raises ModelNotFound."""
        return self._serving.resolve(task, model).id

    def check_fits(self, lane: str, requirements: Requirements | None) -> None:
        """Raises InsufficientCapacity, naming need and capacity."""
        self._serving.check_fits(lane, requirements)

    # -- loads

    def load(self, lane: str) -> None:
        """Carry out a `Load`."""
        task = asyncio.get_running_loop().create_task(self._load(lane), name=f"lane {lane}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _load(self, lane: str) -> None:
        began = self._clock()
        try:
            await self._serving.load(lane)
        except Exception as error:
            if isinstance(error, MemoryShort):  # it is tried again each second
                logger.info("lane.waits_for_memory model=%s reason=%s", lane, error)
            else:
                level = logging.WARNING if isinstance(error, PenstockError) else logging.ERROR
                logger.log(level, "lane.load_failed model=%s error=%s", lane, error)
            self._flow.load_failed(lane, error, self._clock())
            self._changed()
        else:
            self._metrics.loads.labels(lane).inc()
            logger.info("lane.loaded model=%s seconds=%.1f", lane, self._clock() - began)

    def up(self, model: str, limits: Limits) -> None:
        """The model is ready."""
        engine = self._serving.engine(model)
        inline = bool(engine is not None and engine.prepares_inline)
        if engine is not None:
            engine.on_busy = lambda seconds: self._busy(model, seconds)
        self._flow.lane_up(model, limits.slots, limits.tokens, self._clock(), inline=inline)
        self._changed()

    def down(self, model: str, code: int | None) -> None:
        """The model's process has ended: unasked, or, when there is no exit code, because the model was unloaded."""
        self._metrics.unloads.labels(model).inc()
        if code is None:
            self._flow.lane_unloaded(model, self._clock())
        else:
            logger.error("lane.died model=%s exitcode=%s", model, code)
            self._flow.lane_down(model, self._clock())
        self._changed()

    def _busy(self, model: str, seconds: float) -> None:
        self._flow.lane_busy(model, seconds, self._clock())

    # -- for events

    def engine(self, model: str) -> Engine | None:
        return self._serving.engine(model)

    def engine_facts(self, work: Work) -> tuple[str | None, int | None]:
        """Device and measured bytes of the engine of a work."""
        engine = self._serving.engine(work.lane)
        return (None, None) if engine is None else (engine.info().device, engine.measured_memory())
