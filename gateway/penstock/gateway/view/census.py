"""The census: live requests counted and ordered as they change, so that no question walks over all of them."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from penstock.gateway.view.entries import Entry
from penstock.schemas.records import STATUS_RANKS
from penstock.schemas.topics import CLASSES, priority_class

K = TypeVar("K")
Kind = tuple[str, str | None, str | None]
"""(task, model that was asked for or chosen, pool)"""
Counted = tuple[str, Kind | str, int, str]
"""How an entry is counted: (waiting, running or other; kind or model; when it was accepted, if it waits; class)."""

RUNNING = STATUS_RANKS["running"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Waiting:
    """Requests of one kind that wait. `since_ms`: when the oldest was accepted; None if that is not known."""

    task: str
    model: str | None
    pool: str | None
    requests: int
    since_ms: int | None


@dataclass(slots=True)
class _Waiting:
    """Requests of one kind and class that wait."""

    requests: int = 0
    oldest: list[tuple[int, int, Entry]] = field(default_factory=list[tuple[int, int, Entry]])
    """A heap of (accepted_ms, number, entry) of all that wait, and of some that wait no longer."""


class Census:
    """Counts of live entries. Tell it of each change by `count`, and of each end by `forget`."""

    def __init__(self) -> None:
        self._waiting: dict[str, int] = dict.fromkeys(CLASSES, 0)
        self._live: Counter[str] = Counter()
        self._live_of: Counter[tuple[str, str]] = Counter()
        self._running: Counter[str] = Counter()
        self._by_tenant: dict[str, dict[str, Entry]] = {}
        self._by_conversation: dict[tuple[str, str], dict[str, Entry]] = {}
        self._kinds: dict[tuple[str, Kind], _Waiting] = {}
        self._number = itertools.count()

    @property
    def running(self) -> Mapping[str, int]:
        """Requests that run, by model."""
        return self._running

    def live(self, klass: str, tenant: str | None = None) -> int:
        """Live requests of a class, of one tenant or of all."""
        return self._live[klass] if tenant is None else self._live_of[tenant, klass]

    def of_tenant(self, tenant: str) -> list[Entry]:
        """The tenant's live requests."""
        return list(self._by_tenant.get(tenant, {}).values())

    def of_conversation(self, tenant: str, conversation_id: str) -> list[Entry]:
        """The live requests of a conversation."""
        return list(self._by_conversation.get((tenant, conversation_id), {}).values())

    def queue_depths(self, now_ms: int) -> tuple[dict[str, int], dict[str, float]]:
        """(requests that wait, age in seconds of the oldest) by class."""
        ages = dict.fromkeys(CLASSES, 0.0)
        for (klass, kind), waiting in self._kinds.items():
            if (since_ms := _since_ms(waiting, klass, kind)) is not None:
                ages[klass] = max(ages[klass], (now_ms - since_ms) / 1000)
        return dict(self._waiting), ages

    def waiting(self) -> list[Waiting]:
        """What waits, by kind."""
        found: dict[Kind, Waiting] = {}
        for (klass, kind), waiting in self._kinds.items():
            so_far, since_ms = found.get(kind), _since_ms(waiting, klass, kind)
            if so_far is not None and so_far.since_ms is not None:
                since_ms = so_far.since_ms if since_ms is None else min(since_ms, so_far.since_ms)
            task, model, pool = kind
            requests = waiting.requests + (0 if so_far is None else so_far.requests)
            found[kind] = Waiting(task=task, model=model, pool=pool, requests=requests, since_ms=since_ms)
        return list(found.values())

    def count(self, entry: Entry) -> None:
        """The entry is live, and may be new or have changed."""
        if entry.conversation_id is not None and not entry.listed:
            self._by_conversation.setdefault((entry.tenant, entry.conversation_id), {})[entry.request_id] = entry
            entry.listed = True
        status = entry.status
        klass = priority_class(entry.priority)
        if status is None or status.rank < RUNNING:
            now = ("waiting", (entry.task, entry.model, entry.pool), entry.accepted_ms, klass)
        elif status.status == "running" and entry.model is not None:
            now = ("running", entry.model, 0, klass)
        else:
            now = ("other", "", 0, klass)
        before = entry.counted
        if now == before:
            return
        if before is None:
            self._by_tenant.setdefault(entry.tenant, {})[entry.request_id] = entry
        else:
            self._take_out(before, entry)
        entry.counted = now
        self._put_in(now, entry)

    def forget(self, entry: Entry) -> None:
        """The entry is not live any more."""
        if entry.counted is None:
            return
        self._take_out(entry.counted, entry)
        entry.counted = None
        _take_from(self._by_tenant, entry.tenant, entry.request_id)
        if entry.listed and entry.conversation_id is not None:
            _take_from(self._by_conversation, (entry.tenant, entry.conversation_id), entry.request_id)
            entry.listed = False

    def _put_in(self, state: Counted, entry: Entry) -> None:
        _, name, accepted_ms, klass = state
        self._live[klass] += 1
        self._live_of[entry.tenant, klass] += 1
        if isinstance(name, tuple):
            self._waiting[klass] += 1
            if (waiting := self._kinds.get((klass, name))) is None:
                waiting = self._kinds[klass, name] = _Waiting()
            waiting.requests += 1
            if accepted_ms:
                heapq.heappush(waiting.oldest, (accepted_ms, next(self._number), entry))
                if len(waiting.oldest) > 2 * waiting.requests + 100:
                    _forget_others(waiting, klass, name)
        elif name:
            self._running[name] += 1

    def _take_out(self, state: Counted, entry: Entry) -> None:
        _, name, _, klass = state
        self._live[klass] -= 1
        self._live_of[entry.tenant, klass] -= 1
        if not self._live_of[entry.tenant, klass]:
            del self._live_of[entry.tenant, klass]
        if isinstance(name, tuple):
            self._waiting[klass] -= 1
            waiting = self._kinds[klass, name]
            waiting.requests -= 1
            if not waiting.requests:
                del self._kinds[klass, name]
        elif name:
            self._running[name] -= 1
            if not self._running[name]:
                del self._running[name]


def _forget_others(waiting: _Waiting, klass: str, kind: Kind) -> None:
    """Drop those that wait no longer from the heap."""
    heap = waiting.oldest
    heap[:] = [item for item in heap if item[2].counted == ("waiting", kind, item[0], klass)]
    heapq.heapify(heap)


def _since_ms(waiting: _Waiting, klass: str, kind: Kind) -> int | None:
    """When the oldest of them was accepted."""
    heap = waiting.oldest
    while heap and heap[0][2].counted != ("waiting", kind, heap[0][0], klass):
        heapq.heappop(heap)
    return heap[0][0] if heap else None


def _take_from(groups: dict[K, dict[str, Entry]], name: K, request_id: str) -> None:
    group = groups[name]
    group.pop(request_id, None)
    if not group:
        del groups[name]
