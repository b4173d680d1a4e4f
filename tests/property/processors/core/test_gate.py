"""The commit gate against a model of logs, a group and its committed offsets, in any interleaving."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from penstock.processors.core.gate import TP, Arrival, CommitGate

TPS: tuple[TP, ...] = (("high", 0), ("high", 1), ("low", 0))
CAPS = {"high": (12, 8), "medium": (10, 6), "low": (6, 4)}


class GateMachine(RuleBasedStateMachine):
    """`log` is what stands on the topics, `committed` what the group would redeliver from."""

    def __init__(self) -> None:
        super().__init__()
        self.log: dict[TP, dict[int, str]] = {tp: {} for tp in TPS}
        self.committed: dict[TP, int] = dict.fromkeys(TPS, 0)
        self.acked: dict[TP, int] = dict.fromkeys(TPS, 0)  # behind the last acknowledged offset
        self.position: dict[TP, int] = dict.fromkeys(TPS, 0)
        self.durable: set[str] = set()
        self.working: dict[tuple[TP, int], int] = {}  # NEW and not finished → the generation in which it came
        self.latest: dict[tuple[TP, int], Any] = {}  # newest handle of each delivered offset
        self.owned: set[TP] = set()
        self.generation = 0
        self.serial = 0
        self.gate = CommitGate(inflight_cap=CAPS, commit_span=5, classes={"high": "high", "low": "low"})

    @initialize(tps=st.sets(st.sampled_from(TPS), min_size=1))
    def begin(self, tps: set[TP]) -> None:
        revocation = self.gate.assign(tps, self.generation)
        assert not revocation.dropped
        assert not revocation.restart_all
        self.owned = tps

    def end(self, tp: TP) -> int:
        return max(self.log[tp], default=-1) + 1

    def acknowledge(self, handles: list[Any]) -> None:
        by_partition: dict[TP, list[int]] = {}
        for tp, offset, serial in handles:
            assert tp in self.owned
            assert self.latest[(tp, offset)] == serial, "an older handle than the newest was acknowledged"
            by_partition.setdefault(tp, []).append(offset)
        for tp, offsets in by_partition.items():
            assert offsets == sorted(set(offsets))
            for offset in offsets:
                for before in (at for at in self.log[tp] if at <= offset):
                    self.check_ended(tp, before)
                self.acked[tp] = max(self.acked[tp], offset + 1)

    def check_ended(self, tp: TP, offset: int) -> None:
        """Its outcome is durable, or the same request stands elsewhere, not acknowledged, for its owner to finish."""
        request = self.log[tp][offset]
        elsewhere = any(
            found == request and (other, at) != (tp, offset) and at >= self.acked[other]
            for other in TPS
            for at, found in self.log[other].items()
        )
        assert (tp, offset) not in self.working
        assert request in self.durable or elsewhere

    @rule(tp=st.sampled_from(TPS), gap=st.integers(1, 3), twin=st.integers(0, 40))
    def produce(self, tp: TP, gap: int, twin: int) -> None:
        """A record; now and then of a request that stands on some topic already."""
        known = sorted({request for log in self.log.values() for request in log.values()})
        self.serial += 1
        request = known[twin] if twin < len(known) and twin < 6 else f"r{self.serial:05}"
        self.log[tp][self.end(tp) + gap - 1] = request

    def deliver_one(self, tp: TP) -> bool:
        offset = next((at for at in self.log[tp] if at >= self.position[tp]), None)
        if offset is None:
            return False
        self.position[tp] = offset + 1
        self.serial += 1
        request = self.log[tp][offset]
        before = self.latest.get((tp, offset))
        self.latest[(tp, offset)] = self.serial
        arrival = self.gate.arrive(tp, offset, request, (tp, offset, self.serial))
        held = {self.log[where][at] for where, at in self.working}
        match arrival:
            case Arrival.NEW:
                assert request not in held
                self.working[(tp, offset)] = self.generation
            case Arrival.DUPLICATE:
                assert request in held
                assert (tp, offset) not in self.working
            case Arrival.FINISHED | Arrival.HELD:
                assert before is not None
            case _:
                pytest.fail("an owned partition's record is foreign")
        self.acknowledge(self.gate.take_acks())
        return True

    @rule(tp=st.sampled_from(TPS), count=st.integers(1, 4))
    def deliver(self, tp: TP, count: int) -> None:
        if tp not in self.owned:
            assert self.gate.arrive(tp, self.end(tp), "foreign", None) is Arrival.FOREIGN
            assert self.gate.complete(tp, 0) == []
            return
        for _ in range(count):
            self.deliver_one(tp)

    def finish(self, tp: TP, offset: int) -> None:
        assert self.gate.epoch_of(tp, offset) == self.working.pop((tp, offset))
        self.durable.add(self.log[tp][offset])
        self.acknowledge(self.gate.complete(tp, offset))
        assert self.gate.complete(tp, offset) == []

    @rule(pick=st.integers(0, 30))
    def complete(self, pick: int) -> None:
        if self.working:
            self.finish(*sorted(self.working)[pick % len(self.working)])

    @rule(
        tps=st.sets(st.sampled_from(TPS)),
        jump=st.sampled_from((1, 1, 1, 2, 5)),
        fenced=st.sampled_from((False, False, True)),
        lost=st.integers(0, 3),
        others=st.integers(0, 3),
    )
    def rebalance(self, tps: set[TP], jump: int, fenced: bool, lost: int, others: int) -> None:
        restart = fenced or jump != 1
        gone = {place for place in self.working if restart or place[0] not in tps}
        self.generation += jump
        revocation = self.gate.assign(tps, self.generation, fenced=fenced)
        assert revocation.restart_all == restart
        assert {(*tp, offset) for tp, offset in gone} == set(revocation.dropped)
        for place in gone:
            del self.working[place]
        for tp in TPS:
            # The last commits may not have got through; what nobody here holds, others may go on with.
            self.committed[tp] = max(self.committed[tp], self.acked[tp] - lost)
            if restart or tp not in self.owned or tp not in tps:
                for offset in [at for at in self.log[tp] if at >= self.committed[tp]][:others]:
                    self.durable.add(self.log[tp][offset])
                    self.committed[tp] = offset + 1
            self.acked[tp] = self.position[tp] = self.committed[tp]
        self.owned = tps
        self.acknowledge(self.gate.take_acks())

    @invariant()
    def counts(self) -> None:
        stats = self.gate.stats()
        assert stats.inflight == self.gate.inflight == len(self.working)
        assert stats.partitions == len(self.owned)
        assert stats.held == sum(self.gate.held(tp) for tp in TPS) >= len(self.working)
        assert {tp for tp in TPS if self.gate.owns(tp)} == self.owned
        paused = self.gate.pauses()
        assert paused <= self.owned
        for tp in self.owned:
            pause_at, resume_at = CAPS[tp[0]]
            if len(self.working) >= pause_at or self.gate.held(tp) >= 5:
                assert tp in paused
            if len(self.working) < resume_at and self.gate.held(tp) < 3:
                assert tp not in paused

    def teardown(self) -> None:
        """At quiescence everything is acknowledged."""
        for tp in sorted(self.owned):
            while self.deliver_one(tp):
                pass
        for place in sorted(self.working, reverse=True):
            self.finish(*place)
        assert self.gate.inflight == 0
        for tp in self.owned:
            assert self.gate.held(tp) == 0
            assert self.acked[tp] == self.end(tp)


GateMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestGate = GateMachine.TestCase


@given(order=st.permutations(range(6)), gaps=st.lists(st.integers(1, 4), min_size=6, max_size=6))
def test_each_ack_comes_once_and_in_order(order: list[int], gaps: list[int]) -> None:
    gate = CommitGate(inflight_cap={"medium": (99, 99)}, commit_span=99, classes={})
    gate.assign([("t", 0)], 1)
    offsets = [sum(gaps[: n + 1]) for n in range(6)]
    for offset in offsets:
        gate.arrive(("t", 0), offset, str(offset), offset)
    acks: list[int] = []
    finished: set[int] = set()
    for n in order:
        finished.add(offsets[n])
        acks += gate.complete(("t", 0), offsets[n])
        prefix = next((i for i, at in enumerate(offsets) if at not in finished), len(offsets))
        assert acks == offsets[:prefix]


def test_duplicate_ends_with_the_first() -> None:
    gate = CommitGate(inflight_cap={"medium": (99, 99)}, commit_span=99, classes={})
    gate.assign([("t", 0), ("t", 1)], 1)
    assert gate.arrive(("t", 0), 3, "r", "a") is Arrival.NEW
    assert gate.arrive(("t", 1), 8, "r", "b") is Arrival.DUPLICATE
    assert gate.arrive(("t", 0), 9, "r", "c") is Arrival.DUPLICATE
    assert gate.inflight == 1
    assert gate.complete(("t", 1), 8) == []
    assert gate.complete(("t", 0), 3) == ["a", "c", "b"]


def test_duplicate_of_moved_work_ends_silently() -> None:
    gate = CommitGate(inflight_cap={"medium": (99, 99)}, commit_span=99, classes={})
    gate.assign([("t", 0), ("t", 1)], 1)
    gate.arrive(("t", 0), 3, "r", "a")
    gate.arrive(("t", 1), 8, "r", "b")
    revocation = gate.assign([("t", 1)], 2)
    assert revocation.dropped == (("t", 0, 3),)
    assert gate.take_acks() == ["b"]


def test_a_topic_made_anew_replaces_what_was_held() -> None:
    gate = CommitGate(inflight_cap={"medium": (99, 99)}, commit_span=99, classes={})
    gate.assign([("t", 0)], 1)
    gate.arrive(("t", 0), 0, "old", "a")
    gate.arrive(("t", 0), 1, "old", "a2")
    assert gate.arrive(("t", 0), 0, "new", "b") is Arrival.NEW
    assert gate.inflight == 1
    assert gate.complete(("t", 0), 0)[0] == "b"
