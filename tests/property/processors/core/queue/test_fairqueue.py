"""The fair queue against a sorted list, and the bound of its fairness."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kit.examples import examples
from penstock.processors.core.queue import fairqueue
from penstock.processors.core.queue.fairqueue import FairQueue, Sorted

TENANTS = ("a", "b", "c")
COSTS = st.integers(1, 9)


@dataclass(frozen=True)
class One:
    number: int
    tenant: str
    rank: int
    cost: int


def entry_of(one: One) -> tuple[int, int, One]:
    return (one.rank, one.number, one)


class FairQueueMachine(RuleBasedStateMachine):
    """The model keeps a tag for each tenant and sorts everything each time."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: FairQueue[One] = FairQueue()
        self.entries: dict[str, list[tuple[int, int, One]]] = {name: [] for name in TENANTS}
        self.taken: list[tuple[int, int, One]] = []
        self.tags: dict[str, int] = {}
        self.virtual = 0
        self.number = 0

    @rule(tenant=st.sampled_from(TENANTS), rank=st.integers(0, 2), cost=COSTS)
    def add(self, tenant: str, rank: int, cost: int) -> None:
        self.number += 1
        one = One(self.number, tenant, rank, cost)
        if not self.entries[tenant]:
            self.tags[tenant] = max(self.tags.get(tenant, 0), self.virtual)
        self.entries[tenant].append(entry_of(one))
        self.queue.add(tenant, self.entries[tenant][-1])

    def pick(self, pick: int) -> tuple[int, int, One] | None:
        waiting = [entry for entries in self.entries.values() for entry in entries]
        return waiting[pick % len(waiting)] if waiting else None

    def left(self, entry: tuple[int, int, One]) -> None:
        self.entries[entry[2].tenant].remove(entry)
        if not any(self.entries.values()):
            self.tags, self.virtual = {}, 0

    @rule(pick=st.integers(0, 20))
    def remove(self, pick: int) -> None:
        if entry := self.pick(pick):
            self.queue.remove(entry[2].tenant, entry)
            self.left(entry)

    def take_entry(self, entry: tuple[int, int, One]) -> None:
        tenant, cost = entry[2].tenant, entry[2].cost
        self.queue.take(tenant, entry, cost)
        self.virtual = max(self.virtual, self.tags[tenant])
        self.tags[tenant] += cost
        self.left(entry)
        self.taken.append(entry)

    @rule(pick=st.integers(0, 20))
    def take_any(self, pick: int) -> None:
        """What fits may pass what does not."""
        if entry := self.pick(pick):
            self.take_entry(entry)

    @rule(count=st.integers(1, 4))
    def take_first(self, count: int) -> None:
        predicted = list(islice(self.queue, count))
        for one in predicted:
            assert next(iter(self.queue)) is one, "the order that was read is not the order of starting"
            self.take_entry(next(entry for entry in self.entries[one.tenant] if entry[2] is one))

    @precondition(lambda self: any(self.entries.values()))
    @rule()
    def take_and_put_back(self) -> None:
        """It gets its old place, unless earlier refunds had left its tenant a credit: that ends while it is away."""
        order = list(self.queue)
        tenant = order[0].tenant
        had_credit = self.tags[tenant] < self.virtual
        first = next(entry for entry in self.entries[tenant] if entry[2] is order[0])
        self.take_entry(first)
        self.put_back(len(self.taken) - 1)
        assert had_credit or list(self.queue) == order

    @rule(pick=st.integers(0, 20))
    def put_back(self, pick: int) -> None:
        if not self.taken:
            return
        entry = self.taken.pop(pick % len(self.taken))
        tenant, cost = entry[2].tenant, entry[2].cost
        if self.entries[tenant]:
            self.tags[tenant] -= cost
        else:
            self.tags[tenant] = max(self.tags.get(tenant, 0), self.virtual) - cost
        self.entries[tenant].append(entry)
        self.queue.put_back(tenant, entry, cost)

    @invariant()
    def order(self) -> None:
        """Each tenant's items in the order of their entries, each tagged with what those before it cost."""
        assert len(self.queue) == sum(map(len, self.entries.values()))
        order = list(self.queue)
        assert len(set(order)) == len(order) == len(self.queue)
        tags: list[int] = []
        at = dict(self.tags)
        for one in order:
            tags.append(at[one.tenant])
            at[one.tenant] += one.cost
        assert tags == sorted(tags)
        for tenant in TENANTS:
            assert [one for one in order if one.tenant == tenant] == [one for *_, one in sorted(self.entries[tenant])]


FairQueueMachine.TestCase.settings = settings(max_examples=examples(200), stateful_step_count=40, deadline=None)
TestFairQueue = FairQueueMachine.TestCase


@given(costs=st.lists(st.lists(COSTS, min_size=30, max_size=60), min_size=2, max_size=4), late=st.integers(0, 20))
def test_no_tenant_gets_more_than_another_that_waits(costs: list[list[int]], late: int) -> None:
    """Over any time in which two tenants wait, their service differs by the dearest item of each at most."""
    queue: FairQueue[One] = FairQueue()
    entries: dict[int, tuple[int, int, One]] = {}
    number = 0

    def fill(tenant: int) -> None:
        nonlocal number
        for cost in costs[tenant]:
            number += 1
            entries[number] = entry_of(One(number, str(tenant), 0, cost))
            queue.add(str(tenant), entries[number])

    left = [len(one) for one in costs]
    service = [0] * len(costs)
    history: list[tuple[int, ...]] = []
    fill(0)
    for started in range(late + 20):
        if started == late:  # the others come when the first has had the lane for itself
            for tenant in range(1, len(costs)):
                fill(tenant)
        if started >= late:
            history.append(tuple(service))
        one = next(iter(queue))
        queue.take(one.tenant, entries[one.number], one.cost)
        service[int(one.tenant)] += one.cost
        left[int(one.tenant)] -= 1
        if not left[int(one.tenant)]:
            break
    for a in range(len(costs)):
        for b in range(a):
            bound = max(costs[a]) + max(costs[b])
            for begin in history:
                for end in history:
                    assert abs((end[a] - begin[a]) - (end[b] - begin[b])) <= bound


@given(numbers=st.lists(st.integers(0, 50), max_size=200), picks=st.lists(st.integers(0, 1000), max_size=150))
def test_sorted_chunks(numbers: list[int], picks: list[int]) -> None:
    chunk, fairqueue.CHUNK = fairqueue.CHUNK, 4
    try:
        held, model = Sorted(), list[tuple[int, int]]()
        for at, number in enumerate(numbers):
            held.add(entry := (number, at))
            model.append(entry)
        for pick in picks:
            if model:
                held.remove(model.pop(pick % len(model)))
        assert list(held) == sorted(model)
        assert bool(held) == bool(model)
    finally:
        fairqueue.CHUNK = chunk


def test_tenants_that_went_away_are_forgotten() -> None:
    queue: FairQueue[One] = FairQueue()
    stays = entry_of(One(0, "stays", 9, 1))
    queue.add("stays", stays)
    for number in range(1, 20_000):
        tenant = f"t{number}"
        entry = entry_of(One(number, tenant, 0, 1))
        queue.add(tenant, entry)
        queue.take(tenant, entry, 1)
        if number % 10 == 0:
            queue.take("stays", stays, 1)
            queue.add("stays", stays)
    assert queue.tenants() < 1_000
