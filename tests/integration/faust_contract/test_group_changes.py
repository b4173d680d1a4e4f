"""Joining, leaving, dying and standing still; a broker that stands still or starts again: nothing is lost or skipped.

A member may do work twice after these; what it was handed always joins to what was committed, and what is committed
never goes back.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from group import Group, MemberProcess, Seen

from penstock.processors.kafka.membership import TP
from support import wait_until, wait_until_async

Groups = Callable[..., Group]


@contextmanager
def members(group: Group, *names: str, stall_s: float = 60) -> Iterator[list[MemberProcess]]:
    made = [MemberProcess(group, name, stall_s) for name in names]
    try:
        yield made
        for member in made:
            assert member.told("fault") == [], member.tail()
    finally:
        for member in made:
            member.end()


class CommitWatch:
    """Reads the group's commits again and again, and notes each that went back."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._highest: dict[TP, int] = {}
        self.went_back: list[tuple[TP, int, int]] = []
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> CommitWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ending.wait(0.3):
            try:
                committed = self._group.committed()
            except Exception:  # the broker is away
                continue
            for tp, (offset, _) in committed.items():
                if offset < self._highest.get(tp, 0):
                    self.went_back.append((tp, self._highest[tp], offset))
                self._highest[tp] = max(offset, self._highest.get(tp, 0))


