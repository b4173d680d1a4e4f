"""What requests used, by day, tenant, model and key: counted from the outcomes that a view folds. Pure.

A share is what was counted on one partition of the result topic. It holds the offset up to which it counts, so of two
shares the one with the higher offset holds all of the other. Any number of gateways count and publish the same
outcomes (docs/decisions/0098).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from itertools import islice
from typing import Any, NamedTuple

from penstock.schemas.records import ResultEvent, UsageShare, UsageTotal, fields_of

OUTCOMES = ("completed", "failed", "cancelled", "expired", "dead_lettered")
AMOUNTS = tuple(fields_of(UsageShare))[3:]
"""In the order of `Share`; the outcomes stand first."""
EARLIER = -1
"""In place of a partition: what was counted on an earlier result topic."""
OPEN_DAYS = 7
"""Days whose shares stay in memory. Of older ones only the totals are kept: no log holds their outcomes."""
FILE_DAYS = 30
"""Days that stay in the file: it may hold totals that were not published when a gateway went away."""
_ZERO = (0,) * len(AMOUNTS)
_AT = {outcome: at for at, outcome in enumerate(OUTCOMES)}

Share = list[int]
"""`through`, `last_at` and the amounts."""
Amounts = Sequence[int]


class RowKey(NamedTuple):
    """`model` and `key_id` are empty where there is none."""

    day: str
    tenant: str
    model: str
    key_id: str


@dataclass(slots=True)
class _Row:
    shares: dict[int, Share] = field(default_factory=dict[int, Share])
    total: list[int] = field(default_factory=lambda: [*_ZERO])

    def put(self, partition: int, share: Share) -> bool:
        """Take a share that holds more than the known one; whether it does."""
        known = self.shares.get(partition)
        if known is not None and known[0] >= share[0]:
            return False
        before = _ZERO if known is None else known[2:]
        self.shares[partition] = share
        self.total = [all_ + new - old for all_, new, old in zip(self.total, share[2:], before, strict=True)]
        return True

    def forget_earlier(self) -> None:
        """`topics reconcile` has translated a record, which is on the topic before that."""
        if (known := self.shares.pop(EARLIER, None)) is not None:
            self.total = [all_ - old for all_, old in zip(self.total, known[2:], strict=True)]


@dataclass(slots=True)
class _Unordered:
    """What is counted of outcomes that come in any order: those from `base` on, which does not change meanwhile."""

    base: Share
    added: Share


@lru_cache(64)
def _day(number: int) -> str:
    return datetime.fromtimestamp(number * 86_400, UTC).date().isoformat()


def day_of(at_ms: int, days_before: int = 0) -> str:
    """The UTC day of a time, or one before it."""
    return _day(at_ms // 86_400_000 - days_before)


def amounts_of(event: ResultEvent) -> list[int]:
    """What one outcome adds."""
    amounts = [*_ZERO]
    if event.status in _AT:
        amounts[_AT[event.status]] = 1
    if (usage := event.usage) is not None:
        tokens, pixels = usage.prompt_tokens, usage.pixels or 0
        images = len((event.output or {}).get("images", ())) if pixels else 0
        embedded = tokens if event.task == "embedding" else 0
        amounts[5:11] = tokens, usage.completion_tokens, event.cached_tokens or 0, embedded, images, pixels
    amounts[11] = _device_ms(event)
    return amounts


def _device_ms(event: ResultEvent) -> int:
    """Of all attempts that are known. A redriven request brings those of the former one, which ended before it came."""
    if event.history is None:
        return 0 if event.timings is None else event.timings.run_ms
    since_ms = event.origin.append_time_ms
    return sum(
        max(0, one.ended_at - one.started_at)
        for one in event.history.attempts
        if one.started_at is not None and one.ended_at is not None and one.ended_at > since_ms
    )


class Usage:
    """Tell it of each outcome by `count`, in the order of each partition but for `begin_unordered`."""

    def __init__(self, rows: Iterable[tuple[Any, ...]] = ()) -> None:
        """`rows` are those of the view's file: their totals are due, unless the topic has them."""
        self._topic_id, self._delay_ms = "", 0
        self._rows: dict[RowKey, _Row] = {}
        self._open_from = ""
        """The first day whose totals can change."""
        self._closed: dict[str, dict[RowKey, Amounts]] = {}
        """By day."""
        self._unordered: dict[tuple[RowKey, int], _Unordered] | None = None
        self._to_add: dict[tuple[RowKey, int], _Unordered] = {}
        """What was counted out of order, and is not in its share yet."""
        self._changed: set[RowKey] = set()
        self._due: dict[RowKey, int] = {}
        """Totals that differ from their record on the topic, and from when on they are to be published."""
        for key, shares in _read(rows):
            for partition, *share in shares:
                self._row(key).put(partition, share)
            self._due[key] = 0

    def begin(self, topic_id: str, delay_ms: int) -> None:
        """`topic_id`: Kafka's, of the result topic. A total that differs from its record is due after `delay_ms`.

        Gateways have different delays: the first one publishes, and the others have read that before theirs is over.
        """
        self._topic_id, self._delay_ms = topic_id, delay_ms

    # -- what changes

    def count(self, event: ResultEvent, partition: int, offset: int, at_ms: int, now_ms: int) -> None:
        """The one outcome of a request, whose record was appended at `at_ms`."""
        key = RowKey(day_of(at_ms), event.tenant, event.model or "", event.key_id or "")
        if key.day < self._open_from:
            return  # of a clock that is days behind
        if self._unordered is not None:
            known = self._unordered.get((key, partition))
            if known is None:
                base = self._row(key).shares.get(partition) or [0, 0, *_ZERO]
                known = self._unordered[key, partition] = _Unordered([*base], [0, 0, *_ZERO])
            if offset >= known.base[0]:
                _add(known.added, amounts_of(event), offset, at_ms)
            return
        if self._to_add:
            self._add_counted((key, partition), now_ms)
        row = self._row(key)
        if (share := row.shares.get(partition)) is None:
            share = row.shares[partition] = [0, 0, *_ZERO]
        if offset >= share[0]:
            amounts = amounts_of(event)
            _add(share, amounts, offset, at_ms)
            row.total = [*map(int.__add__, row.total, amounts)]
            self._has_changed(key, now_ms)

    def merge(self, total: UsageTotal, now_ms: int) -> None:
        """A record of the topic: the newest of its key."""
        key = RowKey(total.day, total.tenant, total.model or "", total.key_id or "")
        shares = {one.partition: [getattr(one, name) for name in _SHARE] for one in total.shares}
        if key not in self._rows and key.day < self._open_from:
            self._closed.setdefault(key.day, {})[key] = _sum(share[2:] for share in shares.values())
            return
        if total.topic_id != self._topic_id:
            if any(partition != EARLIER for partition in self._row(key).shares):
                self._due.setdefault(key, now_ms + self._delay_ms)
                return
            shares = {EARLIER: [total.updated_at, 0, *_sum(share[2:] for share in shares.values())]}
        row = self._row(key)
        if EARLIER not in shares:
            row.forget_earlier()
        if sum(row.put(partition, share) for partition, share in shares.items()):
            self._changed.add(key)
        if all(partition in shares and shares[partition][0] >= one[0] for partition, one in row.shares.items()):
            self._due.pop(key, None)
        else:
            self._due[key] = now_ms + self._delay_ms

    def take_rows(self, rows: Iterable[tuple[Any, ...]], now_ms: int) -> None:
        """Rows of a snapshot of another's file, which is this gateway's file from now on."""
        for key, shares in _read(row for row in rows if row[0] >= self._open_from):
            for partition, *share in shares:
                if self._row(key).put(partition, share):
                    self._has_changed(key, now_ms)
                if self._unordered is not None and (known := self._unordered.get((key, partition))) is not None:
                    known.base = max(known.base, share)
        self._changed |= self._rows.keys()

    def end_at(self, ends: Mapping[int, int], now_ms: int) -> None:
        """The ends of the result topic's partitions, read after all totals: a topic that was restored from before a
        total ends in front of its `through`, and what is appended there is still to be counted.
        """
        for key, row in self._rows.items():
            for partition, share in row.shares.items():
                if share[0] > ends.get(partition, share[0]):
                    share[0] = ends[partition]
                    self._has_changed(key, now_ms)

    def begin_unordered(self) -> None:
        """Until `end_unordered` outcomes come in any order, each once, and all from the known shares on."""
        self._unordered = {}

    def end_unordered(self, now_ms: int, most: int) -> bool:
        """Up to `most` shares get what was counted; whether others are left. Call it until none is."""
        if self._unordered is not None:
            self._to_add, self._unordered = self._unordered, None
        for place in [*islice(self._to_add, most)]:
            self._add_counted(place, now_ms)
        return bool(self._to_add)

    def _add_counted(self, place: tuple[RowKey, int], now_ms: int) -> None:
        one, (key, partition) = self._to_add.pop(place, None), place
        if one is not None and one.added[0]:
            share = [one.added[0], one.added[1], *_sum((one.base[2:], one.added[2:]))]
            if self._row(key).put(partition, share):
                self._has_changed(key, now_ms)

    def _row(self, key: RowKey) -> _Row:
        if (row := self._rows.get(key)) is None:
            row = self._rows[key] = _Row()
        return row

    def _has_changed(self, key: RowKey, now_ms: int) -> None:
        self._changed.add(key)
        self._due.setdefault(key, now_ms + self._delay_ms)

    # -- keeping

    def drain(self) -> Mapping[str, Sequence[tuple[Any, ...]]]:
        """Rows by table that are to be written in the same transaction as the offsets that they reflect."""
        rows = [(*key, _text(self._rows[key])) for key in self._changed if key in self._rows]
        self._changed = set()
        return {"usage": rows} if rows else {}

    def due(self, now_ms: int, most: int) -> list[UsageTotal]:
        """Some totals to publish now. If a record does not come back by `merge`, its total is due again."""
        keys = [key for key, at_ms in self._due.items() if at_ms <= now_ms][:most]
        self._due.update(dict.fromkeys(keys, now_ms + self._delay_ms))
        return [self._record(key, now_ms) for key in keys]

    def all_due(self, now_ms: int, most: int | None = None) -> list[UsageTotal]:
        """All totals that differ from their record, or so many of them."""
        return [self._record(key, now_ms) for key in islice(self._due, most)]

    def _record(self, key: RowKey, now_ms: int) -> UsageTotal:
        shares = sorted(self._rows[key].shares.items())
        return UsageTotal(
            day=key.day,
            tenant=key.tenant,
            model=key.model or None,
            key_id=key.key_id or None,
            topic_id=self._topic_id,
            updated_at=now_ms,
            shares=[
                UsageShare(partition=partition, **dict(zip(_SHARE, share, strict=True))) for partition, share in shares
            ],
        )

    def close_days(self, now_ms: int) -> None:
        """Keep only the totals of days that nothing is added to any more, once they are published or leave the file."""
        self._open_from, last_due = day_of(now_ms, OPEN_DAYS), day_of(now_ms, FILE_DAYS)
        for key in [key for key in self._rows if key.day < (last_due if key in self._due else self._open_from)]:
            self._due.pop(key, None)
            self._closed.setdefault(key.day, {})[key] = self._rows.pop(key).total

    # -- reading

    def rows(self, first: str, last: str) -> Callable[[], Iterable[tuple[RowKey, Amounts]]]:
        """What gives the totals of these days. Call it on a thread."""
        closed = [rows.copy() for day, rows in self._closed.items() if first <= day <= last]
        opened = [(key, row.total) for key, row in self._rows.items() if first <= key.day <= last and any(row.total)]
        return lambda: [*opened, *(pair for rows in closed for pair in rows.items())]


_SHARE = tuple(fields_of(UsageShare))[1:]


def _add(share: Share, amounts: Amounts, offset: int, at_ms: int) -> None:
    """The share has an outcome more."""
    share[0], share[1] = max(share[0], offset + 1), max(share[1], at_ms)
    share[2:] = map(int.__add__, share[2:], amounts)


def _sum(many: Iterable[Amounts]) -> list[int]:
    return [sum(column) for column in zip(_ZERO, *many, strict=True)]


def _read(rows: Iterable[tuple[Any, ...]]) -> Iterable[tuple[RowKey, list[Share]]]:
    """Keys, and shares behind their partitions, of rows of a file."""
    return ((RowKey(*parts), json.loads(text)) for *parts, text in rows)


def _text(row: _Row) -> str:
    return json.dumps([[partition, *share] for partition, share in row.shares.items()], separators=(",", ":"))
