"""The budget against plain sums: what is guaranteed is there, and what is used stays below the total and one record."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kit.examples import examples
from penstock.processors.core.queue.budget import Budget

TPS = (("high", 0), ("high", 1), ("low", 0), ("low", 1))
PAIRS = [(klass, lane) for klass in ("high", "medium", "low") for lane in ("a", "b")]
FACT = 10
TOTAL = 3_200  # a share of 200 bytes for each of six pairs, 400 bytes for those that end, and 160 facts


class BudgetMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.budget = Budget(TOTAL, fact_bytes=FACT)
        self.bodies: list[tuple[tuple[str, str], int]] = []
        self.facts = dict.fromkeys(TPS, 0)
        self.largest = 0

    @initialize(tps=st.sets(st.sampled_from(TPS), min_size=1))
    def begin(self, tps: set[tuple[str, int]]) -> None:
        self.budget.register("a")
        self.budget.register("b")
        self.assign(tps)

    def of(self, pair: tuple[str, str]) -> int:
        return sum(size for one, size in self.bodies if one == pair)

    @rule(pair=st.sampled_from(PAIRS), size=st.integers(1, 120) | st.integers(180, 900))
    def body(self, pair: tuple[str, str], size: int) -> None:
        used = self.of(pair)
        room = self.budget.try_keep_body(*pair, size)
        if used + size <= 200:
            assert room, "a share that is guaranteed was refused"
        if room:
            self.bodies.append((pair, size))
            self.largest = max(self.largest, size)
            assert used + size <= 200 or not used
        elif not used:
            assert any(one > 200 for _, one in self.bodies), "a large record alone was refused"

    @rule(pick=st.integers(0, 60))
    def drop_body(self, pick: int) -> None:
        if self.bodies:
            pair, size = self.bodies.pop(pick % len(self.bodies))
            self.budget.drop_body(*pair, size)

    @rule(pair=st.sampled_from(PAIRS))
    def drop_too_much(self, pair: tuple[str, str]) -> None:
        with pytest.raises(ValueError, match="bytes"):
            self.budget.drop_body(*pair, self.of(pair) + 1)

    @rule(tp=st.sampled_from(TPS), count=st.integers(1, 40))
    def fact(self, tp: tuple[str, int], count: int) -> None:
        for _ in range(count):
            if self.budget.full(tp):
                break
            self.budget.count_fact(tp)
            self.facts[tp] += 1

    @rule(tp=st.sampled_from(TPS), count=st.integers(1, 40))
    def drop_fact(self, tp: tuple[str, int], count: int) -> None:
        for _ in range(min(count, self.facts[tp])):
            self.budget.drop_fact(tp)
            self.facts[tp] -= 1
        if not self.facts[tp]:
            with pytest.raises(ValueError, match="facts"):
                self.budget.drop_fact(tp)

    @rule(tps=st.sets(st.sampled_from(TPS)))
    def assign(self, tps: set[tuple[str, int]]) -> None:
        """The facts of partitions that have gone are dropped after it, as the flow does."""
        self.budget.assign(tps)
        self.assigned = tps
        for tp in TPS:
            if tp not in tps:
                self.drop_fact(tp, self.facts[tp])
        self.share = 80 // max(len(tps), 1)

    @invariant()
    def bounds(self) -> None:
        assert self.budget.bodies_bytes == sum(size for _, size in self.bodies)
        assert self.budget.facts == sum(self.facts.values())
        assert self.budget.used_bytes == self.budget.bodies_bytes + FACT * self.budget.facts
        assert 0 <= self.budget.bodies_bytes <= TOTAL * 3 // 8 + self.largest

    @invariant()
    def facts_are_shared(self) -> None:
        if not hasattr(self, "assigned"):
            return
        beyond = sum(max(0, count - (self.share if tp in self.assigned else 0)) for tp, count in self.facts.items())
        common = 160 - self.share * len(self.assigned)
        for tp in TPS:
            share = self.share if tp in self.assigned else 0
            assert self.budget.full(tp) == (self.facts[tp] >= share and beyond >= common)


BudgetMachine.TestCase.settings = settings(max_examples=examples(100), stateful_step_count=40, deadline=None)
TestBudget = BudgetMachine.TestCase


def test_one_partition_alone_may_use_all_facts_and_leaves_the_others_theirs() -> None:
    budget = Budget(TOTAL, fact_bytes=FACT)
    budget.assign(TPS)
    while not budget.full(TPS[0]):
        budget.count_fact(TPS[0])
    assert budget.facts == 80 + 20
    for tp in TPS[1:]:
        for _ in range(20):
            assert not budget.full(tp)
            budget.count_fact(tp)
        assert budget.full(tp)
    assert budget.used_bytes == TOTAL // 2


def test_a_new_lane_waits_for_what_the_others_drop() -> None:
    budget = Budget(TOTAL)
    for klass in ("high", "medium", "low"):
        assert budget.try_keep_body(klass, "a", 400)
    assert not budget.try_keep_body("high", "b", 1)
    budget.drop_body("low", "a", 400)
    assert budget.try_keep_body("high", "b", 200)
    assert budget.try_keep_body("low", "a", 200)
    assert not budget.try_keep_body("low", "a", 1)
    assert budget.used_bytes <= TOTAL // 2


def test_facts_beyond_what_is_full_are_counted() -> None:
    """A batch that was fetched already is taken; nothing more is delivered until it has become less."""
    budget = Budget(TOTAL, fact_bytes=FACT)
    budget.assign(TPS[:1])
    for _ in range(170):
        budget.count_fact(TPS[0])
    assert budget.full(TPS[0])
    for _ in range(11):
        assert budget.full(TPS[0])
        budget.drop_fact(TPS[0])
    assert not budget.full(TPS[0])