@contextmanager
def load(group: Group, per_second: int) -> Iterator[list[int]]:
    """Records of all partitions while the block runs; the list holds how many each partition has at the end."""
    counts = [0]
    ending = threading.Event()
    failures: list[BaseException] = []

    def write() -> None:
        try:
            while not ending.wait(0.2):
                for topic, number in group.partitions:
                    place = {"partition": number, "topic": group.topics.index(topic)}
                    group.produce(per_second // 5, start=counts[0], **place)
                counts[0] += per_second // 5
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    try:
        yield counts
    finally:
        ending.set()
        thread.join()
    assert failures == []


def wait_all_done(group: Group, count: int, deadline_s: float, *workers: MemberProcess) -> None:
    """Every offset was done at least once, by anyone, and the commit is at the end."""
    wanted = {(*tp, offset) for tp in group.partitions for offset in range(count)}
    wait_until(
        lambda: not wanted - {place for worker in workers for place in worker.places()},
        deadline_s,
        lambda: (len(wanted), len(wanted - {p for w in workers for p in w.places()}), [w.tail() for w in workers]),
        poll_s=0.5,
    )
    wait_until(lambda: {offset for offset, _ in group.committed().values()} == {count}, 30, group.committed, 0.5)


def assert_starts_never_go_back(*workers: MemberProcess) -> None:
    """Where each member began, assignment by assignment."""
    for worker in workers:
        highest: dict[str, int] = {}
        for assigned in worker.told("assigned"):
            for place, offset in assigned["committed"].items():
                assert offset >= highest.get(place, 0), (worker.name, place, assigned)
                highest[place] = offset


async def test_equal_topics_are_partitioned_together_and_generations_count_up(group: Groups) -> None:
    """One worker owns partition k of every topic, also with three members on four partitions."""
    one = group(partitions=4, topics=3)
    a, b, c = Seen(), Seen(), Seen()
    async with one.member("a", a), one.member("b", b), one.member("c", c):

        def settled() -> bool:
            latest = [seen.assignments[-1] for seen in (a, b, c) if seen.assignments]
            return len({x.generation for x in latest}) == 1 and sum(len(x.partitions) for x in latest) == 12

        await wait_until_async(settled, 30, lambda: [seen.assignments for seen in (a, b, c)])
        for seen in (a, b, c):
            numbers = {number for _, number in seen.assignments[-1].partitions}
            assert seen.assignments[-1].partitions == {(topic, number) for topic in one.topics for number in numbers}
        generations = [x.generation for x in a.assignments]
        assert generations == list(range(generations[0], generations[0] + len(generations)))
        assert not any(x.fenced for seen in (a, b, c) for x in seen.assignments)
    # a leaves last: whoever stays has all partitions again, each time co-partitioned
    for seen in (a, b, c):
        for assignment in seen.assignments:
            numbers = {number for _, number in assignment.partitions}
            assert len(assignment.partitions) == 3 * len(numbers)


async def test_what_is_not_committed_is_handed_over_again_after_a_rebalance(group: Groups) -> None:
    """The gate suppresses these; were they not handed over again, it would not have to."""
    one, first, second = group(), Seen(), Seen()
    one.produce(10)
    async with one.member("a", first) as member:
        await wait_until_async(lambda: len(first.records) == 10, 20)
        assert (await member.commit({one.tp: (3, "map")}))[one.tp]
        async with one.member("b", second):
            await wait_until_async(lambda: len(first.records) + len(second.records) == 17, 30)
    again = first.records[10:] or second.records
    assert [record.offset for _, record in again] == list(range(3, 10))
    owner = first if len(first.records) > 10 else second
    assert owner.assignments[-1].committed == {one.tp: (3, "map")}


async def test_before_partitions_go_what_is_done_is_committed(group: Groups) -> None:
    one, first, second = group(partitions=2), Seen(), Seen()
    for partition in (0, 1):
        one.produce(10, partition=partition)

    def revoking() -> Any:
        return {tp: (end, "last") for tp, end in first.ends.items()}

    async with one.member("a", first, on_revoking=revoking):
        await wait_until_async(lambda: len(first.records) == 20, 20)
        async with one.member("b", second):
            await wait_until_async(lambda: second.assignments and len(second.assignments[-1].partitions) == 1, 30)
            assert set(second.assignments[-1].committed.values()) == {(10, "last")}
            await wait_until_async(lambda: len(first.assignments) == 2, 30)
            assert set(first.assignments[-1].committed.values()) == {(10, "last")}


async def test_a_commit_of_an_older_assignment_is_not_sent(group: Groups) -> None:
    one, first, second = group(partitions=2), Seen(), Seen()
    for partition in (0, 1):
        one.produce(10, partition=partition)
    async with one.member("a", first) as member:
        await wait_until_async(lambda: len(first.records) == 20, 20)
        async with one.member("b", second):
            await wait_until_async(lambda: len(first.assignments) == 2 and len(member.partitions) == 1, 30)
            (gone,) = set(one.partitions) - member.partitions
            assert await member.commit({gone: (5, "")}) == {gone: False}
            assert one.committed()[gone] == (0, "")


@pytest.mark.slow
def test_killed_and_joining_members_lose_nothing(group: Groups) -> None:
    one = group(partitions=4, topics=2)
    with CommitWatch(one) as watch, members(one, "a", "b") as (a, b):
        wait_until(lambda: a.partitions() == b.partitions() == 4, 60, a.tail, 0.2)
        with load(one, 200) as counts:
            time.sleep(3)
            a.send(signal.SIGKILL)
            time.sleep(2)
            c = MemberProcess(one, "c")
            wait_until(lambda: c.partitions() == 4, 60, c.tail, 0.2)
            time.sleep(1)
            c.send(signal.SIGKILL)
            time.sleep(1)
        wait_all_done(one, counts[0], 90, a, b, c)
    assert watch.went_back == []


@pytest.mark.slow
def test_a_member_that_stood_still_is_fenced_and_not_stalled(group: Groups) -> None:
    """SIGSTOP beyond the session and the stall limit: its partitions are taken over in order, and it joins anew."""
    one = group(partitions=4)
    with CommitWatch(one) as watch, members(one, "a", "b", stall_s=8) as (a, b):
        wait_until(lambda: a.partitions() == b.partitions() == 2, 60, a.tail, 0.2)
        with load(one, 100) as counts:
            time.sleep(2)
            a.send(signal.SIGSTOP)
            wait_until(lambda: b.partitions() == 4, 60, b.tail, 0.2)
            time.sleep(10)
            a.send(signal.SIGCONT)
            wait_until(lambda: a.told("assigned")[-1]["fenced"] and a.partitions() == 2, 60, a.tail, 0.2)
            time.sleep(12)
        wait_all_done(one, counts[0], 60, a, b)
        assert not b.told("assigned")[-1]["fenced"]
    assert watch.went_back == []


@pytest.mark.slow
@pytest.mark.parametrize("away_s", [5, 25, 45] if os.environ.get("PENSTOCK_TEST_LONG") else [25])
def test_a_broker_that_stands_still_under_load_loses_no_commit(group: Groups, kafka: Any, away_s: int) -> None:
    """Two of three such pauses set committed offsets back to 0."""
    one = group(partitions=4, topics=2)
    broker = getattr(kafka, "process", None)
    if broker is None:
        pytest.skip("PENSTOCK_TEST_KAFKA names a broker that is not ours")
    with CommitWatch(one) as watch, members(one, "a", "b") as (a, b):
        wait_until(lambda: a.partitions() == b.partitions() == 4, 60, a.tail, 0.2)
        with load(one, 200) as counts:
            wait_until(
                lambda: all(offset > 300 for offset, _ in one.committed().values()),
                60,
                lambda: str(one.committed()),
                0.2,
            )
            broker.send_signal(signal.SIGSTOP)
            time.sleep(away_s)
            broker.send_signal(signal.SIGCONT)
            time.sleep(3)
        wait_all_done(one, counts[0], 120, a, b)
    assert watch.went_back == []
    assert_starts_never_go_back(a, b)


@pytest.mark.slow
def test_a_broker_that_starts_again_under_load_loses_no_commit(group: Groups, kafka: Any) -> None:
    one = group(partitions=4, topics=2)
    with CommitWatch(one) as watch, members(one, "a", "b") as (a, b):
        wait_until(lambda: a.partitions() == b.partitions() == 4, 60, a.tail, 0.2)
        with load(one, 200) as counts:
            for end in (kafka.stop, kafka.kill):
                time.sleep(3)
                end()
                time.sleep(8)  # longer than the session
                kafka.start()
            time.sleep(3)
        wait_all_done(one, counts[0], 120, a, b)
    assert watch.went_back == []
    assert_starts_never_go_back(a, b)
