"""The scheduler against a plain list of items: classes, the share of the aged, tenants, lanes and conversations."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass
from math import inf
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kit.examples import examples
from penstock.processors.core.queue.scheduler import AGED_TRIED, CLASSES, Scheduler
from penstock.processors.core.queue.slack import SlackSettings

AGING_S = 10.0
SHARE = 3
LANES = ("a", "b")
TENANTS = ("t", "u", "v")
CONVERSATIONS = ("x", "y")


@dataclass(slots=True, weakref_slot=True, eq=False, repr=False)
class Work:
    seq: int
    klass: str = "medium"
    tenant: str = "t"
    lane: str = "a"
    conversation: str | None = None
    priority: int = 5
    deadline: float | None = None
    arrived_at: float = 0.0
    cost: int = 1
    ticket: int = 0

    @property
    def urgency(self) -> tuple[int, float, int]:
        return (self.priority, inf if self.deadline is None else self.deadline, self.seq)

    def __repr__(self) -> str:
        return f"{self.seq}:{self.klass}/{self.tenant}/{self.lane}/{self.conversation}"


FACTS = st.fixed_dictionaries(
    {
        "klass": st.sampled_from(CLASSES),
        "lane": st.sampled_from(LANES),
        "tenant": st.sampled_from(TENANTS),
        "conversation": st.sampled_from((None, None, *CONVERSATIONS)),
        "priority": st.integers(4, 6),
        "cost": st.integers(1, 9),
    }
)


class SchedulerMachine(RuleBasedStateMachine):
    """`queued` is what waits, `out` what was started and has not ended."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler: Scheduler[Work] = Scheduler(aging_s=AGING_S, aged_share=SHARE)
        self.queued: list[Work] = []
        self.out: list[Work] = []
        self.returned: set[Work] = set()  # queued again, and holding their conversations
        self.now = 0.0
        self.number = 0
        self.not_aged: dict[str, int] = dict.fromkeys(LANES, 0)  # starts since an aged item was passed over

    # -- the model

    def held(self, conversation: str) -> bool:
        return any(one.conversation == conversation for one in (*self.out, *self.returned))

    def eligible(self, lane: str, klass: str) -> list[Work]:
        def may_start(item: Work) -> bool:
            before = [one for one in self.queued if one.conversation == item.conversation and one.klass == item.klass]
            is_first = item is min(before, key=lambda one: one.seq)
            return item.conversation is None or item in self.returned or (is_first and not self.held(item.conversation))

        return [item for item in self.queued if (item.lane, item.klass) == (lane, klass) and may_start(item)]

    def aged_below(self, lane: str) -> list[Work]:
        """Aged work of classes below the most urgent one that has any."""
        classes = [found for klass in CLASSES if (found := self.eligible(lane, klass))]
        return [item for found in classes[1:] for item in found if self.now - item.arrived_at > AGING_S]

    def pick(self, items: list[Work], pick: int) -> Work | None:
        return items[pick % len(items)] if items else None

    # -- changes

    @rule(facts=FACTS, ttl=st.none() | st.floats(0, 20), earlier=st.sampled_from((0, 0, 0, 5)))
    def add(self, facts: dict[str, Any], ttl: float | None, earlier: int) -> None:
        """`earlier`: read again after a rebalance, so it stands before what came meanwhile."""
        self.number += 1
        deadline = None if ttl is None else self.now + ttl
        item = Work(self.number * 100 - earlier * 110, deadline=deadline, arrived_at=self.now, **facts)
        assert item not in self.scheduler
        self.scheduler.add(item)
        self.queued.append(item)
        with pytest.raises(ValueError, match="already"):
            self.scheduler.add(item)

    @rule(seconds=st.floats(0, 8))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    def start_item(self, item: Work) -> None:
        strict = not self.aged_below(item.lane)
        self.not_aged[item.lane] = 0 if strict or item in self.aged_below(item.lane) else self.not_aged[item.lane] + 1
        self.scheduler.start(item, self.now)
        self.queued.remove(item)
        self.returned.discard(item)
        assert item.conversation is None or not self.held(item.conversation), "two turns of a conversation are out"
        self.out.append(item)

    @rule(lane=st.sampled_from(LANES), count=st.integers(1, 4))
    def start_first(self, lane: str, count: int) -> None:
        """All fits: of SHARE starts at which aged work waits, one at least is for it."""
        for _ in range(count):
            item = next(self.scheduler.candidates(lane, self.now), None)
            if item is None:
                return
            self.start_item(item)
            assert self.not_aged[lane] < SHARE

    @rule(lane=st.sampled_from(LANES), pick=st.integers(0, 20))
    def start_any(self, lane: str, pick: int) -> None:
        """What fits passes what does not."""
        candidates = self.scheduler.candidates(lane, self.now)
        items = list(candidates)
        if item := self.pick(items, pick):
            again = self.scheduler.candidates(lane, self.now)
            next(again)
            self.start_item(item)
            self.not_aged[lane] = min(self.not_aged[lane], SHARE - 1)
            assert next(again, None) is None, "the candidates went on though the queue had changed"

    @rule(pick=st.integers(0, 20))
    def start_what_is_not_eligible(self, pick: int) -> None:
        hidden = [one for one in self.queued if one not in self.eligible(one.lane, one.klass)]
        if item := self.pick(hidden, pick):
            with pytest.raises(ValueError, match="eligible"):
                self.scheduler.start(item, self.now)

    @rule(pick=st.integers(0, 20))
    def end(self, pick: int) -> None:
        if item := self.pick(self.out, pick):
            self.out.remove(item)
            if item.conversation is not None:
                self.scheduler.release_conversation(item.conversation)

    @rule(pick=st.integers(0, 20))
    def put_back(self, pick: int) -> None:
        if item := self.pick(self.out, pick):
            self.out.remove(item)
            self.scheduler.put_back(item)
            self.queued.append(item)
            self.returned.add(item)

    @rule(conversation=st.sampled_from(CONVERSATIONS))
    def release_too_often(self, conversation: str) -> None:
        """A release while the turn waits to be started again: it waits like the others from now on."""
        if not any(one.conversation == conversation for one in self.out):
            self.scheduler.release_conversation(conversation)
            self.returned = {one for one in self.returned if one.conversation != conversation}

    @rule(pick=st.integers(0, 20))
    def remove(self, pick: int) -> None:
        stranger = Work(1)
        assert not self.scheduler.remove(stranger)
        if self.out:
            assert not self.scheduler.remove(self.out[0])
        if item := self.pick(self.queued, pick):
            assert self.scheduler.remove(item)
            assert not self.scheduler.remove(item)
            self.queued.remove(item)
            self.returned.discard(item)

    @rule(pick=st.integers(0, 20), klass=st.sampled_from(CLASSES), priority=st.integers(4, 6))
    def reprioritize(self, pick: int, klass: str, priority: int) -> None:
        assert not self.scheduler.reprioritize(Work(1), klass, priority)
        if item := self.pick(self.queued, pick):
            before = (item.seq, item.arrived_at)
            assert self.scheduler.reprioritize(item, klass, priority)
            assert (item.klass, item.priority) == (klass, priority)
            assert (item.seq, item.arrived_at) == before

    # -- always

    @invariant()
    def order(self) -> None:
        for lane in LANES:
            items = list(self.scheduler.candidates(lane, self.now))
            eligible = {klass: self.eligible(lane, klass) for klass in CLASSES}
            assert len(set(items)) == len(items)
            assert set(items) == {item for found in eligible.values() for item in found}
            assert items == list(self.scheduler.candidates(lane, self.now)), "reading has changed the order"
            strict = [item for klass in CLASSES for item in self.scheduler.fronts.ahead(lane, klass, 99)]
            early: list[Work] = []  # the aged that come before the others when it is their turn
            while [item for item in strict if item not in early] != items[len(early) :]:
                early.append(items[len(early)])
            assert len(early) <= AGED_TRIED
            assert set(early) <= set(self.aged_below(lane))
            for klass in CLASSES:
                assert {item for item in strict if item.klass == klass} == set(eligible[klass])
                first_two = [item for item in strict if item.klass == klass][:2]
                assert self.scheduler.fronts.ahead(lane, klass, 2) == first_two
                for tenant in TENANTS:
                    own = [item for item in strict if (item.klass, item.tenant) == (klass, tenant)]
                    assert own == sorted(own, key=lambda one: one.urgency)
        busy = {lane for lane in LANES if any(self.eligible(lane, klass) for klass in CLASSES)}
        assert set(self.scheduler.fronts.lanes()) == busy

    @invariant()
    def counts(self) -> None:
        scheduler, items = self.scheduler, self.queued
        assert len(scheduler) == len(items)
        assert all(item in scheduler for item in items)
        assert not any(item in scheduler for item in self.out)
        assert scheduler.statistics.depths() == {klass: sum(i.klass == klass for i in items) for klass in CLASSES}
        ages = scheduler.statistics.oldest_age(self.now)
        for at, klass in enumerate(CLASSES):
            assert ages[klass] == max((self.now - i.arrived_at for i in items if i.klass == klass), default=0.0)
            assert scheduler.statistics.up_to(klass) == sum(i.klass in CLASSES[: at + 1] for i in items)
            for lane in LANES:
                assert scheduler.fronts.depth(lane, klass) == sum((i.klass, i.lane) == (klass, lane) for i in items)
        expired = scheduler.statistics.expired(self.now)
        assert set(expired) == {i for i in items if i.deadline is not None and i.deadline <= self.now}
        deadlines = [i.deadline or 0.0 for i in expired]
        assert deadlines == sorted(deadlines)
        front = scheduler.fronts.front(99)
        for klass in CLASSES:
            of_class = [i for i in front if i.klass == klass]
            for lane in LANES:
                assert [i for i in of_class if i.lane == lane] == scheduler.fronts.ahead(lane, klass, 99)
        assert [CLASSES.index(i.klass) for i in front] == sorted(CLASSES.index(i.klass) for i in front)
        assert scheduler.fronts.front(3) == front[:3]

    def teardown(self) -> None:
        """Everything can be taken out, the turns of each conversation one at a time in the order of its log."""
        while self.queued or self.out:
            before, busy = len(self.queued), bool(self.out)
            for lane in LANES:
                self.start_first(lane, 1)
            ended: dict[tuple[str, str], int] = {}
            for item in list(self.out):
                self.out.remove(item)
                if item.conversation is not None:
                    place = (item.conversation, item.klass)
                    assert ended.get(place, -1000) < item.seq
                    ended[place] = item.seq
                    self.scheduler.release_conversation(item.conversation)
            assert len(self.queued) < before or busy, "something can never start"
        assert len(self.scheduler) == 0
        assert not len(self.scheduler._turns)


