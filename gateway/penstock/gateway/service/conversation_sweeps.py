"""Sweeps of conversations: those that nobody has touched for as long as their tenant keeps them are deleted, in pace.

A sweep keeps nothing between two gateways or two runs: what is due stands in Kafka, and each deletion looks again.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from penstock.common.clock import now_ms
from penstock.gateway.conversations.pages import Conversations
from penstock.gateway.limits.retention import Expiring, Key, Retention, expiring, last_active_ms
from penstock.gateway.service.conversation_facts import FactsOfConversations
from penstock.gateway.service.deleting import Deleting
from penstock.gateway.service.turns import Turns
from penstock.gateway.threads import Threads
from penstock.gateway.view.follower import Follower
from penstock.schemas.errors import BrokerUnavailable, PenstockError
from penstock.schemas.times import rfc3339
from penstock.schemas.topics import TopicNames

logger = logging.getLogger(__name__)

AGAIN_S = 60.0
"""After a sweep that failed."""
AT_ONCE = 200
"""Conversations whose last records and facts are read in one go."""
MOST_FAILURES = 3
"""In a row, until the broker is taken to be away."""
STRAY_MS = 600_000
"""A turn whose worker was killed may write anew what that one left, under the same key: it has so long for it."""
SHOWN = 1_000
"""At most so many conversations are named in an answer."""


class Topics(Protocol):
    """See `Layout`."""

    @property
    def is_shared(self) -> bool: ...
    def times_of(self, wants: Callable[[str], bool]) -> dict[Key, int | None]: ...
    def topic_ids(self, topics: Sequence[str]) -> dict[str, str]: ...
    def take_back(self, before_ms: int) -> int: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """What a look at all conversations with a retention found."""

    expiring: Sequence[Expiring]
    busy: frozenset[Key] = frozenset()
    """Those of them that have an open request, and stay while it is open."""
    unfinished: Sequence[Key] = ()
    """Deleted ones whose topic is there: forks need it, or a deletion was cut off."""
    ageless: Mapping[Key, str] = field(default_factory=dict[Key, str])
    """Those without records and facts, with Kafka's ids of their topics: nobody knows how old they are."""

    def to_json(self, *, dry_run: bool, retention: Retention) -> dict[str, Any]:
        return {
            "object": "conversation.sweep",
            "dry_run": dry_run,
            "conversations": len(self.expiring),
            "data": [
                {
                    "tenant": one.tenant,
                    "conversation_id": one.conversation_id,
                    "last_active_at": rfc3339(one.last_active_ms),
                    "expires_at": rfc3339(one.expires_ms),
                    "retention_s": (retention.kept_ms(one.tenant) or 0) / 1000,
                    "open_request": (one.tenant, one.conversation_id) in self.busy,
                }
                for one in self.expiring[:SHOWN]
            ],
        }


