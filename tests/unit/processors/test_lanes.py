"""Lanes: what waits for memory goes on waiting, a dead engine takes nothing, a broken model fails those who wait."""

from __future__ import annotations

import asyncio
from typing import Any

from penstock.processors.core.admission import CannotLoad, MemoryShort
from penstock.processors.core.scheduler import Decision
from penstock.processors.engines.base import Capacity
from penstock.processors.engines.noop import NoopEngine
from penstock.processors.lanes import MAX_LOAD_FAILURES, MEMORY_POLL_S, Lanes
from penstock.processors.work import Work
from penstock.schemas.errors import EngineFailed, PenstockError
from penstock.schemas.records import InferenceRequest, Origin


class Models:
    """A model that can be loaded when `error` is None."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.loads = 0
        self.loaded: NoopEngine | None = None

    def resolve(self, task: str, model: str | None) -> Any:
        return None

    def check_fits(self, model: str, requirements: Any) -> None:
        pass

    def engine(self, model: str) -> NoopEngine | None:
        return self.loaded

    async def ensure_loaded(self, model: str) -> NoopEngine:
        self.loads += 1
        if self.error is not None:
            raise self.error
        self.loaded = NoopEngine("m", {})
        await self.loaded.start()
        return self.loaded


class Room:
    """Lanes with a clock of their own."""

    def __init__(self, models: Models) -> None:
        self.now = 100.0
        self.failed: list[PenstockError] = []
        self.lanes = Lanes(models, lambda: None, lambda _, error: self.failed.append(error), clock=lambda: self.now)

    async def decide(self) -> tuple[Decision, str | None]:
        decision = self.lanes.decide("m")
        for _ in range(5):
            await asyncio.sleep(0)
        return decision


def work() -> Work:
    origin = Origin(topic="t", partition=0, offset=0, append_time_ms=0)
    request = InferenceRequest(request_id="r", task="text_generation", created_at=0)
    return Work(
        key=("t", 0, 0), request=request, origin=origin, klass="medium", lane="m", line=None, deadline_ms=None,
        arrived_at=95.0, attempt=1,
    )  # fmt: skip


async def test_memory_that_is_short_fails_nobody_and_is_said() -> None:
    models = Models(MemoryShort("600 MiB are needed, 100 are free"))
    room = Room(models)
    assert await room.decide() == (Decision.BLOCK_LANE, "loading_model")
    for round_number in range(2, 12):
        room.now += MEMORY_POLL_S
        assert await room.decide() == (Decision.BLOCK_LANE, "waiting_for_memory")
        assert models.loads == round_number
    assert room.failed == []
    models.error = None
    room.now += MEMORY_POLL_S
    await room.decide()
    assert await room.decide() == (Decision.GRANTED, None)


async def test_a_load_that_fails_is_tried_again_before_anybody_is_told() -> None:
    models = Models(EngineFailed("died"))
    room = Room(models)
    for _ in range(MAX_LOAD_FAILURES - 1):
        await room.decide()
        assert room.failed == []
        room.now += 60
    await room.decide()
    assert len(room.failed) == 1


async def test_what_cannot_be_loaded_is_told_at_once() -> None:
    room = Room(Models(CannotLoad("no weights")))
    await room.decide()
    assert [type(error) for error in room.failed] == [CannotLoad]


async def test_a_dead_engine_is_granted_nothing() -> None:
    models = Models()
    room = Room(models)
    await room.decide()
    await room.decide()
    assert models.loaded is not None
    waiting = work()
    room.lanes.take(waiting)
    models.loaded.capacity = lambda: Capacity(free_slots=0, free_tokens=None)  # type: ignore[method-assign]
    assert not room.lanes["m"].grant(waiting, 1)
    assert waiting.reserved
    models.loaded.capacity = lambda: Capacity(free_slots=1, free_tokens=None)  # type: ignore[method-assign]
    assert room.lanes["m"].grant(waiting, 1)


async def test_loading_is_told_apart_from_queueing() -> None:
    room = Room(Models())
    room.lanes.decide("m")
    room.now += 3.0
    for _ in range(5):
        await asyncio.sleep(0)
    room.now += 1.0
    assert room.lanes["m"].loading_ms(99.0, room.now) == 3000
    assert room.lanes["m"].loading_ms(102.0, room.now) == 1000
    assert room.lanes["m"].loading_ms(103.5, room.now) == 0
