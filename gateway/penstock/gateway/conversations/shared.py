"""Conversations in one topic: read from a copy of it on disk, made and removed by records."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence

from penstock.common import forks
from penstock.common.clock import now_ms
from penstock.common.reader import RawMessage
from penstock.common.shards.addresses import Address, address_of, id_of, split_key
from penstock.common.shards.sending import send_and_wait
from penstock.common.shards.shard_copy import ShardCopy
from penstock.common.shards.shard_file import Row, Span
from penstock.common.transport import Transport
from penstock.gateway.conversations.layout import Target
from penstock.gateway.conversations.tails import TopicEnd
from penstock.schemas.codec import Codec
from penstock.schemas.errors import NotFound
from penstock.schemas.topics import TopicNames, conversation_key

PATIENCE_S = 10.0
DELETED = b"deleted/"
"""What the key of a record begins with that ends what stands before it."""
REMOVED_AT_ONCE = TAKEN_BACK_AT_ONCE = 1_000


class SharedTopic:
    """A `Layout`. It raises BrokerUnavailable too while the copy cannot be brought to the topic's end."""

    is_shared = True

    def __init__(self, copy: ShardCopy, transport: Transport, names: TopicNames, codec: Codec) -> None:
        self._copy = copy
        self._transport = transport
        self._names = names
        self._codec = codec
        self.log = SharedLog(copy, names)

    def target(self, topic: str, key: bytes) -> Target:
        address = self._address(topic)
        return Target(self._copy.topic, address.partition, address.key(key))

    def create(self, topic: str) -> None:
        address = self._address(topic)
        if self._copy.refresh([address.partition]).span(address.conversation) is None:
            tenant, name = self._names.parse_conversation(topic) or ("", "")
            head = forks.begin_record(tenant, name, uuid.uuid4().hex, now_ms())
            self._send(address, [(head.key.encode(), self._codec.encode(head.message))])

    def remove(self, topic: str, place: TopicEnd | None = None) -> bool:
        """Its head goes when all else has gone, but for what says that it is deleted: a call that is repeated after a
        kill finds what is left to do, and until then the conversation is a deleted one."""
        address = self._address(topic)
        file = self._copy.refresh([address.partition])
        span = file.span(address.conversation)
        if place is not None and (span is None or self._id_of(address, span) != place.topic_id):
            return True
        if place is not None and span is not None and span.end != place.end:
            return False
        heads = [] if span is None else file.records(address.conversation, span.head, span.head + 1)
        if not heads:  # others have removed it
            return True
        head = heads[0][2]
        keys = [key for key in file.live_keys(address.conversation) if key != head]
        ends = [key for key in keys if key.startswith(DELETED)]
        contents = [key for key in keys if not key.startswith(DELETED)]
        parts = [contents[start : start + REMOVED_AT_ONCE] for start in range(0, len(contents), REMOVED_AT_ONCE)]
        for part in (*parts, [head], ends):
            self._send(address, [(key, None) for key in part])
        self._copy.refresh([address.partition])
        return True

    def ids(self, tenant: str) -> list[str]:
        return self._copy.refresh_all().ids(tenant)

    def everyone(self) -> list[tuple[str, str]]:
        return self._copy.refresh_all().everyone()

    def topic_ids(self, topics: Sequence[str]) -> dict[str, str]:
        return {topic: place.topic_id for topic, place in self.log.places(topics).items()}

    def newest_times(self, topics: Sequence[str]) -> dict[str, int]:
        return self.log.newest_times(topics)

    def times_of(self, wants: Callable[[str], bool]) -> dict[tuple[str, str], int | None]:
        file = self._copy.refresh_all()
        keys = [key for key in file.everyone() if wants(key[0])]
        spans = {key: file.span(conversation_key(*key)) for key in keys}
        return {key: span.newest_ms for key, span in spans.items() if span is not None}

    def take_back(self, before_ms: int) -> int:
        strays = self._copy.refresh_all().strays(before_ms, TAKEN_BACK_AT_ONCE)
        for partition, key in strays:
            split = split_key(key)
            assert split is not None  # only such records are noted
            send_and_wait(
                self._transport, self._copy.topic, Address(split[0], partition), [(split[1], None)], PATIENCE_S
            )
        return len(strays)

    def close(self) -> None:
        self._copy.close()

    def _id_of(self, address: Address, span: Span) -> str:
        return id_of(self._copy.topic_id, address.partition, span.head)

    def _send(self, address: Address, records: Sequence[tuple[bytes, bytes | None]]) -> None:
        send_and_wait(self._transport, self._copy.topic, address, records, PATIENCE_S)

    def _address(self, topic: str) -> Address:
        return address_of(self._names, topic, self._copy.partitions)


