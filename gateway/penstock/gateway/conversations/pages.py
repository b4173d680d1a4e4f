"""Pages of conversations, read by offset: the cost of a page does not depend on the length of the conversation."""

from __future__ import annotations

import itertools
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Protocol

from penstock.common.conversations import ConversationRecord, Turn, decoded
from penstock.common.forks import fork_id_of
from penstock.common.reader import RawMessage
from penstock.gateway.conversations.index import ConversationIndex, ranges
from penstock.gateway.conversations.lineage import About, Holder, Lineage
from penstock.gateway.conversations.tails import Place, Tail
from penstock.schemas.codec import Codec
from penstock.schemas.errors import BrokerUnavailable, NotFound
from penstock.schemas.ids import check_conversation_id, check_tenant
from penstock.schemas.topics import TopicNames

MOST_RECORDS = 100_000
"""Limit for all indexes together, about 500 bytes per record. A conversation above half of it is not kept."""
INDEX_WEIGHT = 10
"""What an empty index counts for, in records."""
READ_AT_ONCE = 2_000
GAP = 100
"""Offsets of a page that are at most this far apart are read in one go."""
DEADLINE_S = 10.0
TRIES = 3


class Log(Protocol):
    """Topics of one partition. All methods block, and raise BrokerUnavailable."""

    def topic_id(self, topic: str) -> str | None:
        """Kafka's id of the topic, another one after it was made anew; None when it does not exist."""
        ...

    def end(self, topic: str) -> int:
        """The offset of its next record. Raises NotFound."""
        ...

    def newest_ms(self, topic: str) -> int | None:
        """When its newest record was written, in ms since the epoch. Raises NotFound."""
        ...

    def places(self, topics: Sequence[str]) -> dict[str, Place]:
        """Those of the topics that exist. Raises NotFound for one that is deleted at this moment."""
        ...

    def read(self, topic: str, begin: int, end: int, give_up: float, most: int | None = None) -> list[RawMessage]:
        """The records from `begin` to before `end`, or the first `most` of them. Raises NotFound."""
        ...

    def last_records(self, topics: Sequence[str], give_up: float) -> dict[str, RawMessage | None]:
        """By topic that holds records: the last one; None where compaction removed it. Unknown ones are left out."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Outline:
    """A conversation as it stands: its records end before `end`. `created_ms`: as `About` has it."""

    topic_id: str
    created_ms: int | None
    end: int
    messages: int
    """How many count."""
    summaries: int


@dataclass(eq=False, slots=True)
class _Indexed:
    """A conversation's index. Hold the lock to extend or query it."""

    topic_id: str
    index: ConversationIndex = field(default_factory=ConversationIndex)
    weight: int = 0
    """Its part of `Conversations._weight`."""
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Part:
    """What one topic contributes to a conversation: its own, or one that it goes on from. Offsets are Kafka's."""

    conversation_id: str
    topic: str
    indexed: _Indexed
    base: int
    """The offset in the conversation of the topic's first record."""
    begin: int
    end: int | None
    """Exclusive; None: up to the end of the topic."""


