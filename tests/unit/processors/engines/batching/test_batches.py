"""Batches: gathered, halved when memory runs out, each by itself after a fault; every item has one result."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.processors.core.fleet.ledger import OutOfMemory
from penstock.processors.engines.batching import batches
from penstock.processors.engines.batching.alike import AlikeBatches
from penstock.processors.engines.batching.batches import Batches
from penstock.processors.engines.batching.limit import GROW_AFTER, BatchLimit
from penstock.processors.engines.batching.turns import PATIENCE_S, turn_of
from penstock.schemas.errors import EngineFailed
from support import wait_until_async

CPU_SAYS = "[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory"


@pytest.fixture(autouse=True)
def no_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Collecting the garbage of the test's process takes a quarter of a second."""
    monkeypatch.setattr(batches, "free_caches", lambda: None)


@dataclass(eq=False)
class Item:
    name: str
    kind: str = ""
    weight: int = 1
    over: bool = False
    poison: bool = False


@dataclass
class Model:
    """Computes batches up to `memory` at once; parts of an item are named after it."""

    memory: int = 1_000
    batches: list[list[str]] = field(default_factory=list[list[str]])
    results: dict[str, list[str | EngineFailed]] = field(default_factory=dict[str, list[str | EngineFailed]])
    go_on: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.go_on.set()

    def compute(self, batch: Sequence[Item]) -> list[str]:
        self.batches.append([item.name for item in batch])
        assert self.go_on.wait(30)
        if self.weight(batch) > self.memory:
            raise RuntimeError(CPU_SAYS)
        if any(item.poison for item in batch):
            raise ValueError("a shape that the model does not know")
        return [item.name.upper() for item in batch]

    def weight(self, batch: Sequence[Item]) -> int:
        return sum(item.weight for item in batch)

    def wanted(self, item: Item) -> bool:
        return not item.over

    def split(self, item: Item) -> Sequence[Item]:
        return [Item(f"{item.name}.{n}", weight=1) for n in range(item.weight)] if item.kind == "parts" else ()

    def ended(self, item: Item, result: str | EngineFailed) -> None:
        self.results.setdefault(item.name, []).append(result)


class Engine:
    def __init__(self, model: Model, most: int, *, window_s: float = 0.0) -> None:
        self.told: list[Any] = []
        self.waiting = AlikeBatches[Item](lambda item: item.kind, lambda item: item.weight)
        self.model = model
        self.limit = BatchLimit(most)
        self.batches = Batches[Item, str](self.waiting, model, self.limit, self.told.append, window_s=window_s)

    def put(self, *items: Item) -> None:
        for item in items:
            self.waiting.add(item, time.monotonic())
            self.batches.look()

    async def ended(self, count: int) -> None:
        await wait_until_async(lambda: len(self.model.results) == count, 30)


async def test_what_comes_within_the_window_goes_together_and_a_full_batch_at_once() -> None:
    engine = Engine(Model(), 3, window_s=0.05)
    engine.batches.start()
    engine.put(*(Item(f"i{n}") for n in range(5)))
    await engine.ended(5)
    assert engine.model.batches == [["i0", "i1", "i2"], ["i3", "i4"]]
    slow = Engine(Model(), 2, window_s=3600)
    slow.batches.start()
    slow.put(Item("a"), Item("b"))
    await slow.ended(2)
    assert slow.model.batches == [["a", "b"]]
    assert slow.batches.progress() is None


async def test_a_full_batch_waits_behind_the_computed_one_and_the_others_gather() -> None:
    model = Model()
    model.go_on.clear()
    engine = Engine(model, 2)
    engine.batches.start()
    engine.put(*(Item(f"i{n}") for n in range(4)))
    await wait_until_async(lambda: bool(model.batches), 30)
    assert len(engine.waiting) < 4
    engine.put(*(Item(f"j{n}") for n in range(4)))
    before = len(engine.waiting)
    assert before >= 4, "one is computed, one waits for that"
    assert engine.batches.progress() is not None
    model.go_on.set()
    await engine.ended(8)


async def test_when_memory_runs_out_batches_are_halved_and_grow_again_with_care() -> None:
    engine = Engine(Model(memory=2), 8, window_s=0.01)
    engine.batches.start()
    engine.put(*(Item(f"i{n}") for n in range(8)))
    await engine.ended(8)
    assert engine.model.results == {f"i{n}": [f"I{n}"] for n in range(8)}
    assert engine.limit.size == 2
    engine.batches.check()
    engine.batches.check()
    assert engine.told == [("out_of_memory", None), ("batches", 2)], "the worker hears it once"
    engine.model.memory = 8
    for _ in range(2_000):
        engine.put(Item(f"again{len(engine.model.results)}"))
        await engine.ended(len(engine.model.results) + 1)
        if engine.limit.size == 8:
            break
    assert engine.limit.size == 8
    engine.batches.check()
    assert engine.told[2:] == [("batches", 8)]


async def test_batches_that_nobody_wanted_do_not_let_them_grow() -> None:
    engine = Engine(Model(memory=1), 2)
    engine.batches.within_memory([Item("a"), Item("b")])
    assert engine.limit.size == 1
    engine.batches.start()
    for _ in range(GROW_AFTER):
        engine.put(Item("gone", over=True))
        await wait_until_async(lambda: engine.batches.progress() is None, 30)
    assert engine.limit.size == 1
    assert engine.model.batches[1:] == [["a"], ["b"]], "nothing more was computed"


