"""Pages of conversations, read by offset: the cost of a page does not depend on the length of the conversation."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

from penstock.common.conversations import ConversationRecord, Turn
from penstock.common.forks import fork_id_of
from penstock.common.shards.addresses import is_shared
from penstock.gateway.conversations.index import ConversationIndex
from penstock.gateway.conversations.indexes import MOST_RECORDS, TRIES, Indexed, Indexes, Log
from penstock.gateway.conversations.lineage import About, Holder, Lineage
from penstock.gateway.conversations.tails import Tail, TopicEnd
from penstock.gateway.conversations.trees import Branch, Trees
from penstock.schemas.codec import Codec
from penstock.schemas.errors import BrokerUnavailable, NotFound
from penstock.schemas.ids import check_conversation_id, check_tenant
from penstock.schemas.topics import TopicNames

DEADLINE_S = 10.0
WINDOW = 1_000
"""So many records are indexed at a time where the index of a conversation is thin."""
REPEATS_WITHIN = 1_000
"""Of several records of one message the first counts, and the others stand at most so many records behind it: turns
are retried in place. See `tails`."""
MOST_UNINDEXED = 3_000
"""A conversation with more new records is not indexed for its newest page."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outline:
    """A conversation as it stands: its records end before `end`. `created_ms`: as `About` has it."""

    topic_id: str
    created_ms: int | None
    end: int
    messages: int
    """How many count."""
    summaries: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Part:
    """What one topic contributes to a conversation: its own, or one that it goes on from. Offsets are Kafka's."""

    conversation_id: str
    topic: str
    indexed: Indexed
    base: int
    """The offset in the conversation of the topic's first record."""
    begin: int
    end: int | None
    """Exclusive; None: up to the end of the topic."""

    def end_before(self, end: int) -> int:
        """Kafka's end of what stands before the conversation's offset `end`."""
        return end - self.base if self.end is None else min(self.end, end - self.base)


Choose = Callable[[_Part, int], list[int]]
"""Kafka's offsets of what a page has of a part, so many at most."""


