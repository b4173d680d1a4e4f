"""The census: live requests counted as they change, so that no question walks over all of them. Pure.

It holds counts of all, and entries of those alone that are in memory: see `KnownRequests`.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from penstock.gateway.view.entries import Entry
from penstock.schemas.topics import CLASSES, priority_class

Kind = tuple[str, str | None, str | None]
"""(task, model that was asked for or chosen, pool)"""

MOST_EMPTY = 50
AGES_MS = 1_000
"""Requests that were accepted within so long of each other are of one age."""


class Counted(NamedTuple):
    """As what a live request is counted."""

    klass: str
    kind: Kind | None
    """That of one that waits."""
    model: str | None
    """That of one that runs."""
    from_ms: int | None = None
    """When it may start, if that is later than it was accepted."""
    started_ms: int | None = None
    """When one that does not wait began to run."""


def counted_as(entry: Entry) -> Counted:
    """As what it is to be counted now."""
    klass = priority_class(entry.priority)
    from_ms = entry.waits_from_ms if entry.waits_from_ms > entry.accepted_ms else None
    if entry.waits:
        return Counted(klass, (entry.task, entry.model, entry.pool), None, from_ms)
    return Counted(klass, None, entry.model if entry.status_name == "running" else None, from_ms, entry.started_ms)


@dataclass(frozen=True, kw_only=True, slots=True)
class Waiting:
    """Requests of one kind that wait. `since_ms`: when the oldest was accepted, or might have started if that is later;
    None if that is not known.
    """

    task: str
    model: str | None
    pool: str | None
    requests: int
    since_ms: int | None

    @property
    def kind(self) -> Kind:
        return self.task, self.model, self.pool


@dataclass(slots=True)
class _Age:
    """Requests of one age."""

    since_ms: int
    """When the first of them was accepted."""
    requests: int = 0


@dataclass(slots=True)
class _Waiting:
    """Requests of one kind and class that wait."""

    requests: int = 0
    ages: dict[int, _Age] = field(default_factory=dict[int, _Age])
    oldest: list[int] = field(default_factory=list[int])
    """A heap of the keys of `ages`."""
    empty: int = 0
    """Ages of which none waits any more."""
    later: Counter[int] = field(default_factory=Counter[int])
    """By second since the epoch, those that may not start before."""

    def add(self, since_ms: int, count: int, *, later: bool) -> None:
        """More of them, or less, that wait since then; the time is 0 if it is not known. `later`: they named it."""
        self.requests += count
        if not since_ms:
            return
        number = since_ms // AGES_MS
        if later:
            _add(self.later, number, count)
        age = self.ages.get(number)
        if age is None:
            age = self.ages[number] = _Age(since_ms)
            heapq.heappush(self.oldest, number)
        elif not age.requests:
            age.since_ms = since_ms
            self.empty -= 1
        elif count > 0:
            age.since_ms = min(age.since_ms, since_ms)
        age.requests += count
        if not age.requests:
            self.empty += 1
            if self.empty > len(self.ages) // 2 + MOST_EMPTY:
                self.ages = {number: age for number, age in self.ages.items() if age.requests}
                self.oldest, self.empty = sorted(self.ages), 0

    def due(self, now_ms: int) -> int:
        """Those that might have started by now."""
        return self.requests - sum(count for number, count in self.later.items() if number > now_ms // AGES_MS)

    @property
    def since_ms(self) -> int | None:
        """Since when the oldest waits, or not a second before that."""
        while self.oldest:
            age = self.ages[self.oldest[0]]
            if age.requests:
                return age.since_ms
            del self.ages[heapq.heappop(self.oldest)]
            self.empty -= 1
        return None


@dataclass(frozen=True, slots=True)
class Wait:
    """Requests of a class that waited from a time on, until they began to run or, if that is None, until now."""

    klass: str
    since_ms: int
    until_ms: int | None = None
    requests: int = 1


class Census:
    """Counts of live requests.

    Tell it of each change by `count`, and of each end by `forget`. `put_aside` and `recall` say whose entry is in
    memory; they change no count.
    """

    def __init__(self) -> None:
        self._live: Counter[str] = Counter()
        self._live_of: Counter[tuple[str, str]] = Counter()
        self.running: Counter[str] = Counter()
        """Requests that run, by model."""
        self._begun: Counter[tuple[str, int, int]] = Counter()
        """Those that began to run, by class, since when they waited, and when they began."""
        self._by_conversation: dict[tuple[str, str], dict[str, Entry]] = {}
        self._kinds: dict[tuple[str, Kind], _Waiting] = {}

    def live(self, klass: str, tenant: str | None = None) -> int:
        """Live requests of a class, of one tenant or of all."""
        return self._live[klass] if tenant is None else self._live_of[tenant, klass]

    def of_conversation(self, tenant: str, conversation_id: str) -> Mapping[str, Entry]:
        """The live requests of a conversation that are in memory, by id. It changes with them."""
        return self._by_conversation.get((tenant, conversation_id), {})

    def queue_depths(self, now_ms: int) -> tuple[dict[str, int], dict[str, float]]:
        """(requests that wait, age in seconds of the oldest) by class, without those whose time to start lies ahead."""
        depths, ages = dict.fromkeys(CLASSES, 0), dict.fromkeys(CLASSES, 0.0)
        for (klass, _), waiting in self._kinds.items():
            depths[klass] += waiting.due(now_ms)
            if (since_ms := waiting.since_ms) is not None:
                ages[klass] = max(ages[klass], (now_ms - since_ms) / 1000)
        return depths, ages

    def depths_by_pool(self, now_ms: int) -> dict[tuple[str, str | None], int]:
        """Requests that wait, by class and pool, without those whose time to start lies ahead."""
        depths: Counter[tuple[str, str | None]] = Counter()
        for (klass, (_, _, pool)), waiting in self._kinds.items():
            depths[klass, pool] += waiting.due(now_ms)
        return depths

    def waits(self) -> list[Wait]:
        """For the history: what waits, and how long those waited that began to run and have not ended."""
        found = [Wait(*begun, requests=count) for begun, count in self._begun.items() if begun[1]]
        for (klass, _), waiting in self._kinds.items():
            found += [Wait(klass, age.since_ms, requests=age.requests) for age in waiting.ages.values() if age.requests]
        return found

    def waiting(self, now_ms: int) -> list[Waiting]:
        """What waits, by kind, without what may not start yet."""
        found: dict[Kind, Waiting] = {}
        for (_, kind), waiting in self._kinds.items():
            if not (due := waiting.due(now_ms)):
                continue
            so_far, since_ms = found.get(kind), waiting.since_ms
            if so_far is not None and so_far.since_ms is not None:
                since_ms = so_far.since_ms if since_ms is None else min(since_ms, so_far.since_ms)
            task, model, pool = kind
            requests = due + (0 if so_far is None else so_far.requests)
            found[kind] = Waiting(task=task, model=model, pool=pool, requests=requests, since_ms=since_ms)
        return list(found.values())

    # -- what changes

    def count(self, entry: Entry) -> None:
        """The entry is live, and may be new or have changed."""
        self._list(entry)
        now = (counted_as(entry), entry.accepted_ms)
        before = entry.counted
        if now == before:
            return
        if before is not None:
            self.add(entry.tenant, *before, -1)
        entry.counted = now
        self.add(entry.tenant, *now)

    def forget(self, entry: Entry) -> None:
        """The entry is not live any more."""
        if entry.counted is not None:
            self.add(entry.tenant, *entry.counted, -1)
            self.put_aside(entry)

    def add(self, tenant: str, state: Counted, accepted_ms: int, count: int = 1) -> None:
        """So many more requests of a tenant, or less, are counted as this."""
        klass, kind, model, from_ms, started_ms = state
        self._live[klass] += count
        _add(self._live_of, (tenant, klass), count)
        if kind is not None:
            if (waiting := self._kinds.get((klass, kind))) is None:
                waiting = self._kinds[klass, kind] = _Waiting()
            waiting.add(from_ms or accepted_ms, count, later=from_ms is not None)
            if not waiting.requests:
                del self._kinds[klass, kind]
        elif model is not None:
            _add(self.running, model, count)
        if started_ms:
            _add(self._begun, (klass, from_ms or accepted_ms, started_ms), count)

    def put_aside(self, entry: Entry) -> None:
        """The entry is not in memory any more."""
        entry.counted = None
        if entry.listed and entry.conversation_id is not None:
            turns = self._by_conversation[entry.tenant, entry.conversation_id]
            turns.pop(entry.request_id, None)
            if not turns:
                del self._by_conversation[entry.tenant, entry.conversation_id]
            entry.listed = False

    def recall(self, entry: Entry) -> None:
        """The entry of one that is counted is in memory again."""
        entry.counted = (counted_as(entry), entry.accepted_ms)
        self._list(entry)

    def _list(self, entry: Entry) -> None:
        if entry.conversation_id is not None and not entry.listed:
            self._by_conversation.setdefault((entry.tenant, entry.conversation_id), {})[entry.request_id] = entry
            entry.listed = True


K = TypeVar("K", bound=Hashable)


def _add(counts: Counter[K], key: K, count: int) -> None:
    counts[key] += count
    if not counts[key]:
        del counts[key]
