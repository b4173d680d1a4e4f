"""What a replay asks Kafka: where conversations stand, and how far. Topics that are deleted meanwhile are left out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from penstock.common import admin
from penstock.common.settings import KafkaSettings
from penstock.producers.replay_plan import Range, matching
from penstock.producers.replay_records import OwnTopicRecords, PartitionRecords, SharedTopicRecords
from penstock.schemas.errors import NotFound
from penstock.schemas.topics import TP

Offsets = dict[TP, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Located:
    """The id of a partition's topic, the bounds of its log, and where one begins who has no position in it."""

    topic_id: str
    bounds: Range
    start: int


class ReplayTopics:
    """Conversations of a tenant whose ids match a glob, each with a topic of its own.

    All methods block, and raise BrokerUnavailable.
    """

    def __init__(self, settings: KafkaSettings, tenant: str, pattern: str, timeout_s: float) -> None:
        self._settings, self._tenant, self._pattern, self._timeout_s = settings, tenant, pattern, timeout_s

    def list(self) -> dict[TP, PartitionRecords]:
        """The partitions to read: of each conversation's topic in the order of the ids, or all of the shared topic."""
        names = self._settings.names
        counts = admin.known_topics(self._settings, self._timeout_s)
        if shared := counts.get(names.conversation_log):
            places = [(names.conversation_log, number) for number in range(shared)]
            return {place: SharedTopicRecords(self._tenant, self._pattern) for place in places}
        parse = names.parse_conversation
        topics = {found[1]: topic for topic in counts if (found := parse(topic)) and found[0] == self._tenant}
        return {(topics[one], 0): OwnTopicRecords(one) for one in matching(self._pattern, topics)}

    def ids(self, places: Iterable[TP]) -> dict[TP, str]:
        """Kafka's ids of the topics that exist."""
        asked = list(places)
        ids = admin.topic_ids(self._settings, list(dict.fromkeys(topic for topic, _ in asked)), self._timeout_s)
        return {place: ids[place[0]] for place in asked if place[0] in ids}

    def ends(self, places: Iterable[TP]) -> Offsets:
        (ends,) = self._of_existing(places, lambda asked: (self._ends(asked),))
        return ends

    def locate(self, places: Iterable[TP], *, from_offset: int | None, since_ms: int | None) -> dict[TP, Located]:
        """`from_offset`, `since_ms`: where to start, else at the first record."""

        def look_up(asked: list[TP]) -> tuple[Offsets, ...]:
            first = starts = admin.begin_offsets(self._settings, asked, self._timeout_s)
            if from_offset is not None:
                starts = dict.fromkeys(asked, from_offset)
            elif since_ms is not None:
                starts = admin.offsets_at(self._settings, asked, since_ms, self._timeout_s)
            return first, starts, self._ends(asked)

        ids = self.ids(places)
        first, starts, ends = self._of_existing(ids, look_up)
        return {tp: Located(topic_id=ids[tp], bounds=(first[tp], end), start=starts[tp]) for tp, end in ends.items()}

    def _ends(self, partitions: list[TP]) -> Offsets:
        return admin.end_offsets(self._settings, partitions, self._timeout_s)

    def _of_existing(self, places: Iterable[TP], ask: Callable[[list[TP]], tuple[Offsets, ...]]) -> tuple[Offsets, ...]:
        """The answers for the partitions, asked again without those of a topic that does not exist."""
        left = list(places)
        while True:
            try:
                return ask(left)
            except NotFound as error:
                gone = (error.details or {}).get("topic")
                if all(topic != gone for topic, _ in left):
                    raise
                left = [place for place in left if place[0] != gone]