SchedulerMachine.TestCase.settings = settings(max_examples=examples(150), stateful_step_count=40, deadline=None)
TestScheduler = SchedulerMachine.TestCase


@pytest.fixture
def scheduler() -> Scheduler[Work]:
    return Scheduler(aging_s=10, aged_share=4)


def drain(scheduler: Scheduler[Work], lane: str, count: int, now: float = 0.0) -> list[Work]:
    started: list[Work] = []
    for _ in range(count):
        item = next(scheduler.candidates(lane, now), None)
        if item is not None:
            scheduler.start(item, now)
            started.append(item)
    return started


@given(
    high=st.lists(st.integers(1, 20), min_size=40, max_size=60),
    few=st.lists(st.integers(1, 20), min_size=5, max_size=10),
    klass=st.sampled_from(CLASSES),
)
def test_a_flood_of_one_tenant_does_not_hide_another(high: list[int], few: list[int], klass: str) -> None:
    """Of the service while both wait, each has half, but for the dearest item of each."""
    scheduler: Scheduler[Work] = Scheduler(aging_s=60, aged_share=4)
    for at, cost in enumerate(high):
        scheduler.add(Work(at, tenant="flood", cost=cost, klass=klass))
    drain(scheduler, "a", 10)
    for at, cost in enumerate(few):
        scheduler.add(Work(1_000 + at, tenant="few", cost=cost, klass=klass))
    service = {"flood": 0, "few": 0}
    waiting = len(few)
    while waiting:
        (item,) = drain(scheduler, "a", 1)
        service[item.tenant] += item.cost
        waiting -= item.tenant == "few"
        if waiting and len(scheduler) > waiting:  # both wait
            assert abs(service["flood"] - service["few"]) <= max(high) + max(few)


