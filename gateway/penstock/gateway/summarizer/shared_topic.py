"""Conversations in one topic, read from a copy of it on disk. Where each stands need not be kept: the copy is near."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from penstock.common.conversations import TopicRecords, Turn, decoded, read_through, standing
from penstock.common.reader import RawMessage
from penstock.common.settings import KafkaSettings
from penstock.common.shards.addresses import Address, address_of, id_of, split_key
from penstock.common.shards.shard_copy import ShardCopy
from penstock.common.shards.shard_file import Row
from penstock.gateway.summarizer.sources import REACHED, ReadingPlace
from penstock.gateway.summarizer.summary_scheduler import Commit, Key
from penstock.schemas.codec import Codec
from penstock.schemas.errors import NotFound


class SharedTopic:
    """A `Source`."""

    def __init__(
        self, kafka: KafkaSettings, codec: Codec, copy: ShardCopy, put: Callable[[Sequence[RawMessage]], None]
    ) -> None:
        self._names, self._codec, self._copy, self._put = kafka.names, codec, copy, put
        self._followed: dict[str, str] = {}
        """By conversation, the name that its topic would have. Only on the copy's thread."""
        copy.on_records = self._tell

    @property
    def failure(self) -> BaseException | None:
        return self._copy.failure

    def there(self) -> set[Key]:
        return {Key(*one) for one in self._copy.refresh_all().everyone()}

    def ids(self, keys: Sequence[Key]) -> dict[Key, str]:
        return {key: place.topic_id for key, place in self.places(keys).items()}

    def places(self, keys: Sequence[Key]) -> dict[Key, ReadingPlace]:
        addresses = {key: self._address(key) for key in keys}
        file = self._copy.refresh({one.partition for one in addresses.values()})
        spans = {key: file.span(address.conversation) for key, address in addresses.items()}
        topic_id = self._copy.topic_id
        return {
            key: ReadingPlace(id_of(topic_id, addresses[key].partition, span.head), span.head, Commit(key, 0), span.end)
            for key, span in spans.items()
            if span is not None
        }

    def end(self, key: Key, topic_id: str) -> int | None:
        place = self.places([key]).get(key)
        return place.end if place is not None and place.topic_id == topic_id else None

    def standing(self, key: Key, topic_id: str) -> tuple[list[Turn], int]:
        if (end := self.end(key, topic_id)) is None:
            raise NotFound("the conversation was deleted")
        try:
            return standing(read_through(key.conversation_id, partial(self._read, key.tenant))), end
        except NotFound:  # it is deleted, and stays for its forks
            return [], end

    def _read(self, tenant: str, conversation_id: str, topic_id: str | None) -> TopicRecords | None:
        key = Key(tenant, conversation_id)
        place = self.places([key]).get(key)
        if place is None:
            raise NotFound("the conversation was deleted")
        rows = self._rows(key, place.begin)
        return TopicRecords(list(decoded(self._codec, rows)), place.begin, topic_id in (None, place.topic_id))

    def begin(self, begin: Mapping[Key, int]) -> None:
        self._copy.call(partial(self._begin, begin))

    def forget(self, key: Key) -> None:
        self._copy.call(lambda: self._followed.pop(self._address(key).conversation, None))

    def mark(self, unread: Mapping[Key, int]) -> None:
        """A last record that cannot be decoded does not say by itself that all was read."""
        self._copy.call(partial(self._mark, unread))

    def commit(self, commits: Mapping[Key, tuple[str, Commit]]) -> None:
        """What stands in the copy is read again by the next process."""

    def stop(self) -> None:
        self._copy.close()

    # -- on the copy's thread

    def _begin(self, begin: Mapping[Key, int]) -> None:
        for key, offset in begin.items():
            self._followed[self._address(key).conversation] = self._names.conversation(*key)
            if rows := self._rows(key, offset):
                self._put(rows)

    def _mark(self, unread: Mapping[Key, int]) -> None:
        """All that stands in the file now has been delivered for what is followed."""
        marks: list[RawMessage] = []
        for key, number in unread.items():
            address, topic = self._address(key), self._names.conversation(*key)
            span = self._copy.file.span(address.conversation)
            if span is not None and address.conversation in self._followed:
                marks.append(RawMessage(topic, address.partition, span.end, number, None, None, REACHED))
        if marks:
            self._put(marks)

    def _tell(self, batch: Sequence[RawMessage]) -> None:
        told: list[RawMessage] = []
        for message in batch:
            split = split_key(message.key)
            if split is not None and (topic := self._followed.get(split[0])) is not None:
                told.append(replace(message, topic=topic, key=split[1]))
        if told:
            self._put(told)

    def _rows(self, key: Key, begin: int) -> list[RawMessage]:
        address, topic = self._address(key), self._names.conversation(*key)
        return [_raw(topic, address, row) for row in self._copy.file.records(address.conversation, begin)]

    def _address(self, key: Key) -> Address:
        return address_of(self._names, self._names.conversation(*key), self._copy.partitions)


def _raw(topic: str, address: Address, row: Row) -> RawMessage:
    offset, time_ms, key, value = row
    return RawMessage(topic, address.partition, offset, time_ms, key, value)
