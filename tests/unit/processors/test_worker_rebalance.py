"""The worker's shell around the real flow: what it holds, and what it says of work that it lets go of."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

from flow_driver import MEDIUM, World
from penstock.processors.core import effects as ask
from penstock.processors.kafka.membership import Assignment
from penstock.processors.worker import Rooms, Worker

TP = (MEDIUM, 0)
Held = list[frozenset[tuple[str, int]]]


def assignment(world: World, generation: int, *, fenced: bool = False) -> Assignment:
    committed = dict.fromkeys(world.flow.gate.partitions(), (0, ""))
    return Assignment(partitions=frozenset(committed), generation=generation, fenced=fenced, committed=committed)


def run(world: World, check: Callable[[Worker, Held, list[Any]], None]) -> None:
    """`check` gets a worker on the world's flow, what was held, one after the other, and the chunks that were said."""

    async def inside() -> None:
        held: Held = []
        said: list[Any] = []
        worker = Worker(
            clock=lambda: world.now,
            urgency=lambda topic: 0,
            hold=held.append,
            on_erase=lambda command: None,
            on_broken=lambda: None,
        )
        outcomes = SimpleNamespace(chunk=lambda effect, done: said.append(effect) or True)
        rooms = SimpleNamespace(
            flow=world.flow,
            outcomes=outcomes,
            refetcher=SimpleNamespace(cancel=lambda tp: None),
            execution=SimpleNamespace(cancel=lambda lane, run_id: None),
            journal=SimpleNamespace(dropped=lambda key, request_id: None),
            faults=SimpleNamespace(armed=lambda point: False),
        )
        worker.connect(cast("Rooms", rooms))
        check(worker, held, said)
        await asyncio.sleep(0)
        assert not worker.broken

    asyncio.run(inside())


def test_a_partition_that_has_room_after_a_rebalance_is_held_no_more() -> None:
    """The consumer keeps its holds over a rebalance: what was not told to let go was held for ever, unnoticed."""
    world = World(commit_span=2)
    for name in ("a", "b"):
        world.submit(name)

    def check(worker: Worker, held: Held, said: list[Any]) -> None:
        worker._apply_pauses()  # pyright: ignore[reportPrivateUsage]
        worker.on_assigned(assignment(world, 2, fenced=True))
        assert held == [frozenset({TP}), frozenset()]

    run(world, check)


def test_nothing_more_is_said_of_work_that_is_let_go_of() -> None:
    world = World()
    world.up(inline=True)
    work = world.submit("r", stream=True)
    assert work is not None
    assert work.run is not None
    run_id = work.run.run_id

    def check(worker: Worker, held: Held, said: list[Any]) -> None:
        world.flow.delta(work, run_id, "words", [1], world.now)
        worker.on_assigned(assignment(world, 2, fenced=True))
        worker._turn()  # pyright: ignore[reportPrivateUsage]
        assert not [effect for effect in said if isinstance(effect, ask.Chunk)]

    run(world, check)