def test_the_aged_of_one_tenant_do_not_hide_those_of_another(scheduler: Scheduler[Work]) -> None:
    for at in range(1_000):
        scheduler.add(Work(at, tenant="flood", klass="low", arrived_at=0.0))
    for at in range(5):
        scheduler.add(Work(5_000 + at, tenant="few", klass="low", arrived_at=1.0))
    for at in range(400):
        scheduler.add(Work(10_000 + at, klass="high", arrived_at=50.0))
    started = drain(scheduler, "a", 80, now=50.0)
    low = [item for item in started if item.klass == "low"]
    assert len(low) == 20  # one in four
    assert sum(item.tenant == "few" for item in low) == 5
    assert sum(item.tenant == "few" for item in low[:11]) == 5


def test_the_aged_get_their_share_under_a_flood_that_is_aged_itself(scheduler: Scheduler[Work]) -> None:
    """Medium work that has waited long is no aged item's turn while it is the most urgent that there is."""
    for at in range(100):
        scheduler.add(Work(at, klass="medium"))
        scheduler.add(Work(1_000 + at, klass="low"))
    started = drain(scheduler, "a", 40, now=100.0)
    assert sum(item.klass == "low" for item in started) == 10


def test_lanes_count_their_aged_by_themselves(scheduler: Scheduler[Work]) -> None:
    for lane in LANES:
        for at in range(20):
            scheduler.add(Work(at, klass="low", lane=lane))
            scheduler.add(Work(1_000 + at, klass="high", lane=lane, arrived_at=100.0))
    drain(scheduler, "a", 3, now=100.0)
    assert [item.klass for item in drain(scheduler, "b", 4, now=100.0)] == ["high", "high", "high", "low"]
    assert [item.klass for item in drain(scheduler, "a", 1, now=100.0)] == ["low"]


