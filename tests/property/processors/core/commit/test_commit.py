"""The commit gate against a model of logs, a group with its committed offsets and done maps, and other workers."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kit.examples import examples
from penstock.processors.core.commit import span as span_module
from penstock.processors.core.commit.commit import TP, Arrival, Commit, DuplicateNotDelivered
from penstock.processors.core.commit.donemap import decode
from penstock.processors.core.commit.span import GapInDelivery

T0, T1 = ("t", 0), ("t", 1)
TPS: tuple[TP, ...] = (("high", 0), ("high", 1), ("low", 0))
SPAN = 6
Place = tuple[TP, int]


def places(tp: TP, committed: tuple[int, str]) -> tuple[int, set[int]]:
    """What a commit says: all below the offset is done, and these above it."""
    offset, text = committed
    return offset, {at for first, behind in decode(offset, text) for at in range(first, behind)}


class GateMachine(RuleBasedStateMachine):
    """`log` is what stands on the topics, `group` what the broker has committed: offset and metadata."""

    def __init__(self) -> None:
        super().__init__()
        self.forget, span_module.FORGET = span_module.FORGET, 2  # so that short logs are forgotten too
        self.log: dict[TP, dict[int, str]] = {tp: {} for tp in TPS}
        self.end: dict[TP, int] = dict.fromkeys(TPS, 0)
        self.group: dict[TP, tuple[int, str]] = dict.fromkeys(TPS, (0, ""))
        self.durable: set[str] = set()
        self.owned: set[TP] = set()
        self.generation = 0
        self.serial = 0
        self.begin_life()

    def begin_life(self) -> None:
        self.gate = Commit(commit_span=SPAN)
        self.forget_all()

    def forget_all(self) -> None:
        self.working: set[Place] = set()  # NEW and not finished
        self.waiting: set[Place] = set()  # duplicates that arrived
        self.fetched: list[Place] = []  # delivered, and not arrived yet
        self.position: dict[TP, int] = {}
        self.last_end: dict[TP, int] = {}  # of the newest delivery; lower than `delivered` after a rewind
        self.delivered: dict[TP, int] = {}
        self.highest_head: dict[TP, int] = {}
        self.known_done: set[Place] = set()  # what this gate must know to be finished

    def take_over(self, tps: set[TP]) -> None:
        """The model's side of partitions that are new here: everything known of them is what the group has."""
        for tp in tps:
            offset, done = places(tp, self.group[tp])
            self.position[tp] = self.last_end[tp] = self.delivered[tp] = self.highest_head[tp] = offset
            self.known_done |= {(tp, at) for at in done}

    @initialize(tps=st.sets(st.sampled_from(TPS), min_size=1))
    def begin(self, tps: set[TP]) -> None:
        revocation = self.gate.assign({tp: self.group[tp] for tp in tps}, self.generation)
        assert not revocation.dropped
        assert not revocation.restart_all
        self.owned = set(tps)
        self.take_over(self.owned)

    # -- the log

    @rule(tp=st.sampled_from(TPS), gap=st.sampled_from((0, 0, 0, 1, 2)), twin=st.integers(0, 30), tail=st.booleans())
    def produce(self, tp: TP, gap: int, twin: int, tail: bool) -> None:
        """A record; now and then of a request that stands on some topic already, or between offsets without records."""
        known = sorted({request for log in self.log.values() for request in log.values()})
        self.serial += 1
        self.log[tp][self.end[tp] + gap] = known[twin] if twin < min(len(known), 6) else f"r{self.serial:05}"
        self.end[tp] += gap + 1 + (tail and gap)

    # -- deliveries

    @rule(tp=st.sampled_from(TPS), count=st.integers(1, 5), jump=st.integers(1, 4), at_once=st.booleans())
    def deliver(self, tp: TP, count: int, jump: int, at_once: bool) -> None:
        if tp not in self.owned:
            self.gate.delivered(tp, 3, 9, [4])
            assert self.gate.arrive(tp, 4, "foreign") is Arrival.FOREIGN
            self.gate.complete(tp, 4)
            return
        start = self.position[tp]
        end = min(start + count, self.end[tp])
        if end == start:
            return
        before = self.gate.commits()
        hole = self.last_end[tp] + jump
        with pytest.raises(GapInDelivery):
            self.gate.delivered(tp, hole, hole + 1, [hole])
        with pytest.raises(GapInDelivery):
            self.gate.arrive(tp, max(self.delivered[tp], start), "never delivered")
        assert self.gate.commits() == before
        offsets = [at for at in self.log[tp] if start <= at < end]
        self.gate.delivered(tp, start, end, offsets)
        self.position[tp] = self.last_end[tp] = end
        self.delivered[tp] = max(self.delivered[tp], end)
        self.fetched = [one for one in self.fetched if one[0] != tp or one[1] not in offsets]
        self.fetched += [(tp, at) for at in offsets]
        if at_once:
            while self.fetched:
                self.arrive_one(0)

    @precondition(lambda self: self.fetched)
    @rule(count=st.integers(1, 4))
    def arrive(self, count: int) -> None:
        for _ in range(min(count, len(self.fetched))):
            self.arrive_one(0)

    def arrive_one(self, pick: int) -> None:
        place = tp, offset = self.fetched.pop(pick)
        request = self.log[tp][offset]
        held = {self.log[where][at] for where, at in self.working}
        arrival = self.gate.arrive(tp, offset, request)
        if place in self.working:
            assert arrival is Arrival.HELD
        elif place in self.waiting:
            assert arrival is Arrival.DUPLICATE
        elif place in self.known_done:
            # What lies far below the head may have been forgotten while its commit did not get through.
            assert arrival is Arrival.FINISHED or offset < self.highest_head[tp] - SPAN
        if arrival is Arrival.NEW:
            assert request not in held
            self.working.add(place)
        elif arrival is Arrival.DUPLICATE:
            assert request in held
            self.waiting.add(place)
        elif arrival is Arrival.FINISHED:
            self.check_ended(tp, offset)
        else:
            assert arrival is Arrival.HELD

    @rule(tp=st.sampled_from(TPS))
    def rewind(self, tp: TP) -> None:
        """The consumer begins again at what is committed, without a rebalance, and delivers that at once."""
        if tp in self.owned:
            self.position[tp] = min(self.position[tp], self.group[tp][0])
            self.deliver(tp, 1, 1, at_once=False)

    # -- outcomes

    def finish(self, place: Place) -> None:
        tp, offset = place
        self.working.remove(place)
        request = self.log[tp][offset]
        self.durable.add(request)
        self.gate.complete(tp, offset)
        self.gate.complete(tp, offset)  # a second time changes nothing
        ended = {(at, n) for at, n in self.waiting if self.log[at][n] == request}
        self.waiting -= ended
        self.known_done |= ended | {place}

    @rule(pick=st.integers(0, 30))
    def complete(self, pick: int) -> None:
        if self.working:
            self.finish(sorted(self.working)[pick % len(self.working)])

    @rule(pick=st.integers(0, 30))
    def complete_a_duplicate(self, pick: int) -> None:
        """Only the first of a request can end; its duplicates end with it."""
        if self.waiting:
            tp, offset = sorted(self.waiting)[pick % len(self.waiting)]
            self.gate.complete(tp, offset)

    # -- commits

    def check_ended(self, tp: TP, offset: int) -> None:
        """Its outcome is durable, or the same request stands elsewhere, not committed, for its owner to finish."""
        request = self.log[tp][offset]
        assert (tp, offset) not in self.working
        if request in self.durable:
            return
        for other in TPS:
            committed, done = places(other, self.group[other])
            for at, found in self.log[other].items():
                if found == request and (other, at) != (tp, offset) and at >= committed and at not in done:
                    return
        pytest.fail(f"{(tp, offset)} is committed and nobody ends it")

    def check_commit(self, tp: TP, commit: tuple[int, str]) -> None:
        assert commit != self.group[tp]
        assert commit[0] >= self.group[tp][0], "a committed offset went backwards"
        offset, done = places(tp, commit)
        assert len(commit[1]) <= 3_500
        for at in self.log[tp]:
            if at < offset or at in done:
                self.check_ended(tp, at)

    @rule(fate=st.sampled_from(("acknowledged", "acknowledged", "refused", "lost")), later=st.integers(0, 3))
    def commit(self, fate: str, later: int) -> None:
        """`lost`: the broker has the commit, and we never hear of it. Work goes on while a commit is under way."""
        due = self.gate.commits()
        assert due == self.gate.commits()
        for tp, commit in due.items():
            assert tp in self.owned
            if commit != self.group[tp]:  # the acknowledgement of the same commit was lost before
                self.check_commit(tp, commit)
        for _ in range(later):
            self.complete(later)
        for tp, commit in due.items():
            if fate != "refused":
                self.group[tp] = commit
            if fate == "acknowledged":
                self.gate.committed(tp, *commit)
        if fate == "acknowledged" and not later:
            assert not self.gate.commits()

    # -- assignments

    def others_go_on(self, tps: set[TP], count: int, finish: int) -> None:
        """Another worker, with a gate of its own, takes these partitions for a while."""
        gate = Commit(commit_span=SPAN)
        gate.assign({tp: self.group[tp] for tp in tps}, self.generation)
        new: list[Place] = []
        for tp in sorted(tps):
            start, done = places(tp, self.group[tp])
            end = min(start + count, self.end[tp])
            offsets = [at for at in self.log[tp] if start <= at < end]
            gate.delivered(tp, start, max(start, end), offsets)
            for at in offsets:
                arrival = gate.arrive(tp, at, self.log[tp][at])
                assert (arrival is Arrival.FINISHED) == (at in done)
                if arrival is Arrival.NEW:
                    new.append((tp, at))
        for tp, at in new[::2] if finish == 1 else new[::-1][: finish * 2]:
            self.durable.add(self.log[tp][at])
            gate.complete(tp, at)
        for tp, commit in gate.commits().items():
            self.check_commit(tp, commit)
            self.group[tp] = commit

    @rule(
        tps=st.sets(st.sampled_from(TPS)),
        jump=st.sampled_from((1, 1, 1, 2, 5)),
        fenced=st.sampled_from((False, False, True)),
        others=st.integers(0, 8),
        finish=st.integers(0, 3),
        goes_on=st.booleans(),
    )
    def rebalance(self, tps: set[TP], jump: int, fenced: bool, others: int, finish: int, goes_on: bool) -> None:
        restart = fenced or jump != 1
        kept = set() if restart else self.owned & tps
        gone = {place for place in self.working if place[0] not in kept}
        moved = {self.log[tp][at] for tp, at in gone}
        self.generation += jump
        for place in gone:
            self.working.remove(place)
        working_before, self.working = self.working, set()  # the others may run what also runs here
        self.others_go_on(set(TPS) - kept, others, finish)
        self.working = working_before
        revocation = self.gate.assign({tp: self.group[tp] for tp in tps}, self.generation, fenced=fenced)
        assert revocation.restart_all == restart
        assert {(*tp, offset) for tp, offset in gone} == set(revocation.dropped)
        assert len(set(revocation.dropped)) == len(revocation.dropped)
        self.owned = set(tps)
        if restart:
            self.forget_all()
        else:
            orphans = {(tp, at) for tp, at in self.waiting if tp in kept and self.log[tp][at] in moved}
            self.known_done = {one for one in self.known_done if one[0] in kept}
            self.waiting = {one for one in self.waiting if one[0] in kept} - orphans
            self.fetched = [one for one in self.fetched if one[0] in kept]
            if not goes_on or orphans:  # duplicates of what moved are new work when they are delivered again
                for tp in kept:
                    self.position[tp] = self.group[tp][0]
                self.fetched.clear()
        self.take_over(self.owned - kept)

    @rule(tps=st.sets(st.sampled_from(TPS), min_size=1), others=st.integers(0, 8), finish=st.integers(0, 3))
    def crash(self, tps: set[TP], others: int, finish: int) -> None:
        """This worker dies, others go on, and a new one begins with what the group has."""
        self.begin_life()
        self.generation += 2
        self.others_go_on(set(TPS), others, finish)
        self.begin(tps)

    # -- always

    @invariant()
    def counts(self) -> None:
        assert self.gate.inflight == len(self.working)
        assert self.gate.generation == (self.generation if self.owned or self.gate.generation >= 0 else -1)
        self.gate.check()
        known = self.gate._partitions
        assert sum(len(one.entries) for one in known.values()) == len(self.working) + len(self.waiting)
        assert set(self.gate.partitions()) == self.owned
        for tp in TPS:
            assert self.gate.full(tp) == (tp in known and known[tp].span.reached - known[tp].span.head >= SPAN)
        for tp in self.owned:
            head = known[tp].span.head
            self.highest_head[tp] = max(self.highest_head[tp], head)
            unfinished = [at for where, at in (*self.working, *self.waiting, *self.fetched) if where == tp]
            unknown = [at for at in unfinished if (tp, at) not in self.known_done]
            assert head <= min(unknown, default=head)

    def teardown(self) -> None:
        """At quiescence everything is committed, and no map is needed."""
        try:
            for tp in sorted(self.owned):
                self.position[tp] = min(self.position[tp], self.group[tp][0])
                while self.position[tp] < self.end[tp]:
                    self.deliver(tp, 5, 1, at_once=True)
            while self.fetched:
                self.arrive_one(0)
            for place in sorted(self.working, reverse=True):
                self.finish(place)
            self.commit("acknowledged", 0)
            assert self.gate.inflight == 0
            for tp in self.owned:
                span = self.gate._partitions[tp].span
                assert (span.head, self.gate.full(tp)) == (span.end, False)
                assert self.group[tp] == (self.end[tp], "")
        finally:
            span_module.FORGET = self.forget


