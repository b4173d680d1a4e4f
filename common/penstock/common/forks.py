"""Forks of conversations: the records that make and end them, and what one topic says of them. Pure.

A fork goes on from a record of its parent. Its topic begins with a record `fork` that names the parent; the record
`forked` in the parent's topic names the fork, and keeps what it inherits. Both have the fork's id in their keys. A
record `deleted` ends a conversation whose topic has to stay for its forks. With `covers_through` it does so only if it
stands right behind that offset: a sweep of what nobody has touched for long must not delete what has just come.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from penstock.schemas.records import ConversationFork, ConversationMessage

MOST_ANCESTORS = 16
"""A fork of a fork of … goes on from so many conversations at most: each page and each turn looks at all of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ForkRecord:
    """A record about forks, with its key."""

    key: str
    message: ConversationMessage


def fork_record(tenant: str, conversation_id: str, fork_id: str, parent: ConversationFork, now_ms: int) -> ForkRecord:
    """The first record of a fork's topic."""
    return _record(tenant, conversation_id, "fork", fork_id, parent, now_ms)


def forked_record(tenant: str, conversation_id: str, fork_id: str, fork: ConversationFork, now_ms: int) -> ForkRecord:
    """The record in the topic of `conversation_id` that names a fork of it."""
    return _record(tenant, conversation_id, "forked", fork_id, fork, now_ms)


def begin_record(tenant: str, conversation_id: str, record_id: str, now_ms: int) -> ForkRecord:
    """A deleted conversation whose topic is still there is begun again, empty."""
    return _record(tenant, conversation_id, "fork", record_id, None, now_ms)


def deleted_record(
    tenant: str, conversation_id: str, record_id: str, base: int, now_ms: int, *, only_behind: int | None = None
) -> ForkRecord:
    """Ends what is before it. Offsets go on behind it, from the `base` of the topic.

    With `only_behind` it says nothing unless it comes to stand right behind this offset of the conversation.
    """
    begins = ConversationFork(conversation_id=conversation_id, through=base - 1) if base else None
    made = _record(tenant, conversation_id, "deleted", record_id, begins, now_ms)
    return replace(made, message=replace(made.message, covers_through=only_behind))


def _record(
    tenant: str, conversation_id: str, direction: str, record_id: str, fork: ConversationFork | None, now_ms: int
) -> ForkRecord:
    message = ConversationMessage(
        tenant=tenant,
        conversation_id=conversation_id,
        direction=direction,
        role="system",
        content="",
        created_at=now_ms,
        fork=fork,
    )
    return ForkRecord(key=f"{direction}/{record_id}", message=message)


def fork_id_of(key: str) -> str:
    """What the keys of the two records of a fork have in common."""
    return key.partition("/")[2]


class TopicForks:
    """What the records of one topic, in log order, say of forks.

    Offsets outside of `apply` are the conversation's: `base` plus Kafka's. They are unique and ascend in it, as the
    inherited messages keep those that they have where they stand.
    """

    def __init__(self, head: int | None = None) -> None:
        """`head`: Kafka's offset of the first record of a conversation that shares its topic with others."""
        self._head = head
        self._standing: dict[str, int] = {}
        """In the shared topic: by key, Kafka's offsets of the records that have no tombstone."""
        self.base = 0
        self.fork: ConversationFork | None = None
        """What the conversation goes on from, also if that was deleted."""
        self.fork_key: str | None = None
        self.tenant = ""
        """Of a fork: whose it is."""
        self.deletions: list[int] = []
        self.void: set[str] = set()
        """Keys of records `deleted` that say nothing: they do not stand where they were to stand. In the shared topic
        they go before a record is erased that came first: without it they would say something."""
        self.forks: dict[str, ConversationFork] = {}
        """By key: the forks that go on from records of this topic."""

    def apply(self, offset: int, key: str, message: ConversationMessage | None) -> bool:
        """Take the record at Kafka's offset; most of them say nothing. Whether it ends what is before it."""
        if message is None:
            self._erase(key)
            return False
        if message.direction == "fork" and offset == (self._head or 0) and message.fork is not None:
            self.fork, self.fork_key, self.tenant = message.fork, key, message.tenant
            self.base = message.fork.through + 1
        elif message.direction == "forked" and message.fork is not None:
            self.forks[key] = message.fork
        elif message.direction == "deleted":
            if self.base == 0 and message.fork is not None:  # the first record is erased
                self.base = message.fork.through + 1
            at, only_behind = self.base + offset, message.covers_through
            if only_behind is not None and self._before(at) > only_behind:
                self.void.add(key)
                return False
            self.deletions.append(at)
            self.passed(offset, key)
            return True
        self.passed(offset, key)
        return False

    def has_fork(self, fork_key: str | None) -> bool:
        """Whether the fork whose own record has this key was made of this topic, whatever id Kafka gave that then.

        A mirrored topic has another id than the fork names.
        """
        return fork_key is not None and f"forked/{fork_id_of(fork_key)}" in self.forks

    def passed(self, offset: int, key: str) -> None:
        """There is a record at Kafka's offset that says nothing of forks."""
        if self._head is not None:
            self._standing[key] = offset

    def _before(self, at: int) -> int:
        """The offset of the record that comes before the one at `at`.

        Where others are between, it is one that stands: what is erased may be compacted away with its tombstone.
        """
        return at - 1 if self._head is None else self.base + self.newest

    @property
    def newest(self) -> int:
        """In the shared topic: Kafka's offset of the newest record that stands, those apart that say nothing."""
        return max(self._standing.values(), default=-1)

    def _erase(self, key: str) -> None:
        self._standing.pop(key, None)
        self.forks.pop(key, None)
        self.void.discard(key)
        if key == self.fork_key:
            self.fork = self.fork_key = None

    def begin(self, limit: int | None = None) -> int:
        """The offset behind the newest deletion up to `limit`; where there is none, of the first record."""
        deletions = (one for one in self.deletions if limit is None or one <= limit)
        return max(deletions, default=self.base - 1) + 1

    def is_seen(self, offset: int, at: int) -> bool:
        """Whether the record at the offset `at` has the one at `offset` before it: no deletion is in between."""
        return offset <= at and not any(offset < one <= at for one in self.deletions)

    def goes_on_from(self, limit: int | None = None) -> ConversationFork | None:
        """What precedes the records from `begin` on, if that was not deleted with others of this topic."""
        return self.fork if self.begin(limit) == self.base else None