def test_aged_low_work_is_held_back_for_slack_while_it_is_not_offered() -> None:
    """What a request is said to wait for must be what keeps it: it is offered when it is the turn of the aged."""
    scheduler: Scheduler[Work] = Scheduler(aging_s=10, aged_share=4, slack=SlackSettings(half_life_s=3.0, share=0.125))
    low = Work(0, klass="low")
    scheduler.add(low)
    scheduler.slack.observe("a", 8, None, 100.0)
    for at in range(1, 9):
        scheduler.add(Work(at, klass="high", arrived_at=100.0))
    seen: list[bool] = []
    for _ in range(6):
        offered = list(scheduler.candidates("a", 100.0))
        seen.append(low in offered)
        assert scheduler.holds_back(low) is not seen[-1]
        scheduler.start(next(item for item in offered if item is not low), 100.0)
    assert seen == [False, False, False, True, True, True]


def test_who_comes_back_after_a_refund_is_first_again(scheduler: Scheduler[Work]) -> None:
    for at in range(6):
        scheduler.add(Work(at, tenant=TENANTS[at % 3], cost=5))
    order = list(scheduler.candidates("a", 0.0))
    (first,) = drain(scheduler, "a", 1)
    scheduler.put_back(first)
    assert list(scheduler.candidates("a", 0.0)) == order


def test_a_turn_that_was_put_back_and_removed_opens_its_line(scheduler: Scheduler[Work]) -> None:
    turns = [Work(at, conversation="x") for at in range(3)]
    for turn in turns:
        scheduler.add(turn)
    scheduler.start(turns[0], 0.0)
    scheduler.put_back(turns[0])
    assert list(scheduler.candidates("a", 0.0)) == [turns[0]]
    scheduler.remove(turns[0])
    assert list(scheduler.candidates("a", 0.0)) == [turns[1]]


def test_a_turn_of_another_class_passes_turns(scheduler: Scheduler[Work]) -> None:
    low = [Work(at, conversation="x", klass="low") for at in range(2)]
    urgent = Work(7, conversation="x", klass="high")
    for turn in (*low, urgent):
        scheduler.add(turn)
    assert list(scheduler.candidates("a", 0.0)) == [urgent, low[0]]
    scheduler.start(urgent, 0.0)
    assert list(scheduler.candidates("a", 0.0)) == []
    assert scheduler.statistics.depths()["low"] == 2
    scheduler.release_conversation("x")
    assert list(scheduler.candidates("a", 0.0)) == [low[0]]


def test_a_share_of_one_is_refused() -> None:
    with pytest.raises(ValueError, match="aged_share"):
        Scheduler(aging_s=1, aged_share=1)


def test_what_has_left_is_forgotten(scheduler: Scheduler[Work]) -> None:
    """Neither a flood that came and went nor conversations that ended leave anything behind."""
    for at in range(20_000):
        item = Work(
            at, conversation=f"c{at % 100}" if at % 2 else None, tenant=f"t{at}", deadline=1e9, arrived_at=float(at)
        )
        scheduler.add(item)
        if at % 3:
            scheduler.remove(item)
        else:
            scheduler.start(item, 0.0)
            if item.conversation is not None:
                scheduler.release_conversation(item.conversation)
    assert not len(scheduler._turns)
    assert not any(times for lane in scheduler._lanes.values() for times in lane.arrivals.values())
    assert not any(scheduler.statistics._by_arrival.values())
    assert not scheduler.statistics._by_deadline


def test_nothing_waits_for_the_garbage_collector(scheduler: Scheduler[Work]) -> None:
    """A request that came and went is in no circle of references, so its bytes are free at once."""
    gc.disable()
    try:
        for conversation in (None, "x"):
            for at in range(100):
                item = Work(at, conversation=conversation, tenant=f"t{at % 3}", klass="low", deadline=1e9)
                gone = weakref.ref(item)
                scheduler.add(item)
                drain(scheduler, "a", 1, now=100.0)
                if conversation is not None:
                    scheduler.release_conversation(conversation)
                del item
                assert gone() is None
    finally:
        gc.enable()
