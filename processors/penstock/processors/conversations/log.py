"""One conversation's topic as read so far: which records count, what is before a turn, which answer wins. Pure."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.common.forks import TopicForks
from penstock.common.shards.addresses import head_of
from penstock.processors.conversations.messages import as_chat
from penstock.processors.earlier_messages import chars_of
from penstock.schemas.records import ArtifactRef, ConversationFork, ConversationMessage

ENTRY_OVERHEAD_BYTES = 1500
"""What the Python objects of one entry take beside the text itself."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One message of the log. `size_bytes` estimates what it takes in memory. `offset` counts as the conversation's."""

    offset: int
    key: bytes
    message: ConversationMessage
    size_bytes: int


@dataclass(frozen=True, slots=True)
class HistoryMark:
    """What a turn saw in front of its own input: the same mark later means the same history."""

    topic_id: str | None
    """The log's `identity`; None when there was no topic yet."""
    count: int
    fingerprint: int


@dataclass(frozen=True, slots=True)
class SummaryMark:
    """What a summary is made of: the messages up to `through`, and the summary at the offset `base` if there is one."""

    topic_id: str | None
    through: int
    fingerprint: int
    base: int | None


class ConversationLog:
    """Everything below `next_offset` of the topic with this Kafka id; None stands for a topic that does not exist.

    A fork begins with what its parent holds up to an offset; its own records follow. So the offsets of a conversation
    are unique and ascend: `base` plus Kafka's offset in the own topic. A record `deleted` ends what is before it:
    the conversation of this id begins again behind it, and forks still read what they inherited.
    """

    def __init__(self, topic_id: str | None, limit: int | None = None) -> None:
        """`limit`: later messages are left out. So a fork reads its parent, whose tombstones it follows to the end."""
        self.topic_id = topic_id
        self.limit = limit
        self.may_be_written = False
        """This worker has carried out all commands that were given before this topic was seen."""
        self.next_offset = 0
        """Kafka's offset."""
        self.topic = TopicForks(head_of(topic_id))
        self.parent: ConversationLog | None = None
        self.refused_parent: ConversationLog | None = None
        """The topic that has the parent's name and is not the parent: kept so that only its tail is read again."""
        self.changes = 0
        """How often the messages changed."""
        self._own_bytes = ENTRY_OVERHEAD_BYTES
        self._inherited: list[Entry] = []
        self._inherited_at = 0
        """`changes` of the parent when it was last looked at."""
        self._own: list[Entry] = []
        self._earlier: list[Entry] = []
        """What is before the newest `deleted`."""
        self._by_request: dict[str | None, list[Entry]] = {}
        self._counting: list[Entry] = []
        self._chat: list[dict[str, Any]] = []
        """Of those the forms in which engines read them."""
        self._chars: list[int] = []
        """Of those, each with all before it, the characters."""
        self._hashes: list[int] = []
        """Of those, each with all before it, a hash of their offsets."""
        self._has_pictures = False
        self._summaries: list[Entry] = []
        self._identities: set[tuple[str | None, str, int]] = set()

    @property
    def identity(self) -> str | None:
        """The topic and the newest deletion in it. A turn that has seen one may not write to another."""
        deletions = self.topic.deletions
        return f"{self.topic_id}@{deletions[-1]}" if deletions else self.topic_id

    @property
    def fork(self) -> ConversationFork | None:
        return self.topic.goes_on_from(self.limit)

    def has_fork(self, child: ConversationLog) -> bool:
        return self.topic.has_fork(child.topic.fork_key)

    @property
    def size_bytes(self) -> int:
        """About what this takes in memory, the parents' part too."""
        return self._own_bytes + sum(one.size_bytes for one in (self.parent, self.refused_parent) if one is not None)

    def apply(self, offset: int, key: bytes, message: ConversationMessage | None, value_bytes: int = 0) -> None:
        """Take the next record, at Kafka's offset. A tombstone (message None) removes what its key named."""
        if offset < self.next_offset:
            return
        self.next_offset = offset + 1
        ends = self.topic.apply(offset, key.decode("utf-8", "replace"), message)
        if message is None:
            self._remove(key)
        elif ends:
            if self.is_within(offset):
                self._begin_anew()
        elif message.direction in ("in", "out", "summary") and self.is_within(offset):
            # Decoded text takes one to four bytes per character: twice the encoded size is a fair middle.
            size_bytes = 2 * value_bytes + len(key) + ENTRY_OVERHEAD_BYTES
            self._take(Entry(self.topic.base + offset, key, message, size_bytes))

    def skip(self, offset: int) -> None:
        """Pass over a record that cannot be read."""
        self.next_offset = max(self.next_offset, offset + 1)

    def is_within(self, offset: int) -> bool:
        """Whether a message at Kafka's offset is wanted."""
        return self.limit is None or self.topic.base + offset <= self.limit

    def inherit(self, parent: ConversationLog) -> None:
        """Begin with what the parent holds now; it is asked again when something new of it was read."""
        if self.parent is parent and self._inherited_at == parent.changes:
            return
        self.parent, self._inherited_at = parent, parent.changes
        self._inherited = parent.entries()
        self._rebuild()

    def entries(self) -> list[Entry]:
        """All messages and summaries, also those that do not count."""
        return [*self._inherited, *self._own]

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

    def history(self, request_id: str) -> list[dict[str, Any]]:
        """The messages that count in front of this request's own input, as engines read them; all when its input is not
        here yet. They are to be read only."""
        return self._chat[: self._in_front(request_id)]

    @property
    def chars(self) -> Sequence[int]:
        """Of each message that counts, the characters of all up to it; it grows with the log."""
        return self._chars

    def pictured(self, request_id: str) -> list[ConversationMessage]:
        """The same as records, if there are images in them; else nothing."""
        if not self._has_pictures:
            return []
        messages = [entry.message for entry in self._counting[: self._in_front(request_id)]]
        return messages if any(message.artifacts for message in messages) else []

    def through(self, offset: int | None, *, after: int = -1) -> list[Entry]:
        """The messages that count up to an offset, with it (None: all), and are behind another."""
        return [
            entry for entry in self._counting if entry.offset > after and (offset is None or entry.offset <= offset)
        ]

    def summary_for(self, request_id: str) -> Entry | None:
        """The summary that covers most, of those in front of this request's own input; of two alike the newer."""
        own = self.inputs(request_id)
        before = min(own.values()) if own else self.topic.base + self.next_offset
        return self._widest(lambda entry: entry.offset < before)

    def summary_below(self, offset: int) -> Entry | None:
        """The summary that covers most of those that end before an offset."""
        return self._widest(lambda entry: covers(entry) < offset)

    def summary_by(self, request_id: str) -> ConversationMessage | None:
        found = (entry.message for entry in self._summaries if entry.message.request_id == request_id)
        return next(found, None)

    def covered_by(self, summary: Entry, request_id: str) -> int:
        """How many of the messages in `history` it stands for."""
        return min(self._in_front(request_id), self._count_through(covers(summary)))

    def summary_mark(self, through: int) -> SummaryMark:
        """The mark of what a summary through an offset is made of now."""
        before = self.summary_below(through)
        base = None if before is None else before.offset
        return SummaryMark(self.identity, through, self._fingerprint_through(through), base)

    def has(self, mark: SummaryMark) -> bool:
        """Whether nothing of what a summary was made of has gone."""
        base_stands = mark.base is None or any(entry.offset == mark.base for entry in self._summaries)
        return (
            base_stands
            and self.identity == mark.topic_id
            and self._fingerprint_through(mark.through) == mark.fingerprint
        )

    def _fingerprint_through(self, offset: int) -> int:
        return self._hash(self._count_through(offset))

    def _hash(self, count: int) -> int:
        """Of the offsets of the first `count` messages that count."""
        return self._hashes[count - 1] if count else 0

    def _count_through(self, offset: int) -> int:
        return bisect_right(self._counting, offset, key=lambda entry: entry.offset)

    def mark(self, request_id: str) -> HistoryMark:
        count, summary = self._in_front(request_id), self.summary_for(request_id)
        read = (None if summary is None else summary.offset, self._hash(count))
        return HistoryMark(self.identity, count, hash(read))

    def agrees(self, mark: HistoryMark, request_id: str) -> bool:
        """Whether the history is still the one that `mark` was made of. A topic made since then has to be empty."""
        now = self.mark(request_id)
        if mark.topic_id is None:
            return now.count == mark.count == 0
        return now == mark

    def shown_by(self, request_id: str) -> dict[int, list[ArtifactRef]]:
        """The images of this request's own messages that are here, by the number of the message."""
        shown: dict[int, list[ArtifactRef]] = {}
        for entry in self._by_request.get(request_id, ()):
            if entry.message.direction == "in":
                shown.setdefault(entry.message.index, entry.message.artifacts)
        return shown

    def artifact_ids(self, without: str | None = None) -> set[str]:
        """What the messages in its own topic refer to, those of one request left out; forks may show deleted ones."""
        return {
            artifact.artifact_id
            for entry in (*self._earlier, *self._counting)
            if self._is_own(entry) and (entry.message.request_id != without or without is None)
            for artifact in entry.message.artifacts
        }

    def first_of(self, request_id: str) -> int | None:
        """Where the request's oldest message is in the own topic, deleted or not."""
        of_request = [entry for entry in self._of_request(request_id) if entry.message.direction != "summary"]
        return min((entry.offset for entry in of_request), default=None)

    def keys_of(self, request_id: str) -> list[bytes]:
        """Keys of its own records in the own topic, and of the summaries into which they went.

        The oldest of its own comes last: as long as that stands, the summaries are found.
        """
        first = self.first_of(request_id)
        told = [] if first is None else self.summaries_of_message(first)
        own = reversed(self._of_request(request_id))
        return list(dict.fromkeys((*told, *(entry.key for entry in own))))

    def summaries_of_message(self, offset: int) -> list[bytes]:
        """Keys of the summaries in the own topic that tell of the message at an offset."""
        summaries = (entry for entry in (*self._earlier, *self._own) if entry.message.direction == "summary")
        return [
            entry.key for entry in summaries if covers(entry) >= offset and self.topic.is_seen(offset, entry.offset)
        ]

    def _of_request(self, request_id: str) -> list[Entry]:
        earlier = [entry for entry in self._earlier if entry.message.request_id == request_id]
        return earlier + [entry for entry in self._by_request.get(request_id, ()) if self._is_own(entry)]

    def _is_own(self, entry: Entry) -> bool:
        return entry.offset >= self.topic.base

    def _widest(self, counts: Callable[[Entry], bool]) -> Entry | None:
        return max(filter(counts, self._summaries), key=lambda entry: (covers(entry), entry.offset), default=None)

    def _in_front(self, request_id: str) -> int:
        """How many messages count in front of this request's own input."""
        own = self.inputs(request_id)
        if not own:
            return len(self._counting)
        return bisect_left(self._counting, min(own.values()), key=lambda entry: entry.offset)

    def _take(self, entry: Entry) -> None:
        self._own.append(entry)
        self._own_bytes += entry.size_bytes
        self.changes += 1
        self._add(entry)

    def _add(self, entry: Entry) -> None:
        message = entry.message
        self._by_request.setdefault(message.request_id, []).append(entry)
        identity = (message.request_id, message.direction, message.index)
        if identity in self._identities:
            return
        self._identities.add(identity)
        if message.direction == "summary":
            self._summaries.append(entry)
        else:
            self._hashes.append(hash((self._hash(len(self._hashes)), entry.offset)))
            self._counting.append(entry)
            self._chat.append(as_chat(message))
            self._chars.append(chars_of(self._chat[-1]) + (self._chars[-1] if self._chars else 0))
            self._has_pictures = self._has_pictures or bool(message.artifacts)

    def _remove(self, key: bytes) -> None:
        """Build the rest again: a later record of the same identity may count now."""
        gone = [entry for entry in (*self._earlier, *self._own) if entry.key == key]
        if gone:
            self._earlier = [entry for entry in self._earlier if entry.key != key]
            self._own = [entry for entry in self._own if entry.key != key]
            self._own_bytes -= sum(entry.size_bytes for entry in gone)
            self._rebuild()

    def _begin_anew(self) -> None:
        """What was read so far is deleted. Only commands that were given before that are known to be carried out."""
        self._earlier += self._own
        self._own, self._inherited, self.parent = [], [], None
        self.may_be_written = False
        self._rebuild()

    def _rebuild(self) -> None:
        self.changes += 1
        self._by_request, self._identities = {}, set()
        self._counting, self._summaries, self._chat, self._chars, self._hashes = [], [], [], [], []
        self._has_pictures = False
        for entry in self.entries():
            self._add(entry)


def covers(entry: Entry) -> int:
    """Up to which offset the summary covers the conversation."""
    through = entry.message.covers_through
    return -1 if through is None else through
