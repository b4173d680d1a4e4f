"""All conversations that are followed: which policy each has, and which of those that are due is summed up next. Pure.

The log is the only memory: a desk that is made anew and reads the topics from where its predecessor had committed finds
the same spans due, under the same request ids, of which workers run each once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.gateway.summarizer.spans import Spans
from penstock.schemas.ids import summary_request_id
from penstock.schemas.records import ConversationFacts, ConversationMessage, SummarizePolicy


class Key(NamedTuple):
    """A conversation."""

    tenant: str
    conversation_id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Submit:
    """Sum up the conversation with this topic id through this offset."""

    key: Key
    topic_id: str
    through: int
    request_id: str
    model: str | None
    maybe_sent: bool
    """It was due when reading began: a predecessor may have sent the request, and it may have ended since."""


@dataclass(frozen=True, slots=True)
class Commit:
    """A new desk needs nothing of the conversation's topic that stands below Kafka's offset.

    `base` plus Kafka's offset is the conversation's: that of a record of a fork counts on from what it inherits.
    `failed`: where the last span ends that could not be summed up, -1 without one.
    """

    key: Key
    offset: int
    base: int = 0
    failed: int = -1


@dataclass(frozen=True, slots=True)
class ReadWhole:
    """`read_whole` must be called with what stands in the topic: records that were delivered may be gone."""

    key: Key


@dataclass(eq=False, slots=True)
class _Followed:
    """`spans` has the conversation's offsets, all others here are Kafka's."""

    topic_id: str
    spans: Spans
    base: int
    next: int
    """The offset of the next record that is news."""
    end: int
    """Below it stands what was in the topic when its reading began: before that is read nothing is due."""
    told: int
    """The offset of the last record that was delivered."""
    resumed: bool
    """It is read from where a predecessor had committed, and the summary that ends there was not seen yet."""
    awaits_whole: bool = False
    due_at_first: bool = True
    """Whenever it was looked at, it was due."""
    failed: int = -1
    """See `Commit`."""


@dataclass(eq=False, slots=True)
class SummaryScheduler:
    """`defaults`: a tenant's policy, for conversations without their own. At most `most` are summed up at once."""

    defaults: Callable[[str], SummarizePolicy]
    most: int
    _facts: dict[Key, ConversationFacts] = field(default_factory=dict[Key, ConversationFacts])
    """Those with a policy."""
    _followed: dict[Key, _Followed] = field(default_factory=dict[Key, _Followed])
    _due: OrderedDict[str, OrderedDict[Key, None]] = field(default_factory=OrderedDict[str, OrderedDict[Key, None]])
    """By tenant, the one whose turn is next first."""
    _running: dict[Key, Submit] = field(default_factory=dict[Key, Submit])

    # -- what is known

    @property
    def followed(self) -> Mapping[Key, object]:
        return self._followed

    @property
    def due(self) -> int:
        return sum(map(len, self._due.values()))

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def unread(self) -> list[Key]:
        """Conversations of which not all records have come that stood in the topic when its reading began."""
        return [key for key, one in self._followed.items() if one.next < one.end]

    def policy(self, key: Key, topic_id: str | None = None) -> SummarizePolicy:
        """The conversation's own, if it has one and that is of the topic with this Kafka id; else its tenant's."""
        facts = self._facts.get(key)
        if facts is None or facts.summarize is None or (topic_id and facts.topic_id not in (None, topic_id)):
            return self.defaults(key.tenant)
        return facts.summarize

    def wants(self, key: Key) -> bool:
        """Whether the conversation may have to be summed up by itself: by its own policy, unless that is of a former
        topic, or else by its tenant's."""
        facts = self._facts.get(key)
        own = None if facts is None else facts.summarize
        may_be_former = own is None or (facts is not None and facts.topic_id is not None)
        return (own is not None and _is_active(own)) or (may_be_former and _is_active(self.defaults(key.tenant)))

    # -- events

    def set_facts(self, key: Key, facts: ConversationFacts | None) -> None:
        """What callers set of a conversation; None when that was taken away."""
        if facts is None or facts.summarize is None:
            self._facts.pop(key, None)
        else:
            self._facts[key] = facts
        self._look(key)

    def follow(self, key: Key, topic_id: str, committed: Commit, end: int) -> None:
        """The conversation's topic is read from what was committed on, and has records below `end` now."""
        begin, base = committed.offset, committed.base
        spans = Spans(base + begin - 1 if begin else -1)
        spans.give_up(committed.failed)
        self._followed[key] = _Followed(
            topic_id, spans, base, begin, end, begin - 1, begin > 0, failed=committed.failed
        )
        self._look(key)

    def forget(self, key: Key) -> None:
        """The conversation is gone, or nobody wants it summed up."""
        self._followed.pop(key, None)
        self._look(key)

    def record(self, key: Key, offset: int, message: ConversationMessage | None) -> Commit | ReadWhole | None:
        """The next record of a conversation's topic; `message` is None for a tombstone."""
        one = self._followed.get(key)
        if one is None:
            return None
        was_cut = offset <= one.told
        one.told = offset
        if one.awaits_whole or (offset < one.next and not was_cut):
            return None
        if message is not None and message.fork is not None and message.direction in ("fork", "deleted"):
            one.base = message.fork.through + 1
        if message is None or was_cut or message.direction in ("fork", "deleted"):
            return self._ask_for_whole(key, one)
        one.next = offset + 1
        covered = one.spans.covered
        one.spans.add(one.base + offset, message)
        one.resumed = one.resumed and one.spans.base < 0
        return self._read_on(key, one, covered)

    def reached(self, key: Key, position: int) -> ReadWhole | None:
        """All records below this offset have been delivered."""
        one = self._followed.get(key)
        if one is None or one.awaits_whole or one.next >= position:
            return None
        one.next = position
        found = self._read_on(key, one, one.spans.covered)
        return found if isinstance(found, ReadWhole) else None

    def read_whole(
        self, key: Key, standing: Iterable[tuple[int, ConversationMessage]], end: int
    ) -> Commit | ReadWhole | None:
        """What stands in the conversation, in order, as it was when its topic ended at `end`."""
        one = self._followed.get(key)
        if one is None:
            return None
        if one.told >= end:  # more came while it was read, or the log has lost its end
            one.told = -1
            return ReadWhole(key)
        one.spans, one.next, one.end, one.resumed, one.awaits_whole = Spans(), end, end, False, False
        one.spans.give_up(one.failed)
        for at, message in standing:
            if at < one.base + end:  # others are news, which come by themselves
                one.spans.add(at, message)
        self._look(key)
        return self._commit(key, one)

    @staticmethod
    def _commit(key: Key, one: _Followed) -> Commit:
        return Commit(key, max(0, one.spans.covered + 1 - one.base), one.base, one.failed)

    def ended(self, submit: Submit, end: int, *, failed: bool) -> Commit | None:
        """Its request has ended. Its summary, if there is one, stands below `end`.

        One that has failed is not tried again: its span becomes part of the next. But if something of it was erased
        meanwhile it is another span, which is due by itself.
        """
        self._running.pop(submit.key, None)
        one, told = self._followed.get(submit.key), None
        if one is not None and _request_id(one, submit.through) == submit.request_id:
            one.spans.give_up(submit.through)
            one.end = max(one.end, end)
            if failed:
                one.failed = max(one.failed, submit.through)
                told = self._commit(submit.key, one)
        self._look(submit.key)
        return told

    def next(self) -> Submit | None:
        """The next one to sum up, tenants in turn; None when none is due or enough are being summed up."""
        if not self._due or len(self._running) >= self.most:
            return None
        tenant, keys = self._due.popitem(last=False)
        key, _ = keys.popitem(last=False)
        if keys:
            self._due[tenant] = keys
        one = self._followed[key]
        through = self._due_through(key, one)
        assert through is not None, "only what is due waits"
        submit = Submit(
            key=key,
            topic_id=one.topic_id,
            through=through,
            request_id=_request_id(one, through),
            model=self.policy(key, one.topic_id).model,
            maybe_sent=one.due_at_first,
        )
        one.due_at_first = False
        self._running[key] = submit
        return submit

    # -- keeping

    def _read_on(self, key: Key, one: _Followed, covered: int) -> Commit | ReadWhole | None:
        if one.resumed and one.next >= one.end:  # the summary that the predecessor had seen was erased
            return self._ask_for_whole(key, one)
        self._look(key)
        return self._commit(key, one) if one.spans.covered > covered else None

    def _ask_for_whole(self, key: Key, one: _Followed) -> ReadWhole:
        one.awaits_whole = True
        self._look(key)
        return ReadWhole(key)

    def _due_through(self, key: Key, one: _Followed) -> int | None:
        return one.spans.due(self.policy(key, one.topic_id))

    def _look(self, key: Key) -> None:
        """Whether it is due has changed, perhaps."""
        one = self._followed.get(key)
        is_due = False
        if one is not None and one.next >= one.end and not one.awaits_whole and key not in self._running:
            is_due = self._due_through(key, one) is not None
            one.due_at_first = one.due_at_first and is_due
        keys = self._due.get(key.tenant)
        if is_due:
            self._due.setdefault(key.tenant, OrderedDict())[key] = None
        elif keys is not None and key in keys:
            del keys[key]
            if not keys:
                del self._due[key.tenant]


def _is_active(policy: SummarizePolicy) -> bool:
    return (policy.every_turns or 0) > 0 or (policy.every_tokens or 0) > 0


def _request_id(one: _Followed, through: int) -> str:
    return summary_request_id(one.topic_id, one.spans.base, one.spans.offsets(through))