class Conversations:
    """All methods block and are thread-safe. A fork is read through what it goes on from; offsets are the
    conversation's (`TopicForks`).

    Each call compares the topic's id and end with the index. Deletion and erasure by any gateway take
    effect at once. Indexes are built on demand; the least recently used are dropped first.

    Every call raises InvalidRequest for an impossible id, NotFound for an unknown conversation, BrokerUnavailable,
    RegistryUnavailable.
    """

    def __init__(self, log: Log, names: TopicNames, codec: Codec, *, most_records: int = MOST_RECORDS) -> None:
        self._log = log
        self._names = names
        self._codec = codec
        self.indexes = Indexes(log, codec, most_records)
        self.trees = Trees(log, self.indexes, names)

    def about(self, tenant: str, conversation_id: str) -> About:
        """Of one that is no fork it reads the first record and the last."""
        topic, give_up = self._topic(tenant, conversation_id), time.monotonic() + DEADLINE_S
        with self._indexed(topic, conversation_id) as indexed:
            if indexed.index.created_ms is None:
                self.indexes.extend(topic, indexed, give_up, first_only=True)
            index = indexed.index
            told_by_all = index.forks.fork_key is not None or index.is_deleted()  # it may be begun anew by now
            if told_by_all or self._perhaps_deleted(topic, indexed, give_up):
                self.indexes.extend(topic, indexed, give_up)
            if indexed.index.is_deleted():
                raise unknown(conversation_id)
            topic_id, index = indexed.topic_id, indexed.index
            created_ms, forked_from = index.created_ms, index.forks.goes_on_from()
        newest_ms = self.newest_ms(tenant, conversation_id)
        return About(topic_id=topic_id, created_ms=created_ms, last_active_ms=newest_ms, forked_from=forked_from)

    def newest_ms(self, tenant: str, conversation_id: str) -> int | None:
        """When the newest record of its topic was written, in ms since the epoch; None without records."""
        topic = self._topic(tenant, conversation_id)
        try:
            return self._log.newest_times([topic]).get(topic)
        except NotFound as error:
            raise unknown(conversation_id) from error

    def deleted(self, tenant: str, conversation_ids: Sequence[str]) -> set[str]:
        """Which of these are deleted, and have a topic for the sake of their forks alone."""
        topics = {self._topic(tenant, one): one for one in conversation_ids}
        give_up = time.monotonic() + DEADLINE_S
        found: set[str] = set()
        for topic in self._without_last_message(list(topics), give_up):
            with suppress(NotFound), self._indexed(topic, topics[topic]) as indexed:
                self.indexes.extend(topic, indexed, give_up)
                if indexed.index.is_deleted():
                    found.add(topics[topic])
        return found

    def lineage(self, tenant: str, conversation_id: str) -> Lineage:
        """Of a deleted one too, as long as its topic is there."""
        topic = self._topic(tenant, conversation_id)
        with self._indexed(topic, conversation_id) as indexed:
            self.indexes.extend(topic, indexed, time.monotonic() + DEADLINE_S)
            index = indexed.index
            return Lineage(
                topic_id=indexed.topic_id,
                base=index.forks.base,
                parent=index.forks.fork,
                fork_key=index.forks.fork_key,
                begin=index.forks.begin(),
                end=index.end,
                forks=dict(index.forks.forks),
                void=sorted(index.forks.void),
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
            raise unknown(conversation_id)
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
                self.indexes.extend(topic, indexed, time.monotonic() + DEADLINE_S, first_only=True)
            return indexed.index.forks.fork_key
        return None

    def tree(self, tenant: str, conversation_id: str) -> list[Branch]:
        """All conversations of the tree in which this one stands, in the order of their places. See `trees`."""
        first = self._parts(tenant, conversation_id, time.monotonic() + DEADLINE_S)[-1]
        at = None if first.end is None else first.base + first.end - 1
        return self.trees.tree(tenant, first.conversation_id, at)

    def holder(self, tenant: str, conversation_id: str, offset: int) -> Holder:
        """Whose topic the message at this offset stands in. Raises NotFound when none that counts is there."""
        parts = self._parts(tenant, conversation_id, time.monotonic() + DEADLINE_S, whole=True)
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

        if newest_first and (newest := self._newest(tenant, conversation_id, limit, after)) is not None:
            return newest
        found = self._page(tenant, conversation_id, limit, choose, at=after, newest_first=newest_first)
        turns = [Turn(offset=one.offset, message=one.message) for one, _ in found if one.message is not None]
        return turns[::-1] if newest_first else turns

    def outline(self, tenant: str, conversation_id: str) -> Outline:
        """What stands in it now."""
        parts = self._parts(tenant, conversation_id, time.monotonic() + DEADLINE_S, whole=True)
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

    def place(self, tenant: str, conversation_id: str) -> TopicEnd:
        """Where it stands and ends. Of one that is no fork it reads as much as `about`."""
        topic = self._topic(tenant, conversation_id)
        self.about(tenant, conversation_id)
        with self._indexed(topic, conversation_id) as indexed:
            base = indexed.index.forks.base
        if (found := self._log.places([topic]).get(topic)) is None:
            raise unknown(conversation_id)
        return found.counted_from(base)

    def tail(self, tenant: str, conversation_id: str, place: TopicEnd) -> Tail:
        """Its newest records, and those to come, as long as its topic has this id."""
        return Tail(self._log, self._codec, self._topic(tenant, conversation_id), place)

    def moved(self, seen: Mapping[tuple[str, str], TopicEnd]) -> list[tuple[str, str]]:
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
            return part.indexed.index.told(left, max(part.begin, begin - part.base), part.end_before(end))

        found = self._page(tenant, conversation_id, limit, choose, at=begin, end=end)
        return [Turn(offset=one.offset, message=one.message) for one, _ in found if one.message is not None]

    def end(self, tenant: str, conversation_id: str) -> int:
        """The offset behind its last record."""
        own = self._parts(tenant, conversation_id, time.monotonic() + DEADLINE_S)[0]
        with own.indexed.lock:
            return own.base + own.indexed.index.end

    def records(
        self, tenant: str, conversation_id: str, limit: int, *, from_offset: int = 0, end: int | None = None
    ) -> list[ConversationRecord]:
        """All records: the first `limit` from `from_offset` to before `end`. Erased ones come without their message."""

        def choose(part: _Part, left: int) -> list[int]:
            begin = max(part.begin, from_offset - part.base)
            return part.indexed.index.records(left, begin=begin, end=part.end)

        found = self._page(tenant, conversation_id, limit, choose, at=from_offset, end=end)
        return [replace(one, message=None) if erased else one for one, erased in found]

    def _page(
        self,
        tenant: str,
        conversation_id: str,
        limit: int,
        choose: Choose,
        *,
        at: int | None,
        end: int | None = None,
        newest_first: bool = False,
    ) -> list[tuple[ConversationRecord, bool]]:
        """The records that `choose` finds in each part, `limit` in all, ascending; and whether each is erased.

        They stand at or behind the offset `at`, with `newest_first` before it; and before `end`.
        """
        give_up = time.monotonic() + DEADLINE_S
        for _ in range(TRIES):
            parts = self._parts(tenant, conversation_id, give_up)
            if end is not None:
                parts = [replace(part, end=part.end_before(end)) for part in parts]
            wanted: list[tuple[_Part, list[int]]] = []
            left = limit
            for part in parts if newest_first else reversed(parts):
                if left:
                    with part.indexed.lock:
                        is_thin = part.indexed.index.is_thin
                        offsets = [] if is_thin else sorted(choose(part, left))
                    if is_thin:
                        offsets = self._choose_by_windows(part, choose, left, at, newest_first, give_up)
                    wanted.append((part, offsets))
                    left -= len(offsets)
            found = [self._read_part(part, offsets, give_up) for part, offsets in wanted]
            if all(one is not None for one in found):
                every = itertools.chain.from_iterable(filter(None, found))
                return sorted(every, key=lambda one: one[0].offset)
        raise BrokerUnavailable("the conversation changes while it is read; try again", retry_after_s=1)

    def _choose_by_windows(
        self, part: _Part, choose: Choose, left: int, at: int | None, newest_first: bool, give_up: float
    ) -> list[int]:
        """As `choose` of a part whose index is thin: windows of the log are indexed from the place on, one by one."""
        with part.indexed.lock:
            known_end = part.indexed.index.end
        begin, end = part.begin, known_end if part.end is None else min(part.end, known_end)
        if at is not None:
            begin, end = (begin, min(end, at - part.base)) if newest_first else (max(begin, at - part.base), end)
        found: list[int] = []
        while begin < end and len(found) < left:
            first, last = (max(begin, end - WINDOW), end) if newest_first else (begin, min(end, begin + WINDOW))
            index = self.indexes.window(part.topic, part.indexed, max(0, first - REPEATS_WITHIN), last, give_up)
            indexed = Indexed(part.indexed.topic_id)
            indexed.index = index
            window = replace(part, indexed=indexed, begin=first, end=last)
            found += choose(window, left - len(found))
            begin, end = (begin, first) if newest_first else (last, end)
        return sorted(found)

    def _newest(self, tenant: str, conversation_id: str, limit: int, after: int | None) -> list[Turn] | None:
        """A page of the newest messages, from the last records alone, of a long conversation that is not indexed.

        None where those do not suffice, and at the next call: the next pages need the index.
        """
        topic, give_up = self._topic(tenant, conversation_id), time.monotonic() + DEADLINE_S
        with self._indexed(topic, conversation_id) as indexed:
            index, end = indexed.index, self._log.end(topic)
            # Where others stand between, offsets do not tell how many records there are.
            if is_shared(indexed.topic_id) or indexed.was_asked or index.is_thin or index.end > end - MOST_UNINDEXED:
                return None
            indexed.was_asked = True
            self.indexes.extend(topic, indexed, give_up, first_only=True)
            base = index.forks.base
            last = end if after is None else min(end, after - base)
            first = last - 2 * limit
            if first - REPEATS_WITHIN < end - MOST_UNINDEXED:
                return None
            records = self.indexes.read_all(topic, first - REPEATS_WITHIN, end, give_up)
        window = ConversationIndex(first - REPEATS_WITHIN)
        window.extend(records, end)
        begin = max(first, window.own_begin() if window.forks.deletions else 0)
        offsets = frozenset(window.turns(limit, newest_first=True, begin=begin, end=last))
        if len(offsets) < limit:
            return None
        return [
            Turn(offset=base + one.offset, message=one.message)
            for one in reversed(records)
            if one.offset in offsets and one.message is not None
        ]

    def _read_part(
        self, part: _Part, offsets: list[int], give_up: float
    ) -> list[tuple[ConversationRecord, bool]] | None:
        """The records, at the conversation's offsets. None, and the index is gone, if compaction removed some."""
        found = self.indexes.read(part.topic, offsets, give_up)
        if [one.offset for one in found] != offsets:
            self.indexes.forget(part.topic, part.indexed)
            return None
        with part.indexed.lock:
            erased = [part.indexed.index.is_erased(one) for one in found]
        return [(replace(one, offset=part.base + one.offset), gone) for one, gone in zip(found, erased, strict=True)]

    def _parts(self, tenant: str, conversation_id: str, give_up: float, *, whole: bool = False) -> list[_Part]:
        """The topics that the conversation consists of, its own first, indexed to their ends; `whole`: none thinly.

        A fork whose parent's topic was deleted by others inherits nothing.
        """
        parts: list[_Part] = []
        name, topic_id, limit, fork_key = conversation_id, None, None, None
        while True:
            topic = self._topic(tenant, name)
            try:
                with self._indexed(topic, name) as indexed:
                    self.indexes.extend(topic, indexed, give_up)
                    if topic_id not in (None, indexed.topic_id) and not self.indexes.whole(
                        topic, indexed, give_up
                    ).index.forks.has_fork(fork_key):
                        return parts
                    if not parts and indexed.index.is_deleted():
                        raise unknown(name)
                    forks = indexed.index.forks
                    fork = forks.goes_on_from(limit)
                    begin, end = forks.begin(limit) - forks.base, None if limit is None else limit + 1 - forks.base
                    if whole:
                        indexed = self.indexes.whole(topic, indexed, give_up)
            except NotFound:
                if parts:
                    return parts
                raise
            part = _Part(conversation_id=name, topic=topic, indexed=indexed, base=forks.base, begin=begin, end=end)
            parts.append(part)
            if fork is None:
                return parts
            limit = fork.through if limit is None else min(limit, fork.through)
            name, topic_id, fork_key = fork.conversation_id, fork.topic_id, forks.fork_key

    def _perhaps_deleted(self, topic: str, indexed: Indexed, give_up: float) -> bool:
        """Whether what is not indexed yet has to be read to know."""
        if indexed.index.end == self._log.end(topic):
            return False
        return bool(self._without_last_message([topic], give_up))

    def _without_last_message(self, topics: Sequence[str], give_up: float) -> list[str]:
        """Those that do not end with a message: only they can be deleted."""
        return [
            topic
            for topic, last in self._log.last_records(topics, give_up).items()
            if last is None or last.value is None or (last.key or b"").startswith((b"deleted/", b"forked/"))
        ]

    def _topic(self, tenant: str, conversation_id: str) -> str:
        return self._names.conversation(check_tenant(tenant), check_conversation_id(conversation_id))

    @contextmanager
    def _indexed(self, topic: str, conversation_id: str) -> Generator[Indexed]:
        """The index of the current topic, locked."""
        try:
            with self.indexes.indexed(topic) as found:
                yield found
        except NotFound as error:
            raise unknown(conversation_id) from error


def unknown(conversation_id: str) -> NotFound:
    return NotFound(f"conversation {conversation_id} does not exist", param="conversation_id")
