"""The Faust behaviours that the gate relies on, and the hazards that it exists for, on the pinned versions.

When one of these fails after an upgrade, read docs/decisions on the commit gate before changing the test.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import ConsumerGroupTopicPartitions, Producer
from confluent_kafka.admin import AdminClient, NewTopic

from penstock.processors.kafka.membership import Assignment, GroupSettings, Membership
from penstock.producers.settings import KafkaSettings
from support import wait_until_async


class Group:
    """A topic of its own and members of a group of its own."""

    def __init__(self, bootstrap: str, folder: Path, partitions: int = 1, topics: int = 1) -> None:
        self.bootstrap = bootstrap
        self.folder = folder
        run = uuid.uuid4().hex[:8]
        self.id = f"faust-{run}"
        self.topics = [f"faust-{run}-{number}" for number in range(topics)]
        self.admin = AdminClient({"bootstrap.servers": bootstrap})
        for future in self.admin.create_topics([NewTopic(t, partitions, 1) for t in self.topics]).values():
            future.result(20)

    def produce(self, count: int, *, partition: int | None = 0, headers: Any = None, start: int = 0) -> None:
        producer = Producer({"bootstrap.servers": self.bootstrap, "linger.ms": 5})
        for number in range(start, start + count):
            place = {} if partition is None else {"partition": partition}
            for topic in self.topics:
                producer.produce(topic, str(number), key=str(number), headers=headers, **place)
        assert producer.flush(20) == 0

    def committed(self) -> dict[tuple[str, int], int]:
        future = self.admin.list_consumer_group_offsets([ConsumerGroupTopicPartitions(self.id)])[self.id]
        return {(p.topic, p.partition): p.offset for p in future.result(10).topic_partitions if p.offset >= 0}

    @asynccontextmanager
    async def member(
        self,
        name: str,
        on_event: Callable[[Any], None],
        on_assigned: Callable[[Assignment], None] = lambda _: None,
        **settings: Any,
    ) -> AsyncIterator[Membership]:
        member = Membership(
            KafkaSettings(bootstrap_servers=self.bootstrap),
            GroupSettings(
                group_id=self.id,
                client_id=name,
                data_dir=self.folder / name,
                session_timeout_s=6,
                heartbeat_s=0.5,
                commit_interval_s=0.1,
                **settings,
            ),
            self.topics,
            on_event=on_event,
            on_assigned=on_assigned,
        )
        await member.start()
        try:
            await wait_until_async(lambda: member.joined, 30, f"{name} did not join")
            yield member
        finally:
            await member.stop()


@pytest.fixture
def group(kafka: Any, tmp_path: Path) -> Callable[..., Group]:
    return lambda **options: Group(kafka.bootstrap_servers, tmp_path, **options)


async def test_contiguous_acks_are_committed_and_the_unacked_head_is_not_passed(group: Callable[..., Group]) -> None:
    one = group()
    one.produce(20)
    events: list[Any] = []
    async with one.member("a", events.append):
        await wait_until_async(lambda: len(events) == 20, 20)
        tp = (one.topics[0], 0)
        assert one.committed()[tp] == 0, "the start offset is committed before any work"
        for event in events[:7]:
            event.ack()
        await wait_until_async(lambda: one.committed()[tp] == 7, 10, lambda: one.committed())
        for event in events[7:]:
            event.ack()
        await wait_until_async(lambda: one.committed()[tp] == 20, 10, lambda: one.committed())


async def test_hazard_acks_out_of_order_pass_unfinished_work(group: Callable[..., Group]) -> None:
    """Why the gate acks from the head only: with offset 1 open, Faust commits past it (faust-streaming #606)."""
    one = group()
    one.produce(10)
    events: list[Any] = []
    async with one.member("a", events.append):
        await wait_until_async(lambda: len(events) == 10, 20)
        tp = (one.topics[0], 0)
        events[0].ack()
        await wait_until_async(lambda: one.committed()[tp] == 1, 10)
        for event in events[2:]:
            event.ack()
        await asyncio.sleep(0.5)  # five commit intervals: long enough for the wrong commit to be seen
        assert one.committed()[tp] == 10, "Faust keeps unfinished work now: the gate may be simplified"


async def test_pausing_in_the_consumer_thread_delivers_everything(group: Callable[..., Group]) -> None:
    one = group(partitions=2)
    one.produce(1500, partition=0)
    one.produce(500, partition=1)
    seen: list[tuple[int, int]] = []

    def on_event(event: Any) -> None:
        seen.append((event.message.partition, event.message.offset))
        event.ack()

    async with one.member("a", on_event, poll_records=8) as member:
        both = frozenset((one.topics[0], n) for n in (0, 1))
        for _ in range(5):
            await wait_until_async(lambda: len(seen) > 0, 20)
            member.pause(both)
            before = len(seen)
            await asyncio.sleep(0.15)
            at_rest = len(seen)
            await asyncio.sleep(0.15)
            assert len(seen) == at_rest, "a paused partition goes on delivering"
            assert at_rest >= before
            member.pause(frozenset())
        await wait_until_async(lambda: len(seen) == 2000, 60, lambda: len(seen))
        await wait_until_async(lambda: sum(one.committed().values()) == 2000, 30, one.committed)
    assert sorted(seen) == [(0, n) for n in range(1500)] + [(1, n) for n in range(500)]


async def test_headers_keys_and_times_come_through(group: Callable[..., Group]) -> None:
    one = group()
    one.produce(1, headers=[("a", b"1"), ("a", b"2"), ("b", b"\x00\xff")])
    events: list[Any] = []
    async with one.member("a", events.append):
        await wait_until_async(lambda: events, 20)
    message = events[0].message
    assert list(message.headers) == [("a", b"1"), ("a", b"2"), ("b", b"\x00\xff")]
    assert message.key == b"0"
    assert message.value == b"0"
    assert round(message.timestamp * 1000) > 1_600_000_000_000


async def test_a_null_value_is_delivered(group: Callable[..., Group]) -> None:
    one = group()
    producer = Producer({"bootstrap.servers": one.bootstrap})
    producer.produce(one.topics[0], None, key=b"k", partition=0)
    producer.flush(10)
    events: list[Any] = []
    async with one.member("a", events.append):
        await wait_until_async(lambda: events, 20)
    assert events[0].message.value is None


async def test_equal_topics_are_partitioned_together_and_generations_count_up(group: Callable[..., Group]) -> None:
    """One worker owns partition k of every topic, also with three members on four partitions."""
    one = group(partitions=4, topics=3)
    assigned: dict[str, list[Assignment]] = {"a": [], "b": [], "c": []}
    async with (
        one.member("a", lambda e: e.ack(), assigned["a"].append),
        one.member("b", lambda e: e.ack(), assigned["b"].append),
        one.member("c", lambda e: e.ack(), assigned["c"].append),
    ):

        def settled() -> bool:
            latest = [found[-1] for found in assigned.values() if found]
            return len({a.generation for a in latest}) == 1 and sum(len(a.partitions) for a in latest) == 12

        await wait_until_async(settled, 30, lambda: assigned)
        for found in assigned.values():
            numbers = {number for _, number in found[-1].partitions}
            assert found[-1].partitions == {(topic, number) for topic in one.topics for number in numbers}
        generations = [a.generation for a in assigned["a"]]
        assert generations == list(range(generations[0], generations[0] + len(generations)))
        assert not any(a.fenced for found in assigned.values() for a in found)


async def test_unacked_work_is_redelivered_after_a_rebalance(group: Callable[..., Group]) -> None:
    """The gate suppresses these; were they not redelivered, it would not have to."""
    one = group()
    one.produce(10)
    first: list[Any] = []
    second: list[Any] = []
    async with one.member("a", first.append):
        await wait_until_async(lambda: len(first) == 10, 20)
        for event in first[:3]:
            event.ack()
        await wait_until_async(lambda: one.committed()[(one.topics[0], 0)] == 3, 10)
        async with one.member("b", second.append):
            await wait_until_async(lambda: len(first) + len(second) == 17, 30, lambda: (len(first), len(second)))
    again = first[10:] or second
    assert [event.message.offset for event in again] == list(range(3, 10))