async def test_an_item_that_is_too_large_by_itself_is_made_in_parts_or_fails_alone() -> None:
    engine = Engine(Model(memory=2), 8, window_s=0.01)
    engine.batches.start()
    engine.put(Item("whole", weight=4), Item("small"))
    await engine.ended(2)
    (failed,) = engine.model.results["whole"]
    assert isinstance(failed, OutOfMemory)
    assert engine.model.results["small"] == ["SMALL"]
    engine.put(Item("four", "parts", weight=4))
    await engine.ended(6)
    assert [engine.model.results[f"four.{n}"] for n in range(4)] == [[f"FOUR.{n}"] for n in range(4)]


async def test_a_fault_fails_the_one_that_brings_it_about() -> None:
    engine = Engine(Model(), 4, window_s=0.01)
    engine.batches.start()
    engine.put(Item("a"), Item("bad", poison=True), Item("c"))
    await engine.ended(3)
    assert (engine.model.results["a"], engine.model.results["c"]) == (["A"], ["C"])
    (failed,) = engine.model.results["bad"]
    assert isinstance(failed, EngineFailed)
    assert "ValueError: a shape that the model does not know" in str(failed)
    assert engine.limit.size == 4
    engine.batches.check()
    assert engine.told == []


async def test_what_nobody_wants_any_more_is_not_computed_again() -> None:
    model = Model(memory=1)
    engine = Engine(model, 4, window_s=0.01)
    items = [Item(f"i{n}") for n in range(4)]
    model.go_on.clear()
    engine.batches.start()
    engine.put(*items)
    await wait_until_async(lambda: bool(model.batches), 30)
    items[0].over = items[3].over = True
    model.go_on.set()
    await engine.ended(2)
    assert model.results == {"i1": ["I1"], "i2": ["I2"]}
    assert model.batches[1:] == [["i1"], ["i2"]]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    weights=st.lists(st.integers(1, 6), min_size=1, max_size=12),
    memory=st.integers(1, 12),
    most=st.integers(1, 12),
    poison=st.sets(st.integers(0, 11)),
)
def test_every_item_has_one_result_and_it_is_right(
    weights: list[int], memory: int, most: int, poison: set[int]
) -> None:
    async def run() -> None:
        engine = Engine(Model(memory=memory), most)
        items = [Item(f"i{n}", weight=weight, poison=n in poison) for n, weight in enumerate(weights)]
        pairs = engine.batches.within_memory(items)
        assert [item for item, _ in pairs] == items
        for item, result in pairs:
            if item.weight > memory:
                assert isinstance(result, OutOfMemory)
            elif item.poison:
                assert isinstance(result, EngineFailed)
                assert not isinstance(result, OutOfMemory)
            else:
                assert result == item.name.upper()
        assert 1 <= engine.limit.size <= most

    asyncio.run(run())


def test_alike_items_are_taken_up_to_the_weight_and_at_least_one() -> None:
    waiting = AlikeBatches[Item](lambda item: item.kind, lambda item: item.weight)
    assert waiting.take(3) == []
    assert not waiting.fills(3)
    for name, weight in (("large", 5), ("a", 2), ("b", 2)):
        waiting.add(Item(name, weight=weight), 0.0)
    assert waiting.fills(3)
    assert [item.name for item in waiting.take(3)] == ["large"], "one that is larger than a batch is one by itself"
    assert waiting.fills(3), "b does not fit beside a"
    assert not waiting.fills(5)
    waiting.drop(lambda item: item.name == "a")
    assert [item.name for item in waiting.take(3)] == ["b"]
    assert len(waiting) == 0


def test_who_is_more_urgent_is_first_unless_the_other_came_long_before() -> None:
    low = turn_of(8, 100.0)
    assert turn_of(2, 100.0 + 5 * PATIENCE_S) < low
    assert turn_of(2, 100.0 + 7 * PATIENCE_S) > low
    assert turn_of(8, 100.1) > low
    assert turn_of(2, 100.0 + 9 * PATIENCE_S) > turn_of(1_000, 100.0), "the least urgent do not wait for ever"


def test_an_urgent_image_is_in_the_next_batch_with_those_that_are_like_it() -> None:
    batches: AlikeBatches[str] = AlikeBatches(lambda item: item.split()[1])
    for number in range(10):
        batches.add(f"low {'xy'[number % 2]} {number}", turn_of(8, 100.0 + number))
    batches.add("urgent y", turn_of(1, 110.0))
    assert batches.take(2) == ["urgent y", "low y 1"]
    assert batches.take(2) == ["low x 0", "low x 2"]


# -- the size of batches


def well(limit: BatchLimit, batches: int) -> int:
    return sum(limit.went_well() for _ in range(batches))


def test_it_is_halved_down_to_the_least() -> None:
    limit = BatchLimit(10, 2)
    assert [limit.halve() for _ in range(4)] == [True, True, False, False]
    assert limit.size == 2


def test_what_was_in_use_is_halved_not_what_was_allowed() -> None:
    limit = BatchLimit(64)
    assert limit.halve(6)
    assert limit.size == 3
    assert BatchLimit(4, 32).size == 4, "a least that is larger than the largest changes nothing"


def test_it_grows_again_after_many_that_went_well_and_later_each_time() -> None:
    limit = BatchLimit(8)
    assert well(limit, 10 * GROW_AFTER) == 0
    limit.halve()
    assert well(limit, GROW_AFTER - 1) == 0
    assert well(limit, 1) == 1
    assert limit.size == 8
    limit.halve()
    assert well(limit, 2 * GROW_AFTER - 1) == 0
    assert well(limit, 1) == 1
    limit.halve(8)
    limit.halve()
    assert limit.size == 2
    assert well(limit, 8 * GROW_AFTER) == 1, "one step at a time"
    assert limit.size == 4
