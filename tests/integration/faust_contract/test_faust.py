"""What the worker relies on in its consumer group: Faust on librdkafka, on the pinned versions.

When one of these fails after an upgrade, read docs/decisions on the commit gate before changing the test.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from confluent_kafka import Producer, TopicPartition
from group import Group, Seen

from odd_records import CODECS, OddProducer, write_odd_records
from penstock.common.reader import read_to_end
from penstock.common.settings import KafkaSettings
from penstock.processors.kafka.fetch_buffer import BATCH_RECORDS
from penstock.processors.kafka.poll_thread import HANDED_BATCHES
from support import wait_until_async

Groups = Callable[..., Group]


async def test_the_start_offset_is_committed_before_any_record(group: Groups) -> None:
    one, seen = group(), Seen()
    one.produce(20)
    one.admin.delete_records([TopicPartition(*one.tp, 5)])[TopicPartition(*one.tp)].result(10)
    committed_then: list[object] = []

    def on_batch(batch: object) -> None:
        committed_then.append(one.committed())
        Seen.on_batch(seen, batch)  # type: ignore[arg-type]

    seen.on_batch = on_batch  # type: ignore[method-assign]
    async with one.member("a", seen):
        await wait_until_async(lambda: len(seen.records) == 15, 20)
    assert committed_then[0] == {one.tp: (5, "")}
    assert seen.assignments[0].committed == {one.tp: (5, "")}
    assert [record.offset for _, record in seen.records] == list(range(5, 20))


async def test_offsets_and_metadata_are_committed_and_never_lower(group: Groups) -> None:
    one, seen = group(), Seen()
    one.produce(20)
    async with one.member("a", seen) as member:
        assert await member.commit({one.tp: (7, "map")}) == {one.tp: True}
        assert one.committed() == {one.tp: (7, "map")}
        assert await member.commit({one.tp: (7, "other map")}) == {one.tp: True}
        assert one.committed() == {one.tp: (7, "other map")}
        assert await member.commit({one.tp: (6, "")}) == {one.tp: False}
        assert await member.commit({(one.topics[0], 9): (6, "")}) == {(one.topics[0], 9): False}
        assert one.committed() == {one.tp: (7, "other map")}
        assert await member.commit({one.tp: (7, "")}) == {one.tp: True}
        assert one.committed() == {one.tp: (7, "")}
        assert await member.commit({one.tp: (8, "é" * 3500)}) == {one.tp: True}
    again = Seen()
    async with one.member("b", again):
        assert again.assignments[0].committed == {one.tp: (8, "é" * 3500)}
        await wait_until_async(lambda: len(again.records) == 12, 20)
    assert again.batches[0].start == 8


async def test_metadata_that_is_too_large_does_not_hold_the_other_partitions(group: Groups) -> None:
    one, seen = group(partitions=3), Seen()
    first, second, third = one.partitions
    async with one.member("a", seen) as member:
        one.produce(5)
        results = await member.commit({first: (0, "m" * 4095), second: (0, "m" * 4096), third: (0, "ok")})
        assert results == {first: True, second: False, third: True}
        assert await member.commit({second: (0, "short")}) == {second: True}
    assert one.committed() == {first: (0, "m" * 4095), second: (0, "short"), third: (0, "ok")}


async def test_commits_that_overtake_one_another_end_with_the_newest(group: Groups) -> None:
    one, seen = group(partitions=2), Seen()
    first, second = one.partitions
    for partition in (0, 1):
        one.produce(500, partition=partition)
    async with one.member("a", seen) as member:
        answers = [member.commit({first: (n, str(n)), second: (n // 2, "")}) for n in range(500)]
        results = await asyncio.gather(*answers)
        assert all(result == {first: True, second: True} for result in results)
        assert one.committed() == {first: (499, "499"), second: (249, "")}


async def test_held_partitions_hand_over_nothing_and_lose_nothing(group: Groups) -> None:
    one, seen = group(partitions=2), Seen()
    one.produce(15_000, partition=0, size=300)
    one.produce(500, partition=1)
    first, second = one.partitions
    async with one.member("a", seen) as member:
        for _ in range(8):
            await wait_until_async(lambda: len(seen.records) > 0, 20)
            member.hold(frozenset([first]))
            before = len([tp for tp, _ in seen.records if tp == first])
            one.produce(1, partition=1)
            arrived = len(seen.records)
            await wait_until_async(lambda n=arrived: any(tp == second for tp, _ in seen.records[n:]), 20)
            assert len([tp for tp, _ in seen.records if tp == first]) == before
            member.hold(frozenset([first, second]))
            at_rest = len(seen.records)
            await asyncio.sleep(0.1)
            assert len(seen.records) == at_rest, "a held partition goes on delivering"
            member.hold(frozenset())
            await asyncio.sleep(0.02)
        await wait_until_async(lambda: len(seen.records) == 15_508, 60, lambda: len(seen.records))
    assert sorted(seen.places()) == [(*first, n) for n in range(15_000)] + [(*second, n) for n in range(508)]


async def test_a_hold_outlives_a_rebalance(group: Groups) -> None:
    one, seen, other = group(partitions=2), Seen(), Seen()
    async with one.member("a", seen) as member:
        member.hold(frozenset(one.partitions))
        async with one.member("b", other):
            await wait_until_async(lambda: len(member.partitions) == 1, 20)
        await wait_until_async(lambda: len(member.partitions) == 2 and member.joined, 20)
        for partition in (0, 1):
            one.produce(5, partition=partition)
        await asyncio.sleep(0.5)
        assert seen.records == []
        member.hold(frozenset())
        await wait_until_async(lambda: len(seen.records) == 10, 20)


async def test_only_a_few_batches_are_handed_over_before_they_are_taken(group: Groups) -> None:
    one, seen = group(), Seen(take=False)
    one.produce(BATCH_RECORDS * 10)
    async with one.member("a", seen):
        await wait_until_async(lambda: seen.batches, 20)
        await asyncio.sleep(0.3)
        assert len(seen.batches) <= HANDED_BATCHES
        taken = 0
        while len(seen.records) < BATCH_RECORDS * 10:
            seen.batches[taken].taken()
            taken += 1
            await wait_until_async(lambda n=taken: len(seen.batches) > n, 20)


async def test_more_urgent_topics_pass_what_was_fetched(group: Groups) -> None:
    one, seen = group(topics=2), Seen(take=False)
    low, high = one.topics
    one.produce(20_000, size=300)
    async with one.member("a", seen, urgency=[high, low].index):
        await wait_until_async(lambda: seen.batches, 20)
        await asyncio.sleep(0.3)  # the buffer fills
        one.produce(1, topic=1)
        await asyncio.sleep(0.3)
        handed = len(seen.batches)
        for batch in seen.batches:
            batch.taken()
        seen.take = True
        await wait_until_async(lambda: any(batch.topic == high for batch in seen.batches), 20)
        place = next(n for n, batch in enumerate(seen.batches) if batch.topic == high)
        assert place <= handed + 2
        await wait_until_async(lambda: len(seen.records) == 20_001, 30)


async def test_headers_keys_times_and_nulls_come_through(group: Groups) -> None:
    one, seen = group(), Seen()
    producer = Producer({"bootstrap.servers": one.bootstrap})
    producer.produce(one.topics[0], b"v", key=b"k", headers=[("a", b"1"), ("a", None)], timestamp=1_700_000_000_000)
    producer.produce(one.topics[0], None)
    producer.flush(60)
    with OddProducer(one.bootstrap) as odd:
        odd.send(one.topics[0], b"odd", headers=[(b"\xff", b"1")])
    async with one.member("a", seen):
        await wait_until_async(lambda: len(seen.records) == 3, 20)
    first, second, third = (record for _, record in seen.records)
    assert tuple(first) == (0, 1_700_000_000_000, b"k", b"v", (("a", b"1"), ("a", None)), True)
    assert (second.key, second.value, second.headers, second.headers_readable) == (None, None, (), True)
    assert (third.value, third.headers, third.headers_readable) == (b"odd", (), False)


@pytest.mark.parametrize("seed", range(3))
async def test_random_records_of_every_codec_come_as_every_reader_sees_them(group: Groups, seed: int) -> None:
    assert len(CODECS) == 5
    one, seen = group(partitions=2), Seen()
    async with one.member("a", seen):
        await asyncio.to_thread(write_odd_records, one.bootstrap, one.partitions, 500, seed)
        await wait_until_async(lambda: len(seen.records) == 1000, 60, lambda: len(seen.records))
    wanted = read_to_end(KafkaSettings(bootstrap_servers=one.bootstrap), one.topics[0])
    found = {
        (tp[1], r.offset): (r.timestamp_ms, r.key, r.value, r.headers, r.headers_readable) for tp, r in seen.records
    }
    assert found == {
        (m.partition, m.offset): (m.timestamp_ms, m.key, m.value, m.headers, m.headers_readable) for m in wanted
    }


async def test_markers_of_transactions_are_covered_and_no_lag(group: Groups) -> None:
    one, seen = group(), Seen()
    producer = Producer({"bootstrap.servers": one.bootstrap, "transactional.id": one.id})
    producer.init_transactions(20)
    async with one.member("a", seen) as member:
        for number in range(6):
            producer.begin_transaction()
            producer.produce(one.topics[0], b"left" if number % 2 else b"kept", partition=0)
            producer.flush(60)
            await asyncio.to_thread(producer.abort_transaction if number % 2 else producer.commit_transaction, 20)
        await wait_until_async(lambda: seen.ends[one.tp] == 12, 20, lambda: seen.ends)
        assert seen.values() == [b"kept"] * 3
        assert await member.commit({one.tp: (12, "")}) == {one.tp: True}
        progress = (await member.progress())[one.tp]
        assert progress.position == 12
        assert progress.highwater in (0, 12)  # asked at most every few seconds


async def test_what_retention_took_before_it_was_read_is_covered(group: Groups) -> None:
    one, seen = group(), Seen()
    one.produce(10)
    async with one.member("a", seen):
        await wait_until_async(lambda: len(seen.records) == 10, 20)
        await seen.commit_all()
    one.produce(10, start=10)
    one.admin.delete_records([TopicPartition(*one.tp, 15)])[TopicPartition(*one.tp)].result(10)
    again = Seen()
    async with one.member("b", again):
        await wait_until_async(lambda: len(again.records) == 5, 20)
    assert again.batches[0].start == 10
    assert [record.offset for _, record in again.records] == list(range(15, 20))