class SharedLog:
    """A `Log`. `topic_id`, `places` and `last_records` bring the copy up to date; the others read it as it is."""

    def __init__(self, copy: ShardCopy, names: TopicNames) -> None:
        self._copy = copy
        self._names = names

    def topic_id(self, topic: str) -> str | None:
        found = self.places([topic]).get(topic)
        return None if found is None else found.topic_id

    def end(self, topic: str) -> int:
        return self._span(topic).end

    def newest_times(self, topics: Sequence[str]) -> dict[str, int]:
        return {topic: span.newest_ms for topic, span in self.spans(topics).items()}

    def places(self, topics: Sequence[str]) -> dict[str, TopicEnd]:
        found: dict[str, TopicEnd] = {}
        for topic, span in self.spans(topics).items():
            found[topic] = TopicEnd(id_of(self._copy.topic_id, self._address(topic).partition, span.head), span.end)
        return found

    def spans(self, topics: Sequence[str]) -> dict[str, Span]:
        """Of those that exist now."""
        addresses = {topic: self._address(topic) for topic in topics}
        file = self._copy.refresh({address.partition for address in addresses.values()})
        found = {topic: file.span(address.conversation) for topic, address in addresses.items()}
        return {topic: span for topic, span in found.items() if span is not None}

    def back(self, topic: str, end: int, records: int) -> int:
        span = self._span(topic)
        return self._copy.file.back(self._address(topic).conversation, end, records) or span.head

    def read(self, topic: str, begin: int, end: int, give_up: float, most: int | None = None) -> list[RawMessage]:
        del give_up  # nothing is waited for
        head = self._span(topic).head
        address = self._address(topic)
        rows = self._copy.file.records(address.conversation, max(head, begin), end, most)
        return [_raw(topic, address, row) for row in rows]

    def read_many(self, spans: Mapping[str, tuple[int, int]], give_up: float) -> list[RawMessage]:
        return [one for topic, span in spans.items() for one in self.read(topic, *span, give_up)]

    def batches(self, topic: str, begin: int, end: int, give_up: float, most: int) -> Iterator[Sequence[RawMessage]]:
        while begin < end:
            found = self.read(topic, begin, end, give_up, most)
            begin = found[-1].offset + 1 if len(found) == most else end
            yield found

    def last_records(self, topics: Sequence[str], give_up: float) -> dict[str, RawMessage | None]:
        addresses = {topic: self._address(topic) for topic in topics}
        wanted = {address.partition for address in addresses.values()}
        file = self._copy.refresh(wanted, max(0.1, give_up - time.monotonic()))
        found: dict[str, RawMessage | None] = {}
        for topic, address in addresses.items():
            if (row := file.last(address.conversation)) is not None:
                found[topic] = _raw(topic, address, row)
        return found

    def _span(self, topic: str) -> Span:
        span = self._copy.file.span(self._address(topic).conversation)
        if span is None:
            raise NotFound("the conversation was deleted", param="conversation_id")
        return span

    def _address(self, topic: str) -> Address:
        return address_of(self._names, topic, self._copy.partitions)


def _raw(topic: str, address: Address, row: Row) -> RawMessage:
    offset, time_ms, key, value = row
    return RawMessage(topic, address.partition, offset, time_ms, key, value)