GateMachine.TestCase.settings = settings(max_examples=examples(200), stateful_step_count=40, deadline=None)
TestGate = GateMachine.TestCase


def remembered(gate: Commit) -> int:
    """Offsets whose state is kept, nine bytes each."""
    return sum(len(partition.span) for partition in gate._partitions.values())


def new_gate(*tps: TP, delivered: int = 20) -> Commit:
    gate = Commit(commit_span=99)
    gate.assign(dict.fromkeys(tps, (0, "")), 1)
    for tp in tps if delivered else ():
        gate.delivered(tp, 0, delivered, range(delivered))
    return gate


def run(gate: Commit, offsets: Iterable[int], tp: TP = T0) -> None:
    """Each is of a request of its own, which arrives and ends."""
    for offset in offsets:
        gate.arrive(tp, offset, f"{tp}-{offset}")
        gate.complete(tp, offset)


@given(order=st.permutations(range(6)), gaps=st.lists(st.integers(1, 4), min_size=6, max_size=6))
def test_the_commit_follows_the_unfinished_head(order: list[int], gaps: list[int]) -> None:
    gate = new_gate(T0, delivered=0)
    offsets = [sum(gaps[: n + 1]) for n in range(6)]
    gate.delivered(T0, 0, offsets[-1] + 3, offsets)
    for offset in offsets:
        gate.arrive(T0, offset, str(offset))
    for n, at in enumerate(order):
        gate.complete(T0, offsets[at])
        finished = {offsets[one] for one in order[: n + 1]}
        head = next((offset for offset in offsets if offset not in finished), offsets[-1] + 3)
        offset, text = gate.commits()[T0]
        assert offset == head
        done = {at for first, behind in decode(offset, text) for at in range(first, behind)}
        assert done == {at for at in range(head, offsets[-1] + 3) if at in finished or at not in offsets}


