"""Conversations' topics in memory, for tests of what reads them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.common.conversations import ConversationRecord
from penstock.common.reader import RawMessage
from penstock.gateway.conversations.pages import Conversations
from penstock.gateway.conversations.tails import Place
from penstock.schemas.codec import default_codec
from penstock.schemas.records import ConversationMessage, conversation_message_key
from penstock.schemas.topics import TopicNames

CODEC = default_codec()
TOPIC = TopicNames().conversation("acme", "c")


def message(request_id: str, direction: str, index: int, epoch: int) -> ConversationMessage:
    return ConversationMessage(
        request_id=request_id,
        tenant="acme",
        conversation_id="c",
        direction=direction,
        index=index,
        epoch=epoch,
        role="user" if direction == "in" else "assistant",
        content=f"{request_id} {direction} {index} of epoch {epoch}",
        created_at=0,
        covers_through=index if direction == "summary" else None,
    )


class FakeLog:
    """Topics in memory, which count what is read of them."""

    def __init__(self) -> None:
        self.topics: dict[str, str] = {TOPIC: "id-0"}
        self.logs: dict[str, list[RawMessage]] = {TOPIC: []}
        self.ends: dict[str, int] = {TOPIC: 0}
        self.records_read = 0
        self.before_read: Callable[[], None] = lambda: None

    def write(self, what: ConversationMessage | bytes, *, tombstone: bool = False, topic: str = TOPIC) -> int:
        offset = self.ends[topic]
        key = b"odd" if isinstance(what, bytes) else conversation_message_key(what).encode()
        value = what if isinstance(what, bytes) else CODEC.encode(what)
        self.logs[topic].append(RawMessage(topic, 0, offset, 1_000 + offset, key, None if tombstone else value))
        self.ends[topic] += 1
        return offset

    def marker(self) -> None:
        """A transaction's, which has an offset and is no record."""
        self.ends[TOPIC] += 1

    def compact(self, *, tombstones_too: bool) -> None:
        """The newest record of a key stays; the log's last one always."""
        newest = {record.key: record.offset for record in self.logs[TOPIC]}
        self.logs[TOPIC] = [
            record
            for record in self.logs[TOPIC]
            if record.offset == self.ends[TOPIC] - 1
            or (newest[record.key] == record.offset and not (record.value is None and tombstones_too))
        ]

    def make_anew(self) -> None:
        number = int(self.topics[TOPIC].removeprefix("id-")) + 1
        self.topics[TOPIC], self.logs[TOPIC], self.ends[TOPIC] = f"id-{number}", [], 0

    # -- as KafkaLog

    def topic_id(self, topic: str) -> str | None:
        return self.topics.get(topic)

    def back(self, topic: str, end: int, records: int) -> int:
        return max(0, end - records)

    def end(self, topic: str) -> int:
        return self.ends[topic]

    def newest_ms(self, topic: str) -> int | None:
        return max((record.timestamp_ms for record in self.logs[topic]), default=None)

    def last_records(self, topics: Sequence[str], give_up: float) -> dict[str, RawMessage | None]:
        found: dict[str, RawMessage | None] = {}
        for topic in topics:
            if topic in self.topics and (end := self.ends[topic]):
                found[topic] = next(iter(self.read(topic, end - 1, end, give_up)), None)
        return found

    def places(self, topics: Sequence[str]) -> dict[str, Place]:
        return {topic: Place(self.topics[topic], self.ends[topic]) for topic in topics if topic in self.topics}

    def read(self, topic: str, begin: int, end: int, give_up: float, most: int | None = None) -> list[RawMessage]:
        self.before_read()
        found = [record for record in self.logs[topic] if begin <= record.offset < end][:most]
        self.records_read += len(found)
        return found

    # -- as all is read again

    def plain(self) -> list[ConversationRecord]:
        return [
            ConversationRecord(
                offset=one.offset,
                timestamp_ms=one.timestamp_ms,
                key=(one.key or b"").decode(),
                message=None if one.value is None else CODEC.decode(one.value, ConversationMessage),
            )
            for one in self.logs[TOPIC]
            if one.value != b"odd"
        ]


def reader(log: FakeLog, most_records: int = 10_000) -> Conversations:
    return Conversations(log, TopicNames(), CODEC, most_records=most_records)
