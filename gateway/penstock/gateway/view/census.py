"""The census: live requests counted as they change, so that no question walks over all of them. Pure.

It holds counts of all, and entries of those alone that are in memory: see `KnownRequests`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from penstock.gateway.view.entries import Entry
from penstock.gateway.view.wait_counts import K, Kind, Lines, WaitCount, add_to
from penstock.schemas.topics import CLASSES, priority_class


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
    reason: str | None = None
    """What one that waits was last said to wait for."""
    pool: str | None = None
    """That of one that runs."""


def counted_as(entry: Entry) -> Counted:
    """As what it is to be counted now."""
    klass = priority_class(entry.priority)
    from_ms = entry.waits_from_ms if entry.waits_from_ms > entry.accepted_ms else None
    if entry.waits:
        waiting = None if entry.status is None else entry.status.waiting_for
        # What named a later time is not counted as due, and its reason is no reason of those that are.
        reason = None if waiting is None or waiting.reason == "scheduled" else waiting.reason
        return Counted(klass, (entry.task, entry.model, entry.pool), None, from_ms, None, reason)
    model, pool = (entry.model, entry.pool) if entry.status_name == "running" else (None, None)
    return Counted(klass, None, model, from_ms, entry.started_ms, pool=pool)


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


@dataclass(frozen=True, slots=True)
class Wait:
    """Requests of a class that waited from a time on, until they began to run or, if that is None, until now."""

    klass: str
    since_ms: int
    until_ms: int | None = None
    requests: int = 1


class Census:
    """Counts of live requests.

    Tell it of each change by `count`, and of each end by `forget`. `evict_to_disk` and `recall` say whose entry is in
    memory; they change no count.
    """

    def __init__(self) -> None:
        self.read_ms = 0
        """When the record was read that is counted next, by the clock that rates are asked by. What stood in the log
        at a start counts from its time there."""
        self._live: Counter[str] = Counter()
        self._live_of: Counter[tuple[str, str]] = Counter()
        self.running: Counter[tuple[str, str]] = Counter()
        """Requests that run, by model and pool; the common pool is an empty text."""
        self._begun: Counter[tuple[str, int, int]] = Counter()
        """Those that began to run, by class, since when they waited, and when they began."""
        self._by_conversation: dict[tuple[str, str], dict[str, Entry]] = {}
        self._kinds: dict[tuple[str, Kind], WaitCount] = {}
        self._by_pool: dict[tuple[str, str | None], WaitCount] = {}
        """The same by class and pool: any model may be named on the topics."""
        self.lines = Lines()

    @property
    def live_count(self) -> int:
        """Live requests of all classes."""
        return self._live.total()

    def live(self, klass: str, tenant: str | None = None) -> int:
        """Live requests of a class, of one tenant or of all."""
        return self._live[klass] if tenant is None else self._live_of[tenant, klass]

    def of_conversation(self, tenant: str, conversation_id: str) -> Mapping[str, Entry]:
        """The live requests of a conversation that are in memory, by id. It changes with them."""
        return self._by_conversation.get((tenant, conversation_id), {})

    def queue_depths(self, now_ms: int) -> tuple[dict[str, int], dict[str, float]]:
        """(requests that wait, age in seconds of the oldest) by class, without those whose time to start lies ahead."""
        depths, ages = dict.fromkeys(CLASSES, 0), dict.fromkeys(CLASSES, 0.0)
        for (klass, _), waiting in self._by_pool.items():
            depths[klass] += waiting.due(now_ms)
            if (since_ms := waiting.since_ms) is not None:
                ages[klass] = max(ages[klass], (now_ms - since_ms) / 1000)
        return depths, ages

    def depths_by_pool(self, now_ms: int) -> dict[tuple[str, str | None], int]:
        """Requests that wait, by class and pool, without those whose time to start lies ahead."""
        return {place: waiting.due(now_ms) for place, waiting in self._by_pool.items()}

    def waits(self) -> list[Wait]:
        """For the history: what waits, and how long those waited that began to run and have not ended."""
        found = [Wait(*begun, requests=count) for begun, count in self._begun.items() if begun[1]]
        for (klass, _), waiting in self._by_pool.items():
            found += [Wait(klass, age.since_ms, requests=age.requests) for age in waiting.ages.values() if age.requests]
        return found

    def waiting_by_class(self, now_ms: int) -> Iterator[tuple[str, Waiting]]:
        """What waits, by class and kind, without what may not start yet. Take them before anything changes."""
        for (klass, (task, model, pool)), one in self._kinds.items():
            if requests := one.due(now_ms):
                yield klass, Waiting(task=task, model=model, pool=pool, requests=requests, since_ms=one.since_ms)

    def waiting(self, now_ms: int) -> Iterator[Waiting]:
        """What waits, by kind, without what may not start yet. Take them before anything changes."""
        for klass, kind in self._kinds:
            same = [one for name in CLASSES if (one := self._kinds.get((name, kind))) is not None]
            if same[0] is not self._kinds[klass, kind]:
                continue  # reported with the first of its classes
            due = [(count, one.since_ms) for one in same if (count := one.due(now_ms))]
            if due:
                task, model, pool = kind
                since_ms = min((since for _, since in due if since is not None), default=None)
                requests = sum(count for count, _ in due)
                yield Waiting(task=task, model=model, pool=pool, requests=requests, since_ms=since_ms)

    # -- what changes

    def count(self, entry: Entry) -> None:
        """The entry is live, and may be new or have changed."""
        self.enlist(entry)
        now = (counted_as(entry), entry.accepted_ms)
        before = entry.counted
        if now == before:
            return
        entry.counted = now
        if before is None:
            self.add(entry.tenant, *now)
            self._moved(entry, None, now[0])
        elif before[1] == now[1] and before[0] == now[0]._replace(reason=before[0].reason):
            klass, kind, reason = now[0].klass, now[0].kind, now[0].reason
            assert kind is not None, "what does not wait has no reason"
            self.lines.other_reason((entry.tenant, klass, kind), before[0].reason, reason)
        else:
            self.add(entry.tenant, *before, -1)
            self.add(entry.tenant, *now)
            self._moved(entry, before[0], now[0])

    def forget(self, entry: Entry) -> None:
        """The entry is not live any more."""
        if entry.counted is not None:
            self.add(entry.tenant, *entry.counted, -1)
            self._moved(entry, entry.counted[0], None)
            self.evict_to_disk(entry)

    def _moved(self, entry: Entry, before: Counted | None, now: Counted | None) -> None:
        """Count that it left a line, or came to one."""
        tenant = entry.tenant
        from_id = None if before is None or before.kind is None else (tenant, before.klass, before.kind)
        to_id = None if now is None or now.kind is None else (tenant, now.klass, now.kind)
        if from_id == to_id:
            return
        if from_id is not None and to_id is None and from_id[2][1] is None and entry.model is not None:
            # It left the choice of its model, and began at once with the one that was chosen.
            chosen = (tenant, from_id[1], (entry.task, entry.model, entry.pool))
            self.lines.moved(from_id, chosen, self.read_ms)
            from_id = chosen
        self.lines.moved(from_id, to_id, self.read_ms)

    def add(self, tenant: str, state: Counted, accepted_ms: int, count: int = 1) -> None:
        """So many more requests of a tenant, or less, are counted as this."""
        klass, kind, model, from_ms, started_ms, reason, pool = state
        self._live[klass] += count
        add_to(self._live_of, (tenant, klass), count)
        if kind is not None:
            since_ms, later = from_ms or accepted_ms, from_ms is not None
            _add(self._kinds, (klass, kind), since_ms, count, later=later)
            _add(self._by_pool, (klass, kind[2]), since_ms, count, later=later)
            self.lines.add((tenant, klass, kind), since_ms, count, later=later, reason=reason)
        elif model is not None:
            add_to(self.running, (model, pool or ""), count)
        if started_ms:
            add_to(self._begun, (klass, from_ms or accepted_ms, started_ms), count)

    def evict_to_disk(self, entry: Entry) -> None:
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
        self.enlist(entry)

    def enlist(self, entry: Entry) -> None:
        """The entry of one that is counted is in memory: its conversation has it."""
        if entry.conversation_id is not None and not entry.listed:
            self._by_conversation.setdefault((entry.tenant, entry.conversation_id), {})[entry.request_id] = entry
            entry.listed = True


def _add(counts: dict[K, WaitCount], key: K, since_ms: int, count: int, *, later: bool) -> None:
    """As `WaitCount.add`; what is 0 is not held."""
    if (waiting := counts.get(key)) is None:
        waiting = counts[key] = WaitCount()
    waiting.add(since_ms, count, later=later)
    if not waiting.requests:
        del counts[key]
