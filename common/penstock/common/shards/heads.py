"""Which conversations are in the shared topic: a look at the keys of their heads, without a copy of their records."""

from __future__ import annotations

from collections.abc import Sequence

from confluent_kafka import Message

from penstock.common import admin
from penstock.common.kafka_errors import missing_topic
from penstock.common.reader import PartitionReader, RawMessage
from penstock.common.settings import KafkaSettings
from penstock.common.shards.addresses import HEAD, split_key
from penstock.schemas.topics import conversation_of_key


class Heads:
    """The heads without a tombstone, of records that come in the order of their partition. Pure."""

    def __init__(self) -> None:
        self._live: dict[str, dict[bytes, int]] = {}
        """By conversation: the offset of each by its key in the conversation."""

    def apply(self, conversation: str, key: bytes, offset: int, *, is_tombstone: bool) -> None:
        """Take the next record of a head."""
        if not is_tombstone:
            self._live.setdefault(conversation, {}).setdefault(key, offset)
        elif live := self._live.get(conversation):
            live.pop(key, None)
            if not live:
                del self._live[conversation]

    def first(self, conversation: str) -> int | None:
        """The offset with which the conversation begins; None: it is gone, or was never there."""
        live = self._live.get(conversation)
        return None if live is None else min(live.values())

    def conversations(self) -> list[str]:
        return list(self._live)


class HeadsFollower:
    """Follows all partitions of the shared topic. `conversations` blocks, and may be called on any thread."""

    def __init__(self, settings: KafkaSettings) -> None:
        """Begins to read. Raises NotFound without the shared topic, BrokerUnavailable."""
        topic = settings.names.conversation_log
        count = admin.partition_counts(settings, [topic]).get(topic)
        if count is None:
            raise missing_topic(topic)
        self._places = [(topic, partition) for partition in range(count)]
        self._heads = [Heads() for _ in self._places]
        self._reader = PartitionReader(
            settings, [topic], self._take, batch_size=2_000, select=_of_heads, name="penstock-heads"
        )
        self._reader.start()

    def conversations(self, timeout_s: float = 10.0) -> list[tuple[str, str]]:
        """(tenant, id) of all that exist now. Raises BrokerUnavailable, InternalError when reading has ended."""
        self._reader.wait_until_caught_up(timeout_s, partitions=self._places)
        return [conversation_of_key(one) for heads in self._heads for one in heads.conversations()]

    def close(self) -> None:
        self._reader.stop()

    def _take(self, batch: Sequence[RawMessage]) -> None:
        for record in batch:
            if (split := split_key(record.key)) is not None:
                heads = self._heads[record.partition]
                heads.apply(*split, record.offset, is_tombstone=record.value is None)


def _of_heads(messages: Sequence[Message]) -> list[RawMessage]:
    """Without what they hold: only whether it is a tombstone counts."""
    found: list[RawMessage] = []
    for message in messages:
        split = split_key(key := message.key())  # pyright: ignore[reportUnknownMemberType,reportUnknownVariableType]
        if split is not None and split[1].startswith(HEAD):
            value = None if message.value() is None else b""
            found.append(RawMessage("", message.partition() or 0, message.offset() or 0, 0, key, value))
    return found
