"""The scheduler against a plain model: classes, the share of the aged, lanes and lines."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from penstock.processors.core.scheduler import CLASSES, Decision, Full, Item, Scheduler, WorkKey

AGING_S = 10.0
SHARE = 3
CAPACITY = 20
LANES = ("a", "b")


class SchedulerMachine(RuleBasedStateMachine):
    """`items` in the order they were added; a line's first item is the only one that may start."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = Scheduler(aging_s=AGING_S, aged_share=SHARE, capacity=CAPACITY)
        self.items: dict[WorkKey, Item] = {}
        self.running: set[str] = set()
        self.now = 0.0
        self.number = 0
        self.not_aged = 0  # dispatches since an aged item was passed over or taken

    @rule(
        klass=st.sampled_from(CLASSES),
        lane=st.sampled_from(LANES),
        line=st.sampled_from((None, None, "x", "y")),
        ttl=st.none() | st.floats(0, 20),
    )
    def add(self, klass: str, lane: str, line: str | None, ttl: float | None) -> None:
        self.number += 1
        self.now += 0.01
        item = Item(
            key=("t", 0, self.number),
            request_id=str(self.number),
            tenant="default",
            klass=klass,
            priority=5,
            lane=lane,
            line=line,
            enqueued_at=self.now,
            deadline=None if ttl is None else self.now + ttl,
            work=None,
        )
        if len(self.items) >= CAPACITY:
            with pytest.raises(Full):
                self.scheduler.add(item)
            return
        self.scheduler.add(item)
        self.items[item.key] = item
        with pytest.raises(ValueError, match="already"):
            self.scheduler.add(item)

    @rule(seconds=st.floats(0, 8))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    def ready(self) -> list[Item]:
        """In the order of arrival: everything without a line, and the first of each line that does not run."""
        taken = set(self.running)
        found: list[Item] = []
        for item in self.items.values():
            if item.line is None:
                found.append(item)
            elif item.line not in taken:
                taken.add(item.line)
                found.append(item)
        return found

    @rule(blocked=st.sets(st.sampled_from(LANES)), later=st.sets(st.integers(0, 5), max_size=3))
    def dispatch(self, blocked: set[str], later: set[int]) -> None:
        waiting = {item.key for at, item in enumerate(self.ready()) if at in later}
        asked: list[WorkKey] = []

        def can_start(item: Item) -> Decision:
            asked.append(item.key)
            if item.lane in blocked:
                return Decision.BLOCK_LANE
            return Decision.WAIT if item.key in waiting else Decision.GRANTED

        startable = [item for item in self.ready() if item.lane not in blocked and item.key not in waiting]
        aged = [i for i in startable if i.klass != "high" and self.now - i.enqueued_at > AGING_S]
        item = self.scheduler.next(self.now, can_start)
        if not startable:
            assert item is None, "something started that may not"
            return
        assert item is not None, "a blocked lane or a waiting item held up others"
        assert item in startable
        by_class = min(startable, key=lambda one: (CLASSES.index(one.klass), one.enqueued_at))
        if item != by_class:
            assert item == aged[0], "only the longest waiting of the aged may pass the classes"
        # Of SHARE dispatches at which aged work could start, one at least is an aged item's.
        self.not_aged = 0 if not aged or item in aged else self.not_aged + 1
        assert self.not_aged < SHARE
        assert len([key for key in asked if self.items[key].lane in blocked]) <= len(LANES)
        del self.items[item.key]
        if item.line is not None:
            self.running.add(item.line)

    @rule(line=st.sampled_from(("x", "y")))
    def release(self, line: str) -> None:
        self.scheduler.release_line(line)
        self.running.discard(line)

    @rule(pick=st.integers(0, CAPACITY))
    def remove(self, pick: int) -> None:
        assert self.scheduler.remove(("t", 9, 9)) is None
        if self.items:
            key = list(self.items)[pick % len(self.items)]
            assert self.scheduler.remove(key) == self.items.pop(key)
            assert key not in self.scheduler

    @rule(pick=st.integers(0, CAPACITY), klass=st.sampled_from(CLASSES))
    def reprioritize(self, pick: int, klass: str) -> None:
        assert not self.scheduler.reprioritize(("t", 9, 9), klass=klass, priority=1)
        if self.items:
            key = list(self.items)[pick % len(self.items)]
            assert self.scheduler.reprioritize(key, klass=klass, priority=1)
            self.items[key] = replace(self.items[key], klass=klass, priority=1)

    @invariant()
    def counts(self) -> None:
        scheduler, items = self.scheduler, list(self.items.values())
        assert len(scheduler) == len(items)
        assert scheduler.depths() == {klass: sum(i.klass == klass for i in items) for klass in CLASSES}
        ages = scheduler.oldest_age(self.now)
        for klass in CLASSES:
            assert ages[klass] == max((self.now - i.enqueued_at for i in items if i.klass == klass), default=0.0)
        expired = [i for i in items if i.deadline is not None and i.deadline <= self.now]
        assert sorted(i.key for i in scheduler.expired(self.now)) == sorted(i.key for i in expired)
        for at, klass in enumerate(CLASSES):
            assert scheduler.up_to(klass) == sum(i.klass in CLASSES[: at + 1] for i in items)
        order = sorted(self.ready(), key=lambda i: (CLASSES.index(i.klass), i.enqueued_at))
        for count in (0, 1, 3, len(order) + 1):
            front = scheduler.front(count)
            assert [(i.klass, i.enqueued_at) for i in front] == [(i.klass, i.enqueued_at) for i in order[:count]]
            assert all(i in order for i in front)
            assert len({i.key for i in front}) == len(front)

    def teardown(self) -> None:
        """Everything can be taken out, the turns of each line one at a time in order."""
        while (item := self.scheduler.next(self.now, lambda _: Decision.GRANTED)) is not None or self.running:
            if item is not None:
                assert item in self.ready()
                del self.items[item.key]
                if item.line is not None:
                    self.running.add(item.line)
            else:
                line = min(self.running)
                self.running.discard(line)
                self.scheduler.release_line(line)
        assert not self.items
        assert len(self.scheduler) == 0


SchedulerMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
TestScheduler = SchedulerMachine.TestCase