class Conversations:
    """All methods block and are thread-safe. A fork is read through what it goes on from; offsets are the
    conversation's (`TopicForks`).

    Each call compares the topic's id and end with the index. So deletion and erasure take effect at once, whoever
    wrote them. Indexes are built on demand; the least recently used are dropped first.

    Every call raises InvalidRequest for an impossible id, NotFound for an unknown conversation, BrokerUnavailable,
    RegistryUnavailable.
    """

    def __init__(self, log: Log, names: TopicNames, codec: Codec, *, most_records: int = MOST_RECORDS) -> None:
        self._log = log
        self._names = names
        self._codec = codec
        self._most_records = most_records
        self._indexes: OrderedDict[str, _Indexed] = OrderedDict()
        self._weight = 0
        self._guard = threading.Lock()
        self.records_read = 0
        """Records that were read from topics since the start."""

    def __len__(self) -> int:
        """The weight of the kept indexes, in records."""
        return self._weight

    def about(self, tenant: str, conversation_id: str) -> About:
        """Of one that is no fork it reads the first record and the last."""
        topic, give_up = self._topic(tenant, conversation_id), time.monotonic() + DEADLINE_S
        with self._indexed(topic, conversation_id) as indexed:
            if indexed.index.created_ms is None:
                self._extend(topic, conversation_id, indexed, give_up, first_only=True)
            index = indexed.index
            told_by_all = index.forks.fork_key is not None or index.is_deleted()  # it may be begun anew by now
            if told_by_all or self._perhaps_deleted(topic, conversation_id, indexed, give_up):
                self._extend(topic, conversation_id, indexed, give_up)
            if indexed.index.is_deleted():
                raise _unknown(conversation_id)
            topic_id, index = indexed.topic_id, indexed.index
            created_ms, forked_from = index.created_ms, index.forks.goes_on_from()
        newest_ms = self.newest_ms(tenant, conversation_id)
        return About(topic_id=topic_id, created_ms=created_ms, last_active_ms=newest_ms, forked_from=forked_from)

    def newest_ms(self, tenant: str, conversation_id: str) -> int | None:
        """When the newest record of its topic was written, in ms since the epoch; None without records."""
        try:
            return self._log.newest_ms(self._topic(tenant, conversation_id))
        except NotFound as error:
            raise _unknown(conversation_id) from error

    def deleted(self, tenant: str, conversation_ids: Sequence[str]) -> set[str]:
        """Which of these are deleted, and have a topic for the sake of their forks alone."""
        topics = {self._topic(tenant, one): one for one in conversation_ids}
        give_up = time.monotonic() + DEADLINE_S
        found: set[str] = set()
        for topic in self._without_last_message(list(topics), give_up):
            with suppress(NotFound), self._indexed(topic, topics[topic]) as indexed:
                self._extend(topic, topics[topic], indexed, give_up)
                if indexed.index.is_deleted():
                    found.add(topics[topic])
        return found

    def lineage(self, tenant: str, conversation_id: str) -> Lineage:
        """Of a deleted one too, as long as its topic is there."""
        topic = self._topic(tenant, conversation_id)
        with self._indexed(topic, conversation_id) as indexed:
            self._extend(topic, conversation_id, indexed, time.monotonic() + DEADLINE_S)
            index = indexed.index
            return Lineage(
                topic_id=indexed.topic_id,
                base=index.forks.base,
                parent=index.forks.fork,
                fork_key=index.forks.fork_key,
                begin=index.forks.begin(),
                end=index.end,
                forks=dict(index.forks.forks),
                is_empty=index.end == 0,
                is_deleted=index.is_deleted(),
                keys_before_deletion=index.keys_before_deletion(),
            )

    def forks(
        self, tenant: str, conversation_id: str, limit: int, *, after: str | None = None, newest_first: bool = False
    ) -> list[tuple[str, About]]:
        """The conversations that were forked from messages in its topic, by id, the last first with `newest_first`."""
        lineage = self.lineage(tenant, conversation_id)
        if lineage.is_deleted:
            raise _unknown(conversation_id)
        keys: dict[str, set[str]] = {}
        for key, fork in lineage.forks.items():
            if fork.through >= lineage.begin:
                keys.setdefault(fork.conversation_id, set()).add(f"fork/{fork_id_of(key)}")
        found: list[tuple[str, About]] = []
        for one in sorted(keys, reverse=newest_first):
            if after is not None and (one >= after if newest_first else one <= after):
                continue
            if len(found) == limit:
                break
            if self.fork_key(tenant, one) in keys[one]:
                with suppress(NotFound):
                    about = self.about(tenant, one)
                    found += [(one, about)] if about.forked_from is not None else []
        return found

    def fork_key(self, tenant: str, conversation_id: str) -> str | None:
        """The key of the topic's first record, if that makes it a fork, of a deleted one too. None: no such topic."""
        topic = self._topic(tenant, conversation_id)
        with suppress(NotFound), self._indexed(topic, conversation_id) as indexed:
            if indexed.index.created_ms is None:
                self._extend(topic, conversation_id, indexed, time.monotonic() + DEADLINE_S, first_only=True)
            return indexed.index.forks.fork_key
        return None

    def holder(self, tenant: str, conversation_id: str, offset: int) -> Holder:
        """Whose topic the message at this offset stands in. Raises NotFound when none that counts is there."""
        parts = self._parts(tenant, conversation_id, time.monotonic() + DEADLINE_S)
        for number, part in enumerate(parts):
            at = offset - part.base
            with part.indexed.lock:
                if part.indexed.index.turns(1, after=at - 1, begin=part.begin, end=part.end) == [at]:
                    return Holder(
                        conversation_id=part.conversation_id,
                        topic_id=part.indexed.topic_id,
                        ancestors=len(parts) - number,
                    )
        raise NotFound(f"no message of conversation {conversation_id} stands at offset {offset}", param="through")

    def turns(
        self, tenant: str, conversation_id: str, limit: int, *, after: int | None = None, newest_first: bool = False
    ) -> list[Turn]:
        """The messages that count: the first `limit` in this order, after the one at the offset `after`."""

        def choose(part: _Part, left: int) -> list[int]:
            behind = None if after is None else after - part.base
            return part.indexed.index.turns(
                left, after=behind, newest_first=newest_first, begin=part.begin, end=part.end
            )

        found = self._page(tenant, conversation_id, limit, choose, newest_first=newest_first)
        turns = [Turn(offset=one.offset, message=one.message) for one, _ in found if one.message is not None]
        return turns[::-1] if newest_first else turns

    def outline(self, tenant: str, conversation_id: str) -> Outline:
        """What stands in it now."""
        parts = self._parts(tenant, conversation_id, time.monotonic() + DEADLINE_S)
        messages = summaries = 0
        for part in parts:
            with part.indexed.lock:
                index = part.indexed.index
                counts = index.counts(part.begin, index.end if part.end is None else part.end)
            messages, summaries = messages + counts[0], summaries + counts[1]
        own = parts[0]
        with own.indexed.lock:
            return Outline(
                topic_id=own.indexed.topic_id,
                created_ms=own.indexed.index.created_ms,
                end=own.base + own.indexed.index.end,
                messages=messages,
                summaries=summaries,
            )

    def place(self, tenant: str, conversation_id: str) -> Place:
        """Where it stands and ends. Of one that is no fork it reads as much as `about`."""
        topic = self._topic(tenant, conversation_id)
        self.about(tenant, conversation_id)
        with self._indexed(topic, conversation_id) as indexed:
            base = indexed.index.forks.base
        if (found := self._log.places([topic]).get(topic)) is None:
            raise _unknown(conversation_id)
        return found.counted_from(base)

    def tail(self, tenant: str, conversation_id: str, place: Place) -> Tail:
        """Its newest records, and those to come, as long as its topic has this id."""
        return Tail(self._log, self._codec, self._topic(tenant, conversation_id), place)

    def moved(self, seen: Mapping[tuple[str, str], Place]) -> list[tuple[str, str]]:
        """Of these conversations, by tenant and id, those that are in another place than was seen."""
        topics = {key: self._topic(*key) for key in seen}
        places = self._log.places(list(topics.values()))
        return [
            key
            for key, place in seen.items()
            if (now := places.get(topics[key])) is None or now.counted_from(place.base) != place
        ]

    def told(self, tenant: str, conversation_id: str, limit: int, begin: int, end: int) -> list[Turn]:
        """The messages that count and the summaries: the first `limit` from the offset `begin` to before `end`."""

        def choose(part: _Part, left: int) -> list[int]:
            last = end - part.base if part.end is None else min(part.end, end - part.base)
            return part.indexed.index.told(left, max(part.begin, begin - part.base), last)

        found = self._page(tenant, conversation_id, limit, choose)
        return [Turn(offset=one.offset, message=one.message) for one, _ in found if one.message is not None]

    def records(
        self, tenant: str, conversation_id: str, limit: int, *, from_offset: int = 0
    ) -> list[ConversationRecord]:
        """All records: the first `limit` at or after `from_offset`. Erased ones come without their message."""

        def choose(part: _Part, left: int) -> list[int]:
            begin = max(part.begin, from_offset - part.base)
            return part.indexed.index.records(left, begin=begin, end=part.end)

        found = self._page(tenant, conversation_id, limit, choose)
        return [replace(one, message=None) if erased else one for one, erased in found]

    def _page(
        self,
        tenant: str,
        conversation_id: str,
        limit: int,
        choose: Callable[[_Part, int], list[int]],
        *,
        newest_first: bool = False,
    ) -> list[tuple[ConversationRecord, bool]]:
        """The records that `choose` finds in each part, `limit` in all, ascending; and whether each is erased."""
        give_up = time.monotonic() + DEADLINE_S
        for _ in range(TRIES):
            parts = self._parts(tenant, conversation_id, give_up)
            wanted: list[tuple[_Part, list[int]]] = []
            left = limit
            for part in parts if newest_first else reversed(parts):
                if left:
                    with part.indexed.lock:
                        offsets = sorted(choose(part, left))
                    wanted.append((part, offsets))
                    left -= len(offsets)
            found = [self._read_part(part, offsets, give_up) for part, offsets in wanted]
            if all(one is not None for one in found):
                every = itertools.chain.from_iterable(filter(None, found))
                return sorted(every, key=lambda one: one[0].offset)
        raise BrokerUnavailable("the conversation changes while it is read; try again", retry_after_s=1)

    def _read_part(
        self, part: _Part, offsets: list[int], give_up: float
    ) -> list[tuple[ConversationRecord, bool]] | None:
        """The records, at the conversation's offsets. None, and the index is gone, if compaction removed some."""
        found = self._read_all(part.topic, offsets, give_up)
        if [one.offset for one in found] != offsets:
            self._forget(part.topic, part.indexed)
            return None
        with part.indexed.lock:
            erased = [part.indexed.index.is_erased(one) for one in found]
        return [(replace(one, offset=part.base + one.offset), gone) for one, gone in zip(found, erased, strict=True)]

    def _parts(self, tenant: str, conversation_id: str, give_up: float) -> list[_Part]:
        """The topics that the conversation consists of, its own first, indexed to their ends.

        A fork whose parent's topic was deleted by others inherits nothing.
        """
        parts: list[_Part] = []
        name, topic_id, limit = conversation_id, None, None
        while True:
            topic = self._topic(tenant, name)
            try:
                with self._indexed(topic, name) as indexed:
                    if topic_id is not None and indexed.topic_id != topic_id:
                        return parts
                    self._extend(topic, name, indexed, give_up)
                    if not parts and indexed.index.is_deleted():
                        raise _unknown(name)
                    forks = indexed.index.forks
                    fork = forks.goes_on_from(limit)
                    begin, end = forks.begin(limit) - forks.base, None if limit is None else limit + 1 - forks.base
            except NotFound:
                if parts:
                    return parts
                raise
            part = _Part(conversation_id=name, topic=topic, indexed=indexed, base=forks.base, begin=begin, end=end)
            parts.append(part)
            if fork is None:
                return parts
            limit = fork.through if limit is None else min(limit, fork.through)
            name, topic_id = fork.conversation_id, fork.topic_id

    def _perhaps_deleted(self, topic: str, conversation_id: str, indexed: _Indexed, give_up: float) -> bool:
        """Whether what is not indexed yet has to be read to know."""
        if indexed.index.end == self._end(topic, conversation_id):
            return False
        return bool(self._without_last_message([topic], give_up))

    def _without_last_message(self, topics: Sequence[str], give_up: float) -> list[str]:
        """Those that do not end with a message: only they can be deleted."""
        return [
            topic
            for topic, last in self._log.last_records(topics, give_up).items()
            if last is None or last.value is None or (last.key or b"").startswith((b"deleted/", b"forked/"))
        ]

    def _extend(
        self, topic: str, conversation_id: str, indexed: _Indexed, give_up: float, *, first_only: bool = False
    ) -> None:
        """Index what was added since the last call; with `first_only` stop at the first record.

        If a read fails, the next call resumes after the last successful one.
        """
        end = self._end(topic, conversation_id)
        if end < indexed.index.end:  # the log was truncated: indexed offsets can hold other records now
            indexed.index = ConversationIndex()
        index, most = indexed.index, 1 if first_only else READ_AT_ONCE
        while index.end < end and not (first_only and index.created_ms is not None):
            raw = self._read(topic, index.end, end, give_up, most)
            index.extend(decoded(self._codec, raw), raw[-1].offset + 1 if len(raw) == most else end)

    def _end(self, topic: str, conversation_id: str) -> int:
        try:
            return self._log.end(topic)
        except NotFound as error:
            raise _unknown(conversation_id) from error

    def _read_all(self, topic: str, offsets: Sequence[int], give_up: float) -> list[ConversationRecord]:
        wanted = frozenset(offsets)
        raw = itertools.chain.from_iterable(self._read(topic, *one, give_up) for one in ranges(offsets, GAP))
        return list(decoded(self._codec, (one for one in raw if one.offset in wanted)))

    def _read(self, topic: str, begin: int, end: int, give_up: float, most: int | None = None) -> list[RawMessage]:
        found = self._log.read(topic, begin, end, give_up, most)
        with self._guard:
            self.records_read += len(found)
        return found

    def _topic(self, tenant: str, conversation_id: str) -> str:
        return self._names.conversation(check_tenant(tenant), check_conversation_id(conversation_id))

    # -- which indexes are kept

    @contextmanager
    def _indexed(self, topic: str, conversation_id: str) -> Generator[_Indexed]:
        """The index of the current topic, locked. Its new size is counted at the end."""
        topic_id = self._log.topic_id(topic)
        with self._guard:
            indexed = self._indexes.get(topic)
            if indexed is None or indexed.topic_id != topic_id:
                self._drop(topic)
                if topic_id is None:
                    raise _unknown(conversation_id)
                indexed = self._indexes[topic] = _Indexed(topic_id)
        with indexed.lock:
            try:
                yield indexed
            finally:
                self._count(topic, indexed)

    def _count(self, topic: str, indexed: _Indexed) -> None:
        """Count its size, mark it as most recently used, and drop indexes above the limit."""
        with self._guard:
            if self._indexes.get(topic) is not indexed:
                return
            self._weight -= indexed.weight
            indexed.weight = len(indexed.index) + INDEX_WEIGHT
            self._weight += indexed.weight
            self._indexes.move_to_end(topic)
            if indexed.weight > self._most_records / 2:
                self._drop(topic)
            while self._weight > self._most_records:
                self._drop(next(iter(self._indexes)))

    def _forget(self, topic: str, indexed: _Indexed) -> None:
        with self._guard:
            if self._indexes.get(topic) is indexed:
                self._drop(topic)

    def _drop(self, topic: str) -> None:
        """Called with the guard."""
        indexed = self._indexes.pop(topic, None)
        if indexed is not None:
            self._weight -= indexed.weight
            indexed.weight = 0


def _unknown(conversation_id: str) -> NotFound:
    return NotFound(f"conversation {conversation_id} does not exist", param="conversation_id")
