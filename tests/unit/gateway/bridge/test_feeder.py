"""The feeder when partitions go to another bridge: their work ends here, and leaves its place in the window."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import cast

import pytest

from penstock.common.group_consumer import GroupConsumer, Read
from penstock.common.settings import KafkaSettings
from penstock.gateway.bridge.errands import Errands
from penstock.gateway.bridge.feeder import QueueFeeder
from penstock.gateway.bridge.known import Known
from penstock.gateway.queues.settings import QueueMergeSection, QueueSection
from penstock.schemas.topics import TP

FIRST, SECOND = ("jobs", 0), ("jobs", 1)


class FakeErrands:
    """Run until they are cancelled, or told to end."""

    def __init__(self) -> None:
        self.begun: list[TP] = []
        self.cancelled: list[TP] = []
        self.end = asyncio.Event()
        self.flushed = 0

    async def run(self, queue: QueueSection, read: Read, tries: int) -> str:
        self.begun.append(read.tp)
        try:
            await self.end.wait()
        except asyncio.CancelledError:
            self.cancelled.append(read.tp)
            raise
        return "completed"

    async def flush(self) -> None:
        self.flushed += 1


class FakeConsumer:
    def __init__(self) -> None:
        self.commits: dict[TP, int] = {}

    def commit(self, offsets: Mapping[TP, int]) -> None:
        self.commits.update(offsets)


class FakeKnown:
    looks = 0

    def look_again(self) -> None:
        self.looks += 1

    def check(self) -> None: ...


class World:
    """A feeder whose window has room for one message."""

    def __init__(self) -> None:
        self.errands, self.consumer, self.known = FakeErrands(), FakeConsumer(), FakeKnown()
        self.counted: list[str] = []
        self.feeder = QueueFeeder(
            [QueueSection(topic="jobs")],
            "strict",
            QueueMergeSection(window=1),
            KafkaSettings(),
            cast("Known", self.known),
            cast("Errands", self.errands),
            counted=lambda _, outcome: self.counted.append(outcome),
            on_failure=lambda reason: None,
        )
        self.feeder._consumer = cast("GroupConsumer", self.consumer)

    def read(self, tp: TP) -> None:
        self.feeder._arrived([Read(tp, 0, None, b"x", 1)])

    async def step(self, turns: int = 5) -> None:
        self.feeder._step(cast("GroupConsumer", self.consumer))
        for _ in range(turns):
            await asyncio.sleep(0)


async def test_work_for_a_partition_that_goes_ends_and_what_was_sent_is_flushed() -> None:
    world = World()
    world.feeder._assigned([FIRST, SECOND])
    assert world.known.looks == 1
    world.read(FIRST)
    await world.step()
    assert world.errands.begun == [FIRST]
    await world.feeder._revoked([FIRST])
    assert (world.errands.cancelled, world.errands.flushed) == ([FIRST], 1)
    world.read(SECOND)
    await world.step()
    assert world.errands.begun == [FIRST, SECOND], "its place in the window is free"
    assert world.consumer.commits[FIRST] == 0


async def test_work_that_had_not_begun_leaves_its_place_too() -> None:
    world = World()
    world.feeder._assigned([FIRST, SECOND])
    world.read(FIRST)
    await world.step(turns=0)
    await world.feeder._revoked([FIRST])
    world.read(SECOND)
    await world.step()
    assert world.errands.begun == [SECOND]


async def test_what_is_cancelled_by_the_stop_is_not_committed() -> None:
    world = World()
    world.feeder._assigned([FIRST])
    world.read(FIRST)
    await world.step()
    await world.feeder.cancel()
    await world.step(turns=1)
    assert world.consumer.commits.get(FIRST, 0) == 0
    assert world.counted == []


async def test_what_is_settled_is_committed_and_counted() -> None:
    world = World()
    world.feeder._assigned([FIRST])
    world.read(FIRST)
    world.errands.end.set()
    await world.step()
    await world.step()
    assert (world.consumer.commits, world.counted) == ({FIRST: 1}, ["completed"])


@pytest.mark.parametrize("turns", range(5))
async def test_it_ends_when_a_message_arrives_at_that_moment(turns: int) -> None:
    world = World()
    world.feeder._assigned([FIRST])

    async def feed() -> None:
        while True:
            world.feeder._step(cast("GroupConsumer", world.consumer))
            await world.feeder._wait()

    world.feeder._main = asyncio.create_task(feed())
    await asyncio.sleep(0.01)
    world.read(FIRST)
    for _ in range(turns):
        await asyncio.sleep(0)
    _, left = await asyncio.wait({asyncio.create_task(world.feeder.cancel())}, timeout=1)
    assert not left, "it goes on"
