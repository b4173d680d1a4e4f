"""What a replay asks Kafka about the topics of conversations. Topics that are deleted meanwhile are left out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from penstock.common import admin
from penstock.common.settings import KafkaSettings
from penstock.producers.replay_plan import Range, matching
from penstock.schemas.errors import Conflict, NotFound
from penstock.schemas.topics import TP

Offsets = dict[TP, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Located:
    """A topic's id, the bounds of its log, and where one begins who has no position in it."""

    topic_id: str
    bounds: Range
    start: int


class ReplayTopics:
    """Conversations of a tenant whose ids match a glob, each with a topic of its own.

    All methods block, and raise BrokerUnavailable.
    """

    def __init__(self, settings: KafkaSettings, tenant: str, pattern: str, timeout_s: float) -> None:
        self._settings, self._tenant, self._pattern, self._timeout_s = settings, tenant, pattern, timeout_s

    def list(self) -> dict[str, str]:
        """The id of each conversation by its topic, in the order of the ids. Raises Conflict where they share one."""
        parse, shared = self._settings.names.parse_conversation, self._settings.names.conversation_log
        counts = admin.partition_counts(self._settings, timeout_s=self._timeout_s)
        if shared in counts:
            raise Conflict(f"conversations share {shared}: replay them one by one, or read that topic")
        topics = {found[1]: topic for topic in counts if (found := parse(topic)) and found[0] == self._tenant}
        return {topics[one]: one for one in matching(self._pattern, topics)}

    def ids(self, topics: Iterable[str]) -> dict[str, str]:
        """Kafka's ids of the topics that exist."""
        return admin.topic_ids(self._settings, list(topics), self._timeout_s)

    def ends(self, topics: Iterable[str]) -> dict[str, int]:
        (ends,) = self._of_existing(topics, lambda asked: (self._ends(asked),))
        return {topic: end for (topic, _), end in ends.items()}

    def locate(self, topics: Iterable[str], *, from_offset: int | None, since_ms: int | None) -> dict[str, Located]:
        """`from_offset`, `since_ms`: where to start, else at the first record."""

        def look_up(asked: list[TP]) -> tuple[Offsets, ...]:
            first = starts = admin.begin_offsets(self._settings, asked, self._timeout_s)
            if from_offset is not None:
                starts = dict.fromkeys(asked, from_offset)
            elif since_ms is not None:
                starts = admin.offsets_at(self._settings, asked, since_ms, self._timeout_s)
            return first, starts, self._ends(asked)

        ids = self.ids(topics)
        first, starts, ends = self._of_existing(ids, look_up)
        return {
            tp[0]: Located(topic_id=ids[tp[0]], bounds=(first[tp], end), start=starts[tp]) for tp, end in ends.items()
        }

    def _ends(self, partitions: list[TP]) -> Offsets:
        return admin.end_offsets(self._settings, partitions, self._timeout_s)

    def _of_existing(
        self, topics: Iterable[str], ask: Callable[[list[TP]], tuple[Offsets, ...]]
    ) -> tuple[Offsets, ...]:
        """The answers for the topics, asked again without one that does not exist."""
        left = dict.fromkeys(topics)
        while True:
            try:
                return ask([(topic, 0) for topic in left])
            except NotFound as error:
                gone = (error.details or {}).get("topic")
                if gone not in left:
                    raise
                del left[gone]
