"""Conversations in one topic on Kafka, read from this worker's copy of it."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from penstock.common import forks
from penstock.common.clock import now_ms
from penstock.common.shards.addresses import Address, address_of, id_of
from penstock.common.shards.sending import send_and_wait
from penstock.common.shards.shard_copy import ShardCopy
from penstock.common.transport import AsyncTransport
from penstock.processors.conversations.appending import append_in_order
from penstock.processors.conversations.turns import TopicRecord
from penstock.schemas.codec import Codec
from penstock.schemas.errors import BrokerUnavailable
from penstock.schemas.topics import TopicNames

MAKING_S = 5.0
"""Making a conversation may take longer: it is asked for only after Kafka answered."""


class SharedLog:
    """The `Log` of `Turns`, with one topic for all. All but `append` block, in one of the turns' threads."""

    is_shared = True

    def __init__(self, copy: ShardCopy, transport: AsyncTransport, names: TopicNames, codec: Codec) -> None:
        self._copy = copy
        self._transport = transport
        self._names = names
        self._codec = codec

    def find(self, topic: str, timeout_s: float) -> str | None:
        address = self._address(topic)
        span = self._copy.refresh([address.partition], timeout_s).span(address.conversation)
        return None if span is None else id_of(self._copy.topic_id, address.partition, span.head)

    def open(self, topic: str, timeout_s: float) -> str:
        found = self.find(topic, timeout_s)
        if found is None:
            tenant, name = self._names.parse_conversation(topic) or ("", "")
            head = forks.begin_record(tenant, name, uuid.uuid4().hex, now_ms())
            record = (head.key.encode(), self._codec.encode(head.message))
            wait_s = max(MAKING_S, timeout_s)
            send_and_wait(self._transport.transport, self._copy.topic, self._address(topic), [record], wait_s)
            found = self.find(topic, timeout_s)
        if found is None:  # deleted at once
            raise BrokerUnavailable(f"{topic} was made but is not visible")
        return found

    def read(self, topic: str, from_offset: int, timeout_s: float) -> list[TopicRecord]:
        address = self._address(topic)
        file = self._copy.refresh([address.partition], timeout_s)
        if (span := file.span(address.conversation)) is None:
            return []
        rows = file.records(address.conversation, max(span.head, from_offset))
        return [(offset, key, value) for offset, _, key, value in rows]

    async def append(self, topic: str, records: Sequence[tuple[bytes, bytes | None]]) -> list[int]:
        address = self._address(topic)
        addressed = [(address.key(key), value) for key, value in records]
        return await append_in_order(self._transport, self._copy.topic, address.partition, addressed)

    def _address(self, topic: str) -> Address:
        return address_of(self._names, topic, self._copy.partitions)