def test_a_gap_in_deliveries_raises() -> None:
    gate = new_gate(T0)
    with pytest.raises(GapInDelivery):
        gate.delivered(T0, 21, 22, [21])
    gate.delivered(T0, 20, 21, [20])
    with pytest.raises(GapInDelivery):
        gate.arrive(T0, 21, "r")
    gate.assign({T0: (7, "")}, 2)
    with pytest.raises(GapInDelivery):  # an offset reset: the broker would not deliver what it has committed
        gate.delivered(T0, 0, 5, range(5))
    gate.delivered(T0, 7, 12, range(7, 12))
    with pytest.raises(GapInDelivery):
        gate.delivered(T0, 20, 22, [20, 21])


def test_a_lower_offset_of_the_broker_does_not_make_commits_fall() -> None:
    gate = new_gate(T0)
    run(gate, range(9))
    gate.committed(T0, *gate.commits()[T0])
    gate.assign({T0: (4, "")}, 2)
    gate.delivered(T0, 4, 20, range(4, 20))
    assert gate.arrive(T0, 4, f"{T0}-4") in {Arrival.NEW, Arrival.FINISHED}
    gate.complete(T0, 4)
    assert gate.commits() == {}


def test_a_duplicate_that_a_tool_passed_over_holds_no_commit_when_its_first_goes() -> None:
    """It is not delivered again, so nothing would ever end it."""
    gate = new_gate(T0, T1, delivered=0)
    gate.delivered(T0, 0, 1, [0])
    gate.delivered(T1, 0, 2, [0, 1])
    gate.arrive(T0, 0, "r")
    assert gate.arrive(T1, 0, "r") is Arrival.DUPLICATE
    run(gate, [1], T1)
    gate.assign({T1: (1, "")}, 2)
    gate.delivered(T1, 1, 2, [1])
    assert gate.arrive(T1, 1, f"{T1}-1") is Arrival.FINISHED
    assert gate.commits() == {T1: (2, "")}


