"""Parked records read again from a real Kafka: in ranges, with few bytes in vain, and whatever happens to the log."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

import pytest
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from odd_records import OddProducer, write_odd_records
from penstock.common.reader import RawMessage
from penstock.common.refetch import Refetcher
from penstock.common.refetch_parts import RefetchStats
from penstock.common.settings import KafkaSettings
from penstock.schemas.topics import TP
from support import wait_until_async


class Caller:
    """Asks for offsets and collects what is told."""

    def __init__(self, settings: KafkaSettings) -> None:
        self.fetched: dict[tuple[TP, int], RawMessage] = {}
        self.order: list[tuple[TP, int]] = []
        self.gone: list[tuple[TP, int]] = []
        loop = asyncio.get_running_loop()
        self.refetcher = Refetcher(settings, loop, self._on_fetched, self._on_gone)
        self.refetcher.start()

    def _on_fetched(self, tp: TP, records: list[RawMessage]) -> None:
        for record in records:
            assert (tp, record.offset) not in self.fetched, "told twice"
            self.fetched[tp, record.offset] = record
            self.order.append((tp, record.offset))

    def _on_gone(self, tp: TP, offsets: list[int]) -> None:
        self.gone += [(tp, offset) for offset in offsets]

    @property
    def told(self) -> int:
        return len(self.fetched) + len(self.gone)

    async def get(self, tp: TP, offsets: Iterable[int], deadline_s: float = 30) -> None:
        wanted = list(offsets)
        goal = self.told + len(wanted)
        self.refetcher.request(tp, wanted)
        await wait_until_async(lambda: self.told == goal, deadline_s, lambda: f"{self.told} of {goal}")

    async def settled_stats(self) -> RefetchStats:
        """The sums after the statistics, which librdkafka gives once a second, have stopped moving."""
        stats = self.refetcher.stats()
        while True:
            await asyncio.sleep(1.3)
            if (later := self.refetcher.stats()) == stats:
                return stats
            stats = later


@pytest.fixture
def settings(kafka: Any, kafka_prefix: str, create_topics: Callable[..., None]) -> KafkaSettings:
    create_topics()
    return KafkaSettings(bootstrap_servers=kafka.bootstrap_servers, topic_prefix=kafka_prefix)


@pytest.fixture
async def caller(settings: KafkaSettings) -> AsyncIterator[Caller]:
    made = Caller(settings)
    yield made
    await made.refetcher.stop()


def fill(settings: KafkaSettings, tp: TP, count: int, *, size: int = 1000, batch: int = 1) -> None:
    """Records whose values begin with their offset; `batch` of them in each record batch."""
    options = {"linger.ms": 100 if batch > 1 else 0, "batch.num.messages": batch, "enable.idempotence": True}
    producer = Producer({"bootstrap.servers": settings.bootstrap_servers, **options})
    errors: list[object] = []
    for number in range(count):
        value = f"{number} ".encode().ljust(size, b"x")
        producer.produce(tp[0], value, partition=tp[1], on_delivery=lambda error, _: errors.append(error))
    assert producer.flush(60) == 0
    assert not any(errors)


def right(caller: Caller) -> bool:
    return all(
        record.value is not None and int(record.value.split()[0]) == key[1] for key, record in caller.fetched.items()
    )


@pytest.mark.parametrize(("batch", "size"), [(1, 1000), (1, 300), (1, 10_000), (100, 1000)])
async def test_few_bytes_are_read_in_vain(caller: Caller, settings: KafkaSettings, batch: int, size: int) -> None:
    tps = [(settings.names.request("text_generation", priority), 0) for priority in (0, 5, 9)]
    count = 2000 if size < 10_000 else 600
    for tp, step in zip(tps, (10, 2, 1), strict=True):
        fill(settings, tp, count, size=size, batch=batch)
        await caller.get(tp, range(0, count, step))
    stats = await caller.settled_stats()
    assert right(caller)
    assert not caller.gone
    assert stats.bytes_needed < stats.bytes_read <= 3 * stats.bytes_needed
    assert (stats.fetched, stats.wanted) == (len(caller.fetched), 0)


async def test_portions_in_order_read_no_batch_twice(caller: Caller, settings: KafkaSettings) -> None:
    tp = (settings.names.request("text_generation", 5), 0)
    fill(settings, tp, 4000, batch=1000)
    for begin in range(0, 4000, 50):
        await caller.get(tp, range(begin, begin + 50))
    stats = await caller.settled_stats()
    assert right(caller)
    assert stats.bytes_read <= 3 * stats.bytes_needed


async def test_deleted_offsets_and_those_without_a_record_are_gone(caller: Caller, settings: KafkaSettings) -> None:
    tp = (settings.names.request("text_generation", 5), 1)
    producer = Producer({"bootstrap.servers": settings.bootstrap_servers, "transactional.id": settings.topic_prefix})
    producer.init_transactions(30)
    for number in range(10):  # each followed by a marker: 0, 2, 4 … are records, 1, 3, 5 … are not
        producer.begin_transaction()
        producer.produce(tp[0], f"{2 * number}", partition=tp[1])
        producer.commit_transaction(30)
    await caller.get(tp, [4, 5, 6, 19])
    assert {offset for _, offset in caller.fetched} == {4, 6}
    assert {offset for _, offset in caller.gone} == {5, 19}
    admin = AdminClient({"bootstrap.servers": settings.bootstrap_servers})
    for future in admin.delete_records([TopicPartition(*tp, 8)]).values():
        future.result(30)
    await caller.get(tp, [0, 2, 7, 8, 10])
    assert {offset for _, offset in caller.fetched} == {4, 6, 8, 10}
    assert {offset for _, offset in caller.gone} == {5, 19, 0, 2, 7}


async def test_offsets_behind_the_end_are_gone(caller: Caller, settings: KafkaSettings) -> None:
    tp = (settings.names.request("text_generation", 5), 2)
    fill(settings, tp, 5)
    await caller.get(tp, [3, 900])
    assert (list(caller.fetched), caller.gone) == ([(tp, 3)], [(tp, 900)])
    await caller.get(tp, [0, 1])
    assert right(caller)


async def test_what_is_cancelled_is_not_told_and_may_be_asked_for_again(
    caller: Caller, settings: KafkaSettings
) -> None:
    tp, other = ((settings.names.request("text_generation", priority), 0) for priority in (5, 9))
    fill(settings, tp, 3000)
    fill(settings, other, 10)
    caller.refetcher.request(tp, range(0, 3000, 10))
    await wait_until_async(lambda: caller.fetched)
    caller.refetcher.cancel(tp)
    told = caller.told
    await caller.get(other, range(10))
    assert caller.told == told + 10
    caller.fetched.clear()
    await caller.get(tp, range(0, 3000, 100))
    assert right(caller)


async def test_the_urgent_are_read_before_what_was_asked_for_earlier(caller: Caller, settings: KafkaSettings) -> None:
    tp = (settings.names.request("text_generation", 5), 0)
    fill(settings, tp, 3000)
    caller.refetcher.request(tp, range(0, 2000, 10), urgency=2)
    caller.refetcher.request(tp, [2500], urgency=0)
    await wait_until_async(lambda: caller.told == 201, 30)
    assert caller.order.index((tp, 2500)) < 20


async def test_odd_records_are_read(caller: Caller, settings: KafkaSettings) -> None:
    tp = (settings.names.request("text_generation", 5), 0)
    write_odd_records(settings.bootstrap_servers, [tp], 100, seed=1)
    with OddProducer(settings.bootstrap_servers) as producer:
        producer.send(tp[0], b"x", headers=[(b"\xff", b"1")])
    await caller.get(tp, range(101))
    assert len(caller.fetched) == 101
    assert not caller.fetched[tp, 100].headers_readable


async def test_a_paused_broker_is_waited_for(caller: Caller, settings: KafkaSettings, kafka: Any) -> None:
    if getattr(kafka, "process", None) is None:
        pytest.skip("this test pauses the broker, and PENSTOCK_TEST_KAFKA names one that is not ours")
    tp = (settings.names.request("text_generation", 5), 0)
    fill(settings, tp, 200)
    os.kill(kafka.process.pid, signal.SIGSTOP)
    try:
        caller.refetcher.request(tp, range(200))
        await asyncio.sleep(6)
        assert caller.told == 0
    finally:
        os.kill(kafka.process.pid, signal.SIGCONT)
    await wait_until_async(lambda: len(caller.fetched) == 200, 15)
    assert right(caller)


async def test_stopping_does_not_wait_for_a_broker_that_is_away(
    caller: Caller, settings: KafkaSettings, kafka: Any
) -> None:
    if getattr(kafka, "process", None) is None:
        pytest.skip("this test pauses the broker, and PENSTOCK_TEST_KAFKA names one that is not ours")
    tp = (settings.names.request("text_generation", 5), 0)
    fill(settings, tp, 200)
    await caller.get(tp, [0])
    os.kill(kafka.process.pid, signal.SIGSTOP)
    try:
        caller.refetcher.request(tp, range(1, 200))
        await asyncio.sleep(0.2)
        begun = time.monotonic()
        await caller.refetcher.stop()
        assert time.monotonic() - begun < 2
    finally:
        os.kill(kafka.process.pid, signal.SIGCONT)


@pytest.mark.slow
async def test_a_restarted_broker_is_waited_for(caller: Caller, settings: KafkaSettings, kafka: Any) -> None:
    tp = (settings.names.request("text_generation", 5), 0)
    fill(settings, tp, 2000)
    await caller.get(tp, range(0, 100))
    await asyncio.to_thread(kafka.kill)
    caller.refetcher.request(tp, range(100, 2000))
    await asyncio.sleep(2)
    await asyncio.to_thread(kafka.start)
    await wait_until_async(lambda: len(caller.fetched) == 2000, 20, lambda: caller.told)
    assert right(caller)
