"""Conversations' topics in memory, for tests of what reads them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from kit.records import conversation_message
from memory_topics import MemoryTopics
from penstock.common.conversations import ConversationRecord
from penstock.common.reader import RawMessage
from penstock.gateway.conversations.pages import Conversations
from penstock.gateway.conversations.tails import TopicEnd
from penstock.schemas.codec import default_codec
from penstock.schemas.records import ConversationMessage, conversation_message_key
from penstock.schemas.topics import TopicNames

CODEC = default_codec()
TOPIC = TopicNames().conversation("acme", "c")


def message(request_id: str, direction: str, index: int, epoch: int) -> ConversationMessage:
    covers: dict[str, Any] = {"covers_through": index} if direction == "summary" else {}
    content = f"{request_id} {direction} {index} of epoch {epoch}"
    fields: dict[str, Any] = {"request_id": request_id, "tenant": "acme", "index": index, "epoch": epoch, **covers}
    return conversation_message("user" if direction == "in" else "assistant", content=content, **fields)


class ReadTopics(MemoryTopics):
    """As `KafkaLog`; it counts what is read."""

    def __init__(self) -> None:
        super().__init__()
        self.records_read = 0
        self.before_read: Callable[[], None] = lambda: None

    def topic_id(self, topic: str) -> str | None:
        return self.ids.get(topic)

    def end(self, topic: str) -> int:
        self.require(topic)
        return self.ends[topic]

    def newest_times(self, topics: Sequence[str]) -> dict[str, int]:
        return {topic: self.logs[topic][-1].timestamp_ms for topic in topics if self.logs.get(topic)}

    def places(self, topics: Sequence[str]) -> dict[str, TopicEnd]:
        return {topic: TopicEnd(self.ids[topic], self.ends[topic]) for topic in topics if topic in self.ids}

    def last_records(self, topics: Sequence[str], give_up: float) -> dict[str, RawMessage | None]:
        found: dict[str, RawMessage | None] = {}
        for topic in topics:
            if topic in self.ids and (end := self.ends[topic]):
                found[topic] = next(iter(self.read(topic, end - 1, end, give_up)), None)
        return found

    def read(self, topic: str, begin: int, end: int, give_up: float, most: int | None = None) -> list[RawMessage]:
        self.before_read()
        self.require(topic)
        found = [record for record in self.logs[topic] if begin <= record.offset < end][:most]
        self.records_read += len(found)
        return found

    def batches(self, topic: str, begin: int, end: int, give_up: float, most: int) -> Iterator[Sequence[RawMessage]]:
        while begin < end:
            found = self.read(topic, begin, end, give_up, most)
            begin = found[-1].offset + 1 if len(found) == most else end
            yield found

    def back(self, topic: str, end: int, records: int) -> int:
        return max(0, end - records)

    def read_many(self, spans: Mapping[str, tuple[int, int]], give_up: float) -> list[RawMessage]:
        return [one for topic, span in spans.items() for one in self.read(topic, *span, give_up)]


class FakeLog(ReadTopics):
    """One conversation, and what else a test makes."""

    def __init__(self, topic: str = TOPIC) -> None:
        super().__init__()
        self.create(topic)

    def write(self, what: ConversationMessage | bytes, *, tombstone: bool = False, topic: str = TOPIC) -> int:
        key = b"odd" if isinstance(what, bytes) else conversation_message_key(what).encode()
        value = what if isinstance(what, bytes) else CODEC.encode(what)
        return self.put(topic, key, None if tombstone else value)

    def marker(self) -> None:
        """A transaction's, which has an offset and is no record."""
        self.ends[TOPIC] += 1

    def make_anew(self) -> None:
        self.drop(TOPIC)
        self.create(TOPIC)

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