def test_a_topic_made_anew_replaces_what_was_held_and_what_was_done() -> None:
    gate = new_gate(T0)
    gate.arrive(T0, 0, "old")
    gate.arrive(T0, 1, "old")
    run(gate, [2])
    gate.delivered(T0, 0, 3, range(3))
    assert gate.arrive(T0, 0, "new") is Arrival.NEW
    assert gate.arrive(T0, 2, "newer") is Arrival.NEW
    assert gate.inflight == 2
    gate.complete(T0, 0)
    assert gate.commits()[T0] == (1, ""), "what stands at 1 now has not arrived yet"
    assert gate.arrive(T0, 1, "old") is Arrival.NEW


def test_a_duplicate_of_work_whose_topic_was_made_anew_becomes_work_when_it_is_delivered_again() -> None:
    """It was committed, and its request had no outcome."""
    gate = new_gate(T0, T1)
    gate.arrive(T0, 3, "r")
    gate.arrive(T1, 8, "r")
    gate.assign(dict.fromkeys((T0, T1), (0, "")), 2)
    gate.delivered(T0, 0, 9, range(9))
    assert gate.arrive(T0, 3, "of the new topic") is Arrival.NEW
    gate.delivered(T1, 0, 9, range(9))
    run(gate, range(8), T1)
    assert gate.commits()[T1] == (8, "")
    assert gate.arrive(T1, 8, "r") is Arrival.NEW


