"""Transport, reader and topic administration against a real broker."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
import threading
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, Producer
from confluent_kafka.admin import AdminClient

from penstock.common import admin, admin_clients
from penstock.common.outgoing import Outgoing
from penstock.common.reader import BatchQueue, PartitionReader, RawMessage, read_to_end
from penstock.common.settings import KafkaSettings
from penstock.common.transport import AsyncTransport, Delivery, Transport
from penstock.schemas.errors import BrokerUnavailable, InternalError, NotFound, TooLarge
from penstock.schemas.topics import TP, TopicSpec, partition_for, topic_specs
from support import wait_until


def write(settings: KafkaSettings, topic: str, count: int, partition: int | None = None) -> list[Delivery]:
    found: list[Delivery] = []
    transport = Transport(settings)
    for number in range(count):
        key = f"key-{number}".encode()
        transport.send(topic, b"%d" % number, key=key, partition=partition, on_delivery=found.append)
    assert transport.close() == 0
    assert all(delivery.error is None for delivery in found)
    return found


def test_records_lie_where_javas_partitioner_puts_them(settings: KafkaSettings) -> None:
    write(settings, settings.names.result, 50)
    for message in read_to_end(settings, settings.names.result):
        assert message.partition == partition_for(message.key or b"", 4)


def test_headers_and_tombstones_pass_through(settings: KafkaSettings) -> None:
    transport, topic = Transport(settings), settings.names.control
    transport.send(topic, None, key=b"k", headers=[("a", b"1"), ("a", b"2")])
    transport.close()
    (message,) = read_to_end(settings, topic)
    assert (message.value, message.key, message.headers) == (None, b"k", (("a", b"1"), ("a", b"2")))


async def test_a_missing_topic_and_the_brokers_limit_are_told(settings: KafkaSettings) -> None:
    transport = Transport(dataclasses.replace(settings, max_record_bytes=3_000_000))
    outgoing = AsyncTransport(transport)
    with pytest.raises(NotFound, match="no-such-topic"):
        await outgoing.produce(settings.topic_prefix + "no-such-topic", b"x")
    with pytest.raises(TooLarge):
        await outgoing.produce(settings.names.result, b"x" * 2_000_000)
    assert (await outgoing.produce(settings.names.result, b"x")).offset >= 0
    await asyncio.to_thread(transport.close)


async def test_records_that_are_sent_together_are_told_of_up_to_one_that_is_refused(settings: KafkaSettings) -> None:
    transport = Transport(dataclasses.replace(settings, max_record_bytes=1_000))
    outgoing, result = AsyncTransport(transport), settings.names.result
    records = [
        Outgoing(topic=result, key=b"k", value=b"first", headers=[("a", b"1")]),
        Outgoing(topic=settings.topic_prefix + "no-such-topic", key=b"k", value=b"x", headers=[]),
        Outgoing(topic=result, key=b"k", value=b"last", headers=[]),
        Outgoing(topic=result, key=b"k", value=b"x" * 2_000, headers=[]),
        Outgoing(topic=result, key=b"k", value=b"behind it", headers=[]),
    ]
    told = await outgoing.produce_all(records)
    assert [type(delivery.error) for delivery in told] == [type(None), NotFound, type(None), TooLarge]
    assert await outgoing.produce_all([]) == []
    await asyncio.to_thread(transport.close)
    first, last = read_to_end(settings, result)
    assert ((first.value, first.headers), last.value) == ((b"first", (("a", b"1"),)), b"last")
    assert [first.offset, last.offset] == [told[0].offset, told[2].offset]


def test_a_stream_has_no_gap_when_its_producer_fails_in_the_middle(
    settings: KafkaSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing: list[Callable[[Any], None]] = []

    def producer(config: dict[str, Any], **more: Any) -> Producer:
        failing.append(config["error_cb"])
        return Producer(config, **more)

    monkeypatch.setattr("penstock.common.transport.Producer", producer)
    transport, found = Transport(settings), list[Delivery]()
    fatal = SimpleNamespace(code=lambda: KafkaError._FATAL, str=lambda: "out of sequence")
    for number in range(3000):
        transport.send(settings.names.result, b"%d" % number, key=b"k", on_delivery=found.append)
        if number == 1500:
            failing[0](fatal)
    assert transport.close(30) == 0
    assert [delivery.error for delivery in found] == [None] * 3000
    assert len(failing) == 2
    first_seen = dict.fromkeys(int(one.value or b"") for one in read_to_end(settings, settings.names.result))
    assert list(first_seen) == list(range(3000))


def collect(into: list[RawMessage]) -> Callable[[Sequence[RawMessage]], None]:
    return into.extend


def test_a_reader_catches_up_and_goes_on(settings: KafkaSettings) -> None:
    topic, got = settings.names.result, list[RawMessage]()
    write(settings, topic, 300)
    reader = PartitionReader(settings, [topic], collect(got))
    reader.start()
    reader.wait_until_caught_up(10)
    assert len(got) == 300
    write(settings, topic, 10)
    reader.wait_until_caught_up(10)
    assert len(got) == 310
    for number in range(4):
        offsets = [message.offset for message in got if message.partition == number]
        assert offsets == list(range(len(offsets)))
    reader.stop()
    reader.stop()


def test_a_reader_begins_where_it_is_told(settings: KafkaSettings) -> None:
    topic = settings.names.control
    write(settings, topic, 10)
    time_ms = read_to_end(settings, topic)[-1].timestamp_ms + 1
    wait_until(lambda: time.time() * 1000 > time_ms)
    write(settings, topic, 5)
    begins: list[tuple[list[str] | dict[TP, int], int]] = [
        ([topic], 0),
        (admin.offsets_at(settings, [(topic, 0)], time_ms), 10),
        (admin.offsets_at(settings, [(topic, 0)], time_ms + 3_600_000), 15),
        ({(topic, 0): 7}, 7),
    ]
    for topics, begin in begins:
        got = list[RawMessage]()
        reader = PartitionReader(settings, topics, collect(got))
        reader.start()
        reader.wait_until_caught_up(10)
        reader.stop()
        assert [message.offset for message in got] == list(range(begin, 15)), topics


def test_a_record_that_comes_during_the_look_up_of_a_time_is_read(
    settings: KafkaSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic, asked = settings.names.control, admin.asked

    def asked_before_a_record(*args: Any, **options: Any) -> Any:
        found = asked(*args, **options)
        write(settings, topic, 1)
        return found

    monkeypatch.setattr(admin, "asked", asked_before_a_record)
    assert admin.offsets_at(settings, [(topic, 0)], round(time.time() * 1000) - 60_000) == {(topic, 0): 0}


def test_partitions_can_be_added_and_partitions_read_again(settings: KafkaSettings) -> None:
    got, names = list[RawMessage](), settings.names
    write(settings, names.control, 5)
    write(settings, names.model, 5)
    reader = PartitionReader(settings, [names.control], collect(got))
    reader.start()
    reader.wait_until_caught_up(10)
    reader.add_partitions({(names.control, 0): 0, (names.model, 0): 0})
    wait_until(lambda: len(got) == 10)
    got.clear()
    reader.call(lambda: reader.seek((names.control, 0), 2))
    reader.call(lambda: reader.drop((names.model, 0)))
    wait_until(lambda: list(reader.positions()) == [(names.control, 0)])  # calls are carried out on its thread
    write(settings, names.model, 1)
    write(settings, names.control, 1)
    wait_until(lambda: len(got) >= 4)
    assert [(message.topic, message.offset) for message in got] == [(names.control, n) for n in (2, 3, 4, 5)]
    assert list(reader.positions()) == [(names.control, 0)]
    reader.stop()


def test_a_callback_that_raises_ends_the_reader_with_its_reason(settings: KafkaSettings) -> None:
    def fails(_: Sequence[RawMessage]) -> None:
        raise ValueError("ours")

    write(settings, settings.names.control, 1)
    reader = PartitionReader(settings, [settings.names.control], fails)
    reader.start()
    with pytest.raises(InternalError, match="ours"):
        reader.wait_until_caught_up(10)
    reader.stop()


def test_a_blocked_callback_is_a_missed_deadline_not_a_hang(settings: KafkaSettings) -> None:
    free = threading.Event()
    write(settings, settings.names.control, 1)
    reader = PartitionReader(settings, [settings.names.control], lambda _: free.wait(20) and None)
    reader.start()
    with pytest.raises(BrokerUnavailable, match="within"):
        reader.wait_until_caught_up(0.2)
    free.set()
    reader.stop()


async def test_a_queue_carries_batches_to_the_loop_and_slows_the_reader(settings: KafkaSettings) -> None:
    topic, queue = settings.names.control, BatchQueue(asyncio.get_running_loop(), limit=2)
    write(settings, topic, 100)
    reader = PartitionReader(settings, [topic], queue.put, batch_size=5)
    await asyncio.to_thread(reader.start)
    offsets: list[int] = []
    async with asyncio.timeout(20):
        while len(offsets) < 100:
            offsets += [message.offset for message in await queue.get()]
            assert reader.positions()[topic, 0] <= len(offsets) + 4 * 5
    assert offsets == list(range(100))
    queue.close()
    await asyncio.to_thread(reader.stop)


def test_reading_to_the_end_of_nothing_and_of_a_missing_topic(settings: KafkaSettings) -> None:
    assert read_to_end(settings, settings.names.control) == []
    write(settings, settings.names.control, 3)
    assert [message.offset for message in read_to_end(settings, settings.names.control, 2)] == [2]
    assert read_to_end(settings, settings.names.control, 99) == []
    with pytest.raises(NotFound):
        read_to_end(settings, settings.topic_prefix + "none")


def test_topics_are_created_once_and_drift_is_reported_not_mended(settings: KafkaSettings) -> None:
    specs = topic_specs(settings.names, partitions=4)
    reports = admin.ensure_topics(settings, specs)
    assert not any(report.created or report.drift for report in reports)
    other = dataclasses.replace(specs[0], partitions=8, config={**specs[0].config, "retention.ms": "1"})
    new = TopicSpec(name=settings.topic_prefix + "new", partitions=2, replication=1, config={})
    drifted, created = admin.ensure_topics(settings, [other, new])
    assert drifted.drift == {"partitions": ("8", "4"), "retention.ms": ("1", specs[0].config["retention.ms"])}
    assert created.created
    assert admin.partition_counts(settings, [new.name, "none"]) == {new.name: 2}
    assert admin.describe(settings, [specs[0].name])[0].config["retention.ms"] == specs[0].config["retention.ms"]
    with pytest.raises(NotFound):
        admin.describe(settings, ["none"])


def test_a_topic_that_was_listed_while_it_was_deleted_is_created(
    settings: KafkaSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = TopicSpec(name=settings.topic_prefix + "new", partitions=2, replication=1, config={})
    listed = admin.partition_counts

    def with_the_deleted_one(*args: Any, **kwargs: Any) -> dict[str, int]:
        monkeypatch.setattr(admin, "partition_counts", listed)
        return {**listed(*args, **kwargs), spec.name: 2}

    monkeypatch.setattr(admin, "partition_counts", with_the_deleted_one)
    assert admin.ensure_topics(settings, [spec], timeout_s=10)[0].created
    assert admin.partition_counts(settings, [spec.name]) == {spec.name: 2}


def test_a_conversation_made_again_has_another_id(settings: KafkaSettings) -> None:
    topic = settings.names.conversation("acme", "c1")
    assert admin.topic_id(settings, topic) is None
    assert admin.create_conversation_topic(settings, topic)
    assert not admin.create_conversation_topic(settings, topic)
    assert admin.topic_config(settings, topic)["cleanup.policy"] == "compact"
    assert admin.count_conversations(settings) == 1
    first = admin.topic_id(settings, topic)
    assert admin.delete_topic(settings, topic)
    assert not admin.delete_topic(settings, topic)
    wait_until(lambda: admin.topic_id(settings, topic) is None)
    assert admin.create_conversation_topic(settings, topic)
    assert admin.topic_id(settings, topic) not in (None, first)


def test_an_admin_client_that_hears_nothing_is_replaced(
    settings: KafkaSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a broker's pause, when librdkafka may wait for a controller for a minute with the broker back."""
    monkeypatch.setattr(admin_clients, "STUCK_S", 0.5)
    monkeypatch.setattr(admin_clients, "RENEW_S", 0.0)
    topic, key = settings.names.control, admin_clients._key(settings)  # pyright: ignore[reportPrivateUsage]
    spec = TopicSpec(name=f"{settings.topic_prefix}made", partitions=1, replication=1, config={})
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        for ask, answer in (
            (lambda: admin.describe(settings, [topic])[0].name, topic),
            (lambda: admin.topic_config(settings, topic)["cleanup.policy"], "compact,delete"),
            (lambda: set(admin.end_offsets(settings, [(topic, 0)])), {(topic, 0)}),
            (lambda: admin.broker_count(settings), 1),
            (lambda: admin.ensure_topics(settings, [spec])[0].created, True),
            (lambda: admin.delete_topic(settings, spec.name), True),
        ):
            client = AdminClient({"bootstrap.servers": f"127.0.0.1:{deaf.getsockname()[1]}"})
            monkeypatch.setitem(admin_clients._clients, key, client)  # pyright: ignore[reportPrivateUsage]
            assert ask() == answer
