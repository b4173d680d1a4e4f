"""One conversation's topic as read so far: which records count, what stands before a turn, which answer wins. Pure."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass

from penstock.schemas.records import ArtifactRef, ConversationMessage

ENTRY_OVERHEAD_BYTES = 1500
"""What the Python objects of one entry take beside the text itself."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One message of the log. `size_bytes` estimates what it takes in memory."""

    offset: int
    key: bytes
    message: ConversationMessage
    size_bytes: int


@dataclass(frozen=True, slots=True)
class HistoryMark:
    """What a turn saw in front of its own input: the same mark later means the same history."""

    topic_id: str | None
    """Kafka's id of the topic; None when there was no topic yet."""
    count: int
    fingerprint: int


class ConversationLog:
    """Everything below `next_offset` of the topic with this Kafka id; None stands for a topic that does not exist."""

    def __init__(self, topic_id: str | None) -> None:
        self.topic_id = topic_id
        self.may_be_written = False
        """This worker has carried out all commands that were given before this topic was seen."""
        self.next_offset = 0
        self.size_bytes = ENTRY_OVERHEAD_BYTES
        self._entries: list[Entry] = []
        self._by_request: dict[str | None, list[Entry]] = {}
        self._counting: list[Entry] = []
        self._summaries: list[Entry] = []
        self._identities: set[tuple[str | None, str, int]] = set()

    def apply(self, offset: int, key: bytes, message: ConversationMessage | None, value_bytes: int = 0) -> None:
        """Take the next record. A tombstone (message None) removes what its key named."""
        if offset < self.next_offset:
            return
        self.next_offset = offset + 1
        if message is None:
            self._remove(key)
        else:
            # Decoded text takes one to four bytes per character: twice the encoded size is a fair middle.
            self._add(Entry(offset, key, message, 2 * value_bytes + len(key) + ENTRY_OVERHEAD_BYTES))

    def skip(self, offset: int) -> None:
        """Pass over a record that cannot be read."""
        self.next_offset = max(self.next_offset, offset + 1)

    def answer(self, request_id: str) -> ConversationMessage | None:
        """The answer that counts: the one with the lowest offset."""
        for entry in self._by_request.get(request_id, ()):
            if entry.message.direction == "out":
                return entry.message
        return None

    def inputs(self, request_id: str) -> dict[int, int]:
        """Index → lowest offset of this request's own messages."""
        offsets: dict[int, int] = {}
        for entry in self._by_request.get(request_id, ()):
            if entry.message.direction == "in":
                offsets.setdefault(entry.message.index, entry.offset)
        return offsets

    def history(self, request_id: str) -> list[ConversationMessage]:
        """The messages that count in front of this request's own input; all when its input is not here yet."""
        return [entry.message for entry in self._in_front(request_id)]

    def through(self, offset: int | None, *, after: int = -1) -> list[Entry]:
        """What counts up to an offset, with it (None: all), and stands behind another."""
        return [
            entry for entry in self._counting if entry.offset > after and (offset is None or entry.offset <= offset)
        ]

    def summary_for(self, request_id: str) -> ConversationMessage | None:
        """The summary that covers most, of those in front of this request's own input; of two alike the newer."""
        own = self.inputs(request_id)
        before = min(own.values()) if own else self.next_offset
        return self._widest(lambda entry: entry.offset < before)

    def summary_below(self, offset: int) -> ConversationMessage | None:
        """The summary that covers most of those that end before an offset."""
        return self._widest(lambda entry: _covers(entry) < offset)

    def summary_by(self, request_id: str) -> ConversationMessage | None:
        """The summary that a request has added."""
        return next(
            (entry.message for entry in self._by_request.get(request_id, ()) if entry.message.direction == "summary"),
            None,
        )

    def covered_by(self, summary: ConversationMessage, request_id: str) -> int:
        """How many of the messages in `history` it stands for."""
        through = -1 if summary.covers_through is None else summary.covers_through
        return bisect_right(self._in_front(request_id), through, key=lambda entry: entry.offset)

    def mark(self, request_id: str) -> HistoryMark:
        """The mark of `history`."""
        entries = self._in_front(request_id)
        return HistoryMark(self.topic_id, len(entries), hash(tuple(entry.offset for entry in entries)))

    def agrees(self, mark: HistoryMark, request_id: str) -> bool:
        """Whether the history is still the one that `mark` was made of. A topic made since then has to be empty."""
        now = self.mark(request_id)
        if mark.topic_id is None:
            return now.count == mark.count == 0
        return now == mark

    def shown_by(self, request_id: str) -> dict[int, list[ArtifactRef]]:
        """The images of this request's own messages that stand here, by the number of the message."""
        shown: dict[int, list[ArtifactRef]] = {}
        for entry in self._by_request.get(request_id, ()):
            if entry.message.direction == "in":
                shown.setdefault(entry.message.index, entry.message.artifacts)
        return shown

    def artifact_ids(self, without: str | None = None) -> set[str]:
        """What the messages that count refer to, those of one request left out."""
        return {
            artifact.artifact_id
            for entry in self._counting
            if entry.message.request_id != without or without is None
            for artifact in entry.message.artifacts
        }

    def keys_of(self, request_id: str) -> list[bytes]:
        """Keys of its own records, and of the summaries into which they went."""
        own = self._by_request.get(request_id, ())
        first = min((entry.offset for entry in own if entry.message.direction != "summary"), default=None)
        told = [] if first is None else [entry for entry in self._summaries if _covers(entry) >= first]
        return list(dict.fromkeys(entry.key for entry in (*own, *told)))

    def _widest(self, counts: Callable[[Entry], bool]) -> ConversationMessage | None:
        found = max(filter(counts, self._summaries), key=lambda entry: (_covers(entry), entry.offset), default=None)
        return None if found is None else found.message

    def _in_front(self, request_id: str) -> list[Entry]:
        own = self.inputs(request_id)
        if not own:
            return self._counting
        return self._counting[: bisect_left(self._counting, min(own.values()), key=lambda entry: entry.offset)]

    def _add(self, entry: Entry) -> None:
        message = entry.message
        self._entries.append(entry)
        self._by_request.setdefault(message.request_id, []).append(entry)
        self.size_bytes += entry.size_bytes
        identity = (message.request_id, message.direction, message.index)
        if message.direction == "summary":
            if message.covers_through is not None:
                self._summaries.append(entry)
        elif identity not in self._identities:
            self._identities.add(identity)
            self._counting.append(entry)

    def _remove(self, key: bytes) -> None:
        """Build the rest anew: a later record of the same identity may count now."""
        if not any(entry.key == key for entry in self._entries):
            return
        remaining = [entry for entry in self._entries if entry.key != key]
        self.size_bytes = ENTRY_OVERHEAD_BYTES
        self._entries, self._by_request, self._identities = [], {}, set()
        self._counting, self._summaries = [], []
        for entry in remaining:
            self._add(entry)


def _covers(entry: Entry) -> int:
    through = entry.message.covers_through
    return -1 if through is None else through