class ConversationSweeps:
    """Used on one event loop. `counts` is for metrics."""

    def __init__(
        self,
        deleting: Deleting,
        conversations: Conversations,
        facts: FactsOfConversations,
        turns: Turns,
        follower: Follower,
        topics: Topics,
        names: TopicNames,
        threads: Threads,
        retention: Retention,
        *,
        every_s: float,
        per_minute: int,
        clock: Callable[[], int] = now_ms,
    ) -> None:
        self._deleting = deleting
        self._conversations = conversations
        self._facts = facts
        self._turns = turns
        self._follower = follower
        self._topics = topics
        self._names = names
        self._threads = threads
        self.retention = retention
        self._every_s = every_s
        self._pause_s = 60 / per_minute
        self._clock = clock
        self._asked = asyncio.Event()
        self.counts: Counter[str] = Counter(expired=0, stayed=0, failed=0)
        """Conversations that sweeps deleted; those that were due and stayed; what failed and is tried again."""
        self.due = 0
        """Conversations that the sweep under way has still to look at."""
        self._looked_at = set[Key]()
        """Deleted ones whose topics stay for their forks: the deletion of the last fork removes it."""

    def ask(self) -> None:
        self._asked.set()

    async def run(self) -> None:
        """Sweep every so often and when it is asked for, until it is cancelled. Gateways do not begin together."""
        if not self.retention.is_on and not self._topics.is_shared:
            return
        wait_s = self._every_s
        while True:
            await self._wait(wait_s * random.uniform(0.5, 1.0))
            wait_s = self._every_s
            try:
                await self.sweep()
            except PenstockError as error:
                self._failed()
                logger.warning("conversations.not_swept error=%s reason=%s", error.code, error)
                wait_s = min(AGAIN_S, self._every_s or AGAIN_S)
            except Exception:
                self._failed()
                logger.exception("conversations.not_swept")

    def _failed(self) -> None:
        self.counts["failed"] += 1
        self.due = 0

    async def _wait(self, seconds: float) -> None:
        """Until then (0: for ever), or until a sweep is asked for."""
        try:
            async with asyncio.timeout(seconds or None):
                await self._asked.wait()
        except TimeoutError:
            return
        self._asked.clear()

    async def sweep(self) -> None:
        """Delete what is due, at the set pace, and what no conversation holds. Raises BrokerUnavailable; the next sweep
        goes on."""
        strays = await self._threads.conversations.run(self._topics.take_back, self._clock() - STRAY_MS)
        if strays:
            logger.info("conversations.taken_back records=%d", strays)
        if self.retention.is_on:
            await self._expire_due()

    async def _expire_due(self) -> None:
        look = await self.look()
        self._looked_at &= set(look.unfinished)
        await self._each([key for key in look.unfinished if key not in self._looked_at], self._finish)
        due = [(one.tenant, one.conversation_id) for one in look.expiring]
        random.shuffle(due)  # two gateways that sweep at a time do not try for the same ones
        self.due, before = len(due), self.counts["expired"]
        await self._each(due, self._expire)
        self.due = 0
        if due:
            logger.info("conversations.swept due=%d expired=%d", len(due), self.counts["expired"] - before)
        await self._each(look.ageless, lambda key: self._facts.begin_clock(*key, look.ageless[key]))

    async def _finish(self, key: Key) -> None:
        await self._deleting.finish(*key)
        self._looked_at.add(key)

    async def _expire(self, key: Key) -> None:
        began = time.monotonic()
        gone = await self._deleting.expire(*key)
        self.counts["expired" if gone else "stayed"] += 1
        self.due -= 1
        await asyncio.sleep(began + self._pause_s - time.monotonic())

    async def _each(self, keys: Iterable[Key], work: Callable[[Key], Awaitable[None]]) -> None:
        """One after the other. One that fails is left to the next sweep. Raises its error if more fail in a row."""
        failures = 0
        for key in keys:
            try:
                await work(key)
            except PenstockError as error:
                failures += 1
                if failures == MOST_FAILURES:
                    raise
                self.counts["failed"] += 1
                logger.warning("conversations.one_not_swept error=%s reason=%s", error.code, error)
            else:
                failures = 0

    async def look(self, within_ms: int = 0) -> Look:
        """What is due now, or is so within a time if nobody touches it. Raises BrokerUnavailable."""
        ready = self._follower.readiness()
        if (reason := ready.reason or ready.lacks) is not None:
            raise BrokerUnavailable(f"open requests are not known: {reason}", retry_after_s=1)
        records = await self._threads.conversations.run(self._topics.times_of, self._has_retention)
        until_ms = self._clock() + within_ms
        asked = {key: time_ms for key, time_ms in records.items() if self._may_expire(key[0], time_ms, until_ms)}
        deleted, changed, ageless = set[Key](), dict[Key, int](), dict[Key, str]()
        for tenant, listed in _by_tenant(records).items():
            for start in range(0, len(listed), AT_ONCE):
                some = listed[start : start + AT_ONCE]
                found = await self._threads.conversations.run_for(tenant, self._conversations.deleted, tenant, some)
                deleted |= {(tenant, one) for one in found}
                wanted = [one for one in some if (tenant, one) in asked and one not in found]
                facts = await self._facts.of_some(tenant, wanted) if wanted else {}
                changed |= {(tenant, name): one.updated_at for name, one in facts.items()}
                without = [one for one in wanted if records[tenant, one] is None and one not in facts]
                topics = {self._names.conversation(tenant, one): (tenant, one) for one in without}
                ids = await self._threads.conversations.run_for(tenant, self._topics.topic_ids, list(topics))
                ageless |= {topics[topic]: topic_id for topic, topic_id in ids.items()}
        active = {
            key: at
            for key, record_ms in asked.items()
            if key not in deleted and (at := last_active_ms(record_ms, changed.get(key))) is not None
        }
        due = expiring(active, self.retention, until_ms)
        return Look(expiring=due, busy=await self._busy(due), unfinished=sorted(deleted), ageless=ageless)

    def _has_retention(self, tenant: str) -> bool:
        return self.retention.kept_ms(tenant) is not None

    def _may_expire(self, tenant: str, record_ms: int | None, until_ms: int) -> bool:
        """As far as its records say."""
        expires_ms = self.retention.expires_ms(tenant, record_ms or 0)
        return expires_ms is not None and expires_ms <= until_ms

    async def _busy(self, due: Sequence[Expiring]) -> frozenset[Key]:
        busy: set[Key] = set()
        for number, one in enumerate(due[:SHOWN]):
            if number % AT_ONCE == 0:
                await asyncio.sleep(0)  # others have their turn on the loop
            if await self._turns.any_lives(one.tenant, one.conversation_id):
                busy.add((one.tenant, one.conversation_id))
        return frozenset(busy)


def _by_tenant(records: Mapping[Key, int | None]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for tenant, conversation_id in sorted(records):
        found.setdefault(tenant, []).append(conversation_id)
    return found