@pytest.mark.parametrize("duplicate", [(T1, 8), (T0, 2)])
def test_a_duplicate_that_no_delivery_will_bring_is_not_passed_over(duplicate: tuple[TP, int]) -> None:
    """It came again before the record that replaced the work that it waited for."""
    gate = new_gate(T0, T1)
    gate.arrive(T0, 3, "r")
    gate.arrive(*duplicate, "r")
    gate.assign(dict.fromkeys((T0, T1), (0, "")), 2)
    gate.delivered(duplicate[0], 0, 9, range(9))
    assert gate.arrive(*duplicate, "r") is Arrival.DUPLICATE
    gate.delivered(T0, 0, 9, range(9))
    with pytest.raises(DuplicateNotDelivered):
        gate.arrive(T0, 3, "of the new topic")
    assert gate.commits().get(duplicate[0], (0, ""))[0] <= duplicate[1]


def test_a_takeover_runs_nothing_again_that_the_map_names() -> None:
    """Fifty thousand, half of them done at random: the map holds the lower 22,000 of them, and says nothing wrong."""
    chance = random.Random(3)
    gate = Commit(commit_span=50_000)
    gate.assign({T0: (100, "")}, 1)
    gate.delivered(T0, 100, 50_100, range(100, 50_100))
    for offset in range(100, 50_100):
        gate.arrive(T0, offset, str(offset))
    finished = {offset for offset in range(101, 50_100) if chance.random() < 0.5}
    for offset in finished:
        gate.complete(T0, offset)
    assert gate.full(T0)
    commits = gate.commits()
    assert commits[T0][0] == 100
    other = Commit(commit_span=50_000)
    other.assign(commits, 2)
    assert other.commits() == {}
    other.delivered(T0, 100, 50_100, range(100, 50_100))
    suppressed = {offset for offset in range(100, 50_100) if other.arrive(T0, offset, str(offset)) is Arrival.FINISHED}
    last = max(suppressed)
    assert suppressed == {offset for offset in finished if offset <= last}
    assert last > 22_000


def test_what_is_remembered_is_bounded_by_the_span() -> None:
    """Commits that do not get through do not make the gate grow with all that it has finished."""
    gate = Commit(commit_span=1_000)
    gate.assign({T0: (0, "")}, 1)
    for start in range(0, 50_000, 100):
        gate.delivered(T0, start, start + 100, range(start, start + 100))
        run(gate, range(start, start + 100))
    assert remembered(gate) <= 1_000 + span_module.FORGET + 100
    assert gate.commits() == {T0: (50_000, "")}
    gate.committed(T0, 50_000, "")
    assert remembered(gate) <= 100  # the last delivery, whose records may not all have arrived
