"""Conversations with a topic each, read one by one from where the group has committed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from penstock.common import admin
from penstock.common.conversations import Turn, read_conversation, standing
from penstock.common.reader import PartitionReader, RawMessage
from penstock.common.settings import KafkaSettings
from penstock.gateway.summarizer.progress import CommittedPositions
from penstock.gateway.summarizer.sources import REACHED, ReadingPlace
from penstock.gateway.summarizer.summary_scheduler import Commit, Key
from penstock.schemas.codec import Codec
from penstock.schemas.errors import NotFound
from penstock.schemas.topics import TP

WHOLE_S = 30.0


class OwnTopics:
    """A `Source`. `reader` passes what it reads to `put`."""

    def __init__(
        self,
        kafka: KafkaSettings,
        codec: Codec,
        reader: PartitionReader,
        put: Callable[[Sequence[RawMessage]], None],
        progress: CommittedPositions,
    ) -> None:
        self._kafka, self._codec, self._reader, self._put, self._progress = kafka, codec, reader, put, progress

    @property
    def failure(self) -> BaseException | None:
        return self._reader.failure

    def there(self) -> set[Key]:
        return {Key(*one) for one in admin.conversation_topics(self._kafka).values()}

    def ids(self, keys: Sequence[Key]) -> dict[Key, str]:
        topics = {self._topic(key): key for key in keys}
        return {topics[topic]: topic_id for topic, topic_id in admin.topic_ids(self._kafka, list(topics)).items()}

    def places(self, keys: Sequence[Key]) -> dict[Key, ReadingPlace]:
        topics = {self._topic(key): key for key in keys}
        topic_ids = admin.topic_ids(self._kafka, list(topics))
        partitions = [(topic, 0) for topic in topic_ids]
        begin = admin.begin_offsets(self._kafka, partitions)
        committed = self._progress.read(topic_ids, topics) if topic_ids else {}
        end = admin.end_offsets(self._kafka, partitions)  # last: what is below it is read before anything is due
        places: dict[Key, ReadingPlace] = {}
        for topic, topic_id in topic_ids.items():
            known = committed.get(topic)
            if known is None or known.offset > end[topic, 0]:  # or the log has lost its end
                known = Commit(topics[topic], 0)
            places[topics[topic]] = ReadingPlace(topic_id, begin[topic, 0], known, end[topic, 0])
        return places

    def end(self, key: Key, topic_id: str) -> int | None:
        topic = self._topic(key)
        if admin.topic_id(self._kafka, topic) != topic_id:
            return None
        return admin.end_offsets(self._kafka, [(topic, 0)])[topic, 0]

    def standing(self, key: Key, topic_id: str) -> tuple[list[Turn], int]:
        if (end := self.end(key, topic_id)) is None:
            raise NotFound("the conversation was deleted")
        try:
            return standing(read_conversation(self._kafka, *key, codec=self._codec, deadline_s=WHOLE_S)), end
        except NotFound:  # it is deleted, and its topic stays for its forks
            return [], end

    def begin(self, begin: Mapping[Key, int]) -> None:
        def seek() -> None:
            for key, offset in begin.items():
                self._reader.seek((self._topic(key), 0), offset)

        self._reader.call(seek)

    def forget(self, key: Key) -> None:
        self._reader.call(lambda: self._reader.drop((self._topic(key), 0)))

    def mark(self, unread: Mapping[Key, int]) -> None:
        """Behind a topic's last record there may be offsets that hold none: nobody would tell of them."""
        places = {(self._topic(key), 0): number for key, number in unread.items()}
        self._reader.call(partial(self._mark, places))

    def _mark(self, places: Mapping[TP, int]) -> None:
        """On the reader's thread, between two batches."""
        marks = [
            RawMessage(tp[0], 0, position, places[tp], None, None, REACHED)
            for tp, position in self._reader.positions().items()
            if tp in places
        ]
        if marks:
            self._put(marks)

    def commit(self, commits: Mapping[Key, tuple[str, Commit]]) -> None:
        self._progress.commit({self._topic(key): one for key, one in commits.items()})

    def stop(self) -> None:
        """The reader is its maker's."""

    def _topic(self, key: Key) -> str:
        return self._kafka.names.conversation(*key)
