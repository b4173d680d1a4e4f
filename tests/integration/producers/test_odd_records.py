"""No record ends a reader, whatever its header names, bytes, sizes, codec or transaction."""

from __future__ import annotations

import asyncio
import random
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from confluent_kafka import Producer

from odd_records import CODECS, OddProducer, write_odd_records
from penstock.common import admin
from penstock.common.reader import PartitionReader, RawMessage, read_to_end
from penstock.common.settings import KafkaSettings
from penstock.processors.kafka.control import ControlFollower
from penstock.producers.client import Client
from penstock.schemas.codec import default_codec
from penstock.schemas.records import ControlCommand
from support import wait_until, wait_until_async

SEED = 7


@contextmanager
def reading(settings: KafkaSettings, topic: str, got: list[RawMessage], **options: Any) -> Iterator[PartitionReader]:
    reader = PartitionReader(settings, [topic], got.extend, **options)
    reader.start()
    try:
        yield reader
    finally:
        reader.stop()


def test_a_header_name_that_is_not_utf8_is_read_as_unreadable_headers(settings: KafkaSettings) -> None:
    topic = settings.names.result
    with OddProducer(settings.bootstrap_servers) as producer:
        for number in range(200):
            headers = [(b"a", b"1"), (b"\xff", b"2"), (b"b", None)] if number % 2 else [(b"a", b"1"), (b"b", None)]
            producer.send(topic, b"%d" % number, headers=headers)
    got: list[RawMessage] = []
    with reading(settings, topic, got) as reader:
        reader.wait_until_caught_up(10)
    for found in (got, read_to_end(settings, topic)):
        assert [message.value for message in found] == [b"%d" % number for number in range(200)]
        assert all(message.headers == (("a", b"1"), ("b", None)) for message in found[::2])
        assert all(message.headers == () for message in found[1::2])
        assert [message.headers_readable for message in found] == [True, False] * 100


@pytest.mark.skipif(shutil.which("kcat") is None, reason="kcat is not installed")
@pytest.mark.parametrize("codec", CODECS)
def test_kcats_records_of_every_codec_are_read(settings: KafkaSettings, codec: str) -> None:
    topic = settings.names.result
    for options in (["-H", "a=1"], [b"-H", b"\xff=1"]):
        command = ["kcat", "-P", "-b", settings.bootstrap_servers, "-t", topic, "-z", codec, "-p", "0", *options]
        subprocess.run(command, input=b"x" * 500, check=True, timeout=30)
    found = read_to_end(settings, topic)
    assert [message.value for message in found] == [b"x" * 500] * 2
    assert [message.headers_readable for message in found] == [True, False]


@pytest.mark.parametrize("reports_ends", [True, False])
def test_random_records_go_through_every_reader(settings: KafkaSettings, reports_ends: bool) -> None:
    topic = settings.names.result
    write_odd_records(settings.bootstrap_servers, [(topic, number) for number in range(4)], 250, SEED)
    got: list[RawMessage] = []
    with reading(settings, topic, got, reports_ends=reports_ends) as reader:
        reader.wait_until_caught_up(20)
        assert reader.failure is None
    found = read_to_end(settings, topic)
    assert len(got) == len(found) == 1000
    assert sorted(got, key=_place) == sorted(found, key=_place)
    assert {message.headers_readable for message in found} == {True, False}


def _place(message: RawMessage) -> tuple[int, int]:
    return message.partition, message.offset


@pytest.mark.parametrize("reports_ends", [True, False])
def test_aborted_and_committed_transactions_go_by(settings: KafkaSettings, reports_ends: bool) -> None:
    """Their markers take offsets that no record has, also the last one of a partition."""
    topic = settings.names.result
    _write_transactions(settings, topic)
    end = 4 + 4 + 4  # kept, left, and a marker for each transaction
    # The broker writes the last marker after it has acknowledged the end of the transaction.
    wait_until(lambda: admin.end_offsets(settings, [(topic, 0)]) == {(topic, 0): end}, 20, "the last marker")
    got: list[RawMessage] = []
    with reading(settings, topic, got, reports_ends=reports_ends) as reader:
        reader.wait_until_caught_up(20)
        assert reader.positions()[topic, 0] == end
    assert [message.value for message in got] == [b"kept"] * 4
    assert [message.value for message in read_to_end(settings, topic)] == [b"kept"] * 4


def test_an_open_transaction_keeps_nobody_waiting(settings: KafkaSettings) -> None:
    topic = settings.names.result
    producer = Producer({"bootstrap.servers": settings.bootstrap_servers, "transactional.id": topic})
    producer.init_transactions(20)
    with OddProducer(settings.bootstrap_servers) as other:
        other.send(topic, b"before")
    producer.begin_transaction()
    producer.produce(topic, b"open", partition=0)
    producer.flush(60)
    got: list[RawMessage] = []
    with reading(settings, topic, got, reports_ends=False) as reader:
        reader.wait_until_caught_up(5)
        assert [m.value for m in read_to_end(settings, topic, deadline_s=5)] == [b"before"]
        producer.commit_transaction(20)
        # The broker writes the marker after it has acknowledged the end of the transaction.
        wait_until(lambda: [m.value for m in got] == [b"before", b"open"], 20, lambda: f"it got {got}")


def _write_transactions(settings: KafkaSettings, topic: str) -> None:
    name = f"{topic}-{random.randrange(1 << 30)}"
    producer = Producer({"bootstrap.servers": settings.bootstrap_servers, "transactional.id": name})
    producer.init_transactions(20)
    for number in range(4):
        producer.begin_transaction()
        for _ in range(2):
            producer.produce(topic, b"left" if number % 2 else b"kept", partition=0)
        producer.flush(60)
        if number % 2:
            producer.abort_transaction(20)
        else:
            producer.commit_transaction(20)


def test_the_client_follows_to_the_outcome_past_odd_records(settings: KafkaSettings, worker: Any) -> None:
    places = [(topic, number) for topic in (settings.names.result, settings.names.status) for number in range(4)]
    with Client(settings) as client:
        submitted = client.submit(task="text_generation", payload={"prompt": "hello"})
        write_odd_records(settings.bootstrap_servers, places, 50, SEED)
        assert client.result(submitted, timeout=30).output == {"text": "hello"}
        again = client.submit(task="text_generation", payload={"prompt": "again"})
        assert client.result(again, timeout=30).output == {"text": "again"}


async def test_the_control_follower_goes_on(settings: KafkaSettings) -> None:
    topic, got = settings.names.control, list[ControlCommand]()
    command = ControlCommand(kind="cancel", request_id="r", tenant="t", created_at=1)
    write_odd_records(settings.bootstrap_servers, [(topic, 0)], 250, SEED, keyed=True)
    follower = ControlFollower(settings, default_codec(), asyncio.get_running_loop(), got.extend)
    await follower.start(20)
    with OddProducer(settings.bootstrap_servers) as producer:
        producer.send(topic, default_codec().encode(command), key=b"r/cancel", headers=[(b"\xff", b"")])
    await wait_until_async(lambda: got, 10)
    assert follower.alive
    assert got[-1].request_id == "r"
    await follower.stop()
