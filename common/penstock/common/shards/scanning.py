"""Reads one conversation from the shared topic without a copy of it: the whole partition is passed over. Blocks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from confluent_kafka import Message

from penstock.common import admin
from penstock.common.kafka_errors import missing_topic
from penstock.common.reader import RawMessage, read_ranges
from penstock.common.settings import KafkaSettings
from penstock.common.shards.addresses import HEAD, Address, address_of, id_of, split_key
from penstock.schemas.errors import NotFound


def read_shared(
    settings: KafkaSettings, topic: str, partitions: int, deadline_s: float
) -> tuple[str, list[RawMessage]]:
    """The records of the conversation that would be in `topic`, with their own keys, and the conversation's id.

    Raises NotFound without the conversation, BrokerUnavailable.
    """
    give_up = time.monotonic() + deadline_s
    address, log = address_of(settings.names, topic, partitions), settings.names.conversation_log
    place = (log, address.partition)
    topic_id = admin.topic_id(settings, log, deadline_s)
    if topic_id is None:
        raise missing_topic(log)
    first = admin.begin_offsets(settings, [place], deadline_s)[place]
    end = admin.end_offsets(settings, [place], deadline_s)[place]
    prefix = address.key(b"")

    def is_wanted(message: Message) -> bool:
        return (message.key() or b"").startswith(prefix)  # pyright: ignore[reportUnknownMemberType]

    found = read_ranges(settings, {place: (first, end)}, give_up, keep=is_wanted)
    head, records = of_conversation(found, address)
    if head is None:
        raise NotFound(f"{topic} does not exist")
    return id_of(topic_id, address.partition, head), records


def of_conversation(messages: Sequence[RawMessage], address: Address) -> tuple[int | None, list[RawMessage]]:
    """Of records in log order those of a conversation from its head on, with their own keys, and the head's offset.

    None: it is gone, or was never there. Pure.
    """
    own: list[RawMessage] = []
    heads: dict[bytes, int] = {}
    for message in messages:
        split = split_key(message.key)
        if split is None or split[0] != address.conversation:
            continue
        key = split[1]
        own.append(replace(message, key=key))
        if key.startswith(HEAD):
            if message.value is None:
                heads.pop(key, None)
            else:
                heads.setdefault(key, message.offset)
    head = min(heads.values(), default=None)
    return head, [one for one in own if head is not None and one.offset >= head]
