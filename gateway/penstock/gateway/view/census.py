"""The census: live requests counted and ordered as they change, so that no question walks over all of them."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Mapping
from typing import TypeVar

from penstock.gateway.view.entries import Entry
from penstock.schemas.records import STATUS_RANKS
from penstock.schemas.topics import CLASSES, priority_class

K = TypeVar("K")
Counted = tuple[str, str, int, str]
"""How an entry is counted: (waiting, running or other; class or model; when it was accepted, if it waits; class)."""

RUNNING = STATUS_RANKS["running"]


class Census:
    """Counts of live entries. Tell it of each change by `count`, and of each end by `forget`."""

    def __init__(self) -> None:
        self._waiting: dict[str, int] = dict.fromkeys(CLASSES, 0)
        self._live: Counter[str] = Counter()
        self._live_of: Counter[tuple[str, str]] = Counter()
        self._running: Counter[str] = Counter()
        self._by_tenant: dict[str, dict[str, Entry]] = {}
        self._by_conversation: dict[tuple[str, str], dict[str, Entry]] = {}
        # (accepted_ms, number, entry) of all that wait, and of some that wait no longer.
        self._oldest: dict[str, list[tuple[int, int, Entry]]] = {name: [] for name in CLASSES}
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
        return dict(self._waiting), {name: self._oldest_age_s(name, now_ms) for name in CLASSES}

    def count(self, entry: Entry) -> None:
        """The entry is live, and may be new or have changed."""
        if entry.conversation_id is not None and not entry.listed:
            self._by_conversation.setdefault((entry.tenant, entry.conversation_id), {})[entry.request_id] = entry
            entry.listed = True
        status = entry.status
        klass = priority_class(entry.priority)
        if status is None or status.rank < RUNNING:
            now = ("waiting", klass, entry.accepted_ms, klass)
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
        kind, name, accepted_ms, klass = state
        self._live[klass] += 1
        self._live_of[entry.tenant, klass] += 1
        if kind == "running":
            self._running[name] += 1
        elif kind == "waiting":
            self._waiting[name] += 1
            if accepted_ms:
                self._remember(name, accepted_ms, entry)

    def _take_out(self, state: Counted, entry: Entry) -> None:
        kind, name, _, klass = state
        self._live[klass] -= 1
        self._live_of[entry.tenant, klass] -= 1
        if not self._live_of[entry.tenant, klass]:
            del self._live_of[entry.tenant, klass]
        if kind == "running":
            self._running[name] -= 1
            if not self._running[name]:
                del self._running[name]
        elif kind == "waiting":
            self._waiting[name] -= 1

    def _remember(self, klass: str, accepted_ms: int, entry: Entry) -> None:
        heap = self._oldest[klass]
        heapq.heappush(heap, (accepted_ms, next(self._number), entry))
        if len(heap) > 2 * self._waiting[klass] + 1_000:
            heap[:] = [item for item in heap if item[2].counted == ("waiting", klass, item[0], klass)]
            heapq.heapify(heap)

    def _oldest_age_s(self, klass: str, now_ms: int) -> float:
        heap = self._oldest[klass]
        while heap and heap[0][2].counted != ("waiting", klass, heap[0][0], klass):
            heapq.heappop(heap)
        return (now_ms - heap[0][0]) / 1000 if heap else 0.0


def _take_from(groups: dict[K, dict[str, Entry]], name: K, request_id: str) -> None:
    group = groups[name]
    group.pop(request_id, None)
    if not group:
        del groups[name]
