"""The topic of webhook deliveries: its keys, and reading it. Partition n is about partition n of the result topic.

The functions block: for threads.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace

from confluent_kafka import Message

from penstock.common import admin
from penstock.common.reader import read_ranges
from penstock.common.settings import KafkaSettings
from penstock.schemas.codec import Codec
from penstock.schemas.errors import DecodeError
from penstock.schemas.records import WebhookDelivery

CLOCKS_DIFFER_MS = 60_000
"""By so much at most the clocks of a worker and of a webhooks process are taken to differ."""


def delivery_key(tenant: str, request_id: str) -> bytes:
    """A request has one outcome, so one webhook."""
    return f"{tenant}/{request_id}".encode()


def read_deliveries(
    kafka: KafkaSettings, codec: Codec, partitions: Iterable[int], timeout_s: float
) -> list[WebhookDelivery]:
    """The newest record of each webhook of these partitions; of one that has ended without its attempts and its URL.

    Memory is taken by webhooks, not by the records that say how they went on.
    Raises BrokerUnavailable, NotFound, RegistryUnavailable.
    """
    give_up = time.monotonic() + timeout_s
    tps = [(kafka.names.delivery, number) for number in partitions]
    firsts, ends = admin.begin_offsets(kafka, tps, timeout_s), admin.end_offsets(kafka, tps, timeout_s)
    found: dict[bytes, WebhookDelivery] = {}

    def take(message: Message) -> bool:
        fold_delivery(found, message.key(), message.value(), codec)
        return False  # it is folded: nobody holds the record

    read_ranges(kafka, {tp: (firsts[tp], ends[tp]) for tp in tps}, give_up, keep=take)
    return list(found.values())


def fold_delivery(found: dict[bytes, WebhookDelivery], key: bytes | None, value: bytes | None, codec: Codec) -> None:
    """Take the next record of a partition of the topic: the newest of each webhook counts. Pure."""
    if key is not None and (delivery := _decoded(value, codec)) is not None:
        ended = delivery.state != "waiting"
        found[key] = replace(delivery, url="", attempts=[]) if ended else delivery


def read_delivery(
    kafka: KafkaSettings, codec: Codec, key: bytes, partition: int, since_ms: int, timeout_s: float
) -> WebhookDelivery | None:
    """The newest record with this key, written since its request ended at `since_ms`. Raises as `read_deliveries`."""
    give_up = time.monotonic() + timeout_s
    tp = (kafka.names.delivery, partition)
    at = admin.offsets_at(kafka, [tp], since_ms - CLOCKS_DIFFER_MS, timeout_s)[tp]
    end = admin.end_offsets(kafka, [tp], timeout_s)[tp]
    newest: WebhookDelivery | None = None
    most: int | None = 1  # most are delivered at once: then the first record is the last one, and it stands near
    while at < end:
        messages = read_ranges(kafka, {tp: (at, end)}, give_up, most, keep=lambda message: message.key() == key)
        if not messages:
            break
        newest = _decoded(messages[-1].value, codec) or newest
        if newest is not None and newest.state != "waiting":
            break
        at, most = messages[-1].offset + 1, None
    return newest


def _decoded(value: bytes | None, codec: Codec) -> WebhookDelivery | None:
    try:
        return None if value is None else codec.decode(value, WebhookDelivery)
    except DecodeError:
        return None  # somebody else's: nobody knows what it says
