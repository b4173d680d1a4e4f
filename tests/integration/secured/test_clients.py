"""Every kind of Kafka client that Penstock makes works at each secured listener."""

from __future__ import annotations

import asyncio

import pytest

from kit.secured_kafka import MECHANISMS, SecuredKafka
from penstock.common.admin import ensure_topics
from penstock.common.group_consumer import GroupConsumer, Listener, Read
from penstock.common.reader import read_to_end
from penstock.common.settings import KafkaSettings
from penstock.common.transport import AsyncTransport, Transport
from penstock.schemas.topics import TopicSpec

WAYS = [("tls", None), ("mtls", None), *((name, one) for name in ("sasl", "sasltls") for one in MECHANISMS)]


@pytest.mark.parametrize(("listener", "mechanism"), WAYS)
async def test_admin_producer_reader_and_member_of_a_group(
    secured: SecuredKafka, kafka_prefix: str, listener: str, mechanism: str | None
) -> None:
    kafka = KafkaSettings(bootstrap_servers=secured.at(listener), security=secured.security(listener, mechanism))
    topic = f"{kafka_prefix}records"
    await asyncio.to_thread(ensure_topics, kafka, [TopicSpec(name=topic, partitions=1, replication=1)])
    transport = Transport(kafka)
    try:
        await AsyncTransport(transport).produce(topic, b"value")
    finally:
        await asyncio.to_thread(transport.close)
    assert [one.value for one in await asyncio.to_thread(read_to_end, kafka, topic)] == [b"value"]

    reads: asyncio.Queue[Read] = asyncio.Queue()

    async def revoked(_: object) -> None:
        return

    listening = Listener(
        on_batch=lambda batch: [reads.put_nowait(one) for one in batch],
        on_assigned=lambda _: None,
        on_revoked=revoked,
        on_failure=pytest.fail,
    )
    member = GroupConsumer(kafka, [topic], f"{kafka_prefix}group", listening)
    member.start()
    try:
        assert (await asyncio.wait_for(reads.get(), 60)).value == b"value"
    finally:
        await member.stop()
