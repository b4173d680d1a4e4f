"""A backfill: requests whose records stood in the log before a view began to follow it, until they are read. Pure.

They are *of the past*. The follower of the topics folds the records of all other requests, and leaves those of the past
to the backfill reader. That one reads the log from further back, up to where the follower is. So the records of a
request are folded in their order by one of the two, however far both are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from itertools import islice

from penstock.common.reader import RawMessage
from penstock.gateway.view.census import Census, Counted, counted_as
from penstock.gateway.view.entries import Entry
from penstock.gateway.view.wait_counts import AGES_MS
from penstock.schemas.records import Origin
from penstock.schemas.topics import TP

CountKey = tuple[str, Counted, int]
"""Tenant, state and age."""


def _key(tenant: str, state: Counted, accepted_ms: int) -> CountKey:
    # Those that wait differ by their age alone, which is given to the second.
    return tenant, state, accepted_ms if state.started_ms else accepted_ms // AGES_MS


class BackfillCounts:
    """Live requests of the past. They count for nothing until `move_to`: most of them have ended since.

    The methods about an entry are those of `Census`.
    """

    def __init__(self) -> None:
        self._counts: dict[CountKey, list[int]] = {}
        """When the first of them was accepted, and how many."""
        self.outstanding: Counter[str] = Counter()
        """By tenant."""

    def add(self, tenant: str, state: Counted, accepted_ms: int, count: int = 1) -> None:
        """So many more requests of a tenant, or less, are to be counted as this."""
        key = _key(tenant, state, accepted_ms)
        since = self._counts.setdefault(key, [accepted_ms, 0])
        since[:] = min(since[0], accepted_ms), since[1] + count
        if not since[1]:
            del self._counts[key]

    def count(self, entry: Entry) -> None:
        now = (counted_as(entry), entry.accepted_ms)
        if now != entry.counted:
            self.forget(entry)
            self.add(entry.tenant, *now)
            entry.counted = now

    def forget(self, entry: Entry) -> None:
        if entry.counted is not None:
            self.add(entry.tenant, *entry.counted, -1)
            entry.counted = None

    def evict_to_disk(self, entry: Entry) -> None:
        entry.counted = None

    def recall(self, entry: Entry) -> None:
        entry.counted = (counted_as(entry), entry.accepted_ms)

    def add_live(self, counts: Iterable[tuple[str, Counted, int, int]]) -> None:
        """As `Store.live_counts` has them: none of them is in memory."""
        for tenant, counted, accepted_ms, count in counts:
            self.add(tenant, counted, accepted_ms, count)
            self.outstanding[tenant] += count

    def move_to(self, census: Census, most: int) -> bool:
        """Some of them count there from now on; whether others are left."""
        for key in [*islice(self._counts, most)]:
            self._move(key, census)
        return bool(self._counts)

    def move_same(self, entry: Entry, census: Census) -> None:
        """Those that are counted as this one count there from now on."""
        if entry.counted is not None:
            self._move(_key(entry.tenant, *entry.counted), census)

    def _move(self, key: CountKey, census: Census) -> None:
        since_ms, count = self._counts.pop(key, (0, 0))
        if count:
            census.add(key[0], key[1], since_ms, count)


class Backfill:
    """`folding` says that what is folded now comes from the backfill reader."""

    def __init__(self, begin: Mapping[TP, int], ends: Mapping[TP, int], since_ms: int, began_ms: int) -> None:
        """The past lies from `begin`, at or behind `since_ms`, to before `ends`, which were asked for at `began_ms`.

        Those of request topics were asked for last: so no result of what is not of the past lies before the ends.
        """
        self.ends = dict(ends)
        self.counts = BackfillCounts()
        self.folding = False
        self.until_ms = since_ms
        """The time in the log that was reached."""
        self._began_ms = began_ms
        self._offsets = {tp: begin.get(tp, 0) for tp in ends}
        self._kept: list[RawMessage] | None = None

    def offsets(self) -> dict[TP, int]:
        """The next offset of each partition that is to be folded."""
        return self._offsets

    def begin_at(self, offsets: Mapping[TP, int], until_ms: int) -> None:
        """What lies before these offsets is known from a snapshot."""
        self._offsets |= {tp: offsets[tp] for tp in self._offsets if tp in offsets}
        self.until_ms = until_ms

    def has(self, origin: Origin) -> bool:
        """Whether a request with this origin is of the past."""
        end = self.ends.get((origin.topic, origin.partition))
        # Of a partition that was not there: both readers must judge alike, whenever they read it.
        return origin.append_time_ms < self._began_ms if end is None else origin.offset < end

    def has_entry(self, entry: Entry) -> bool:
        return (origin := entry.first_record) is not None and self.has(origin)

    def leaves_out(self, origin: Origin, message: RawMessage) -> bool:
        """Whether a record about a request with this origin is for the other reader to fold."""
        # What stood there before can only be about the past, also where topics were copied and origins are of others.
        is_past = message.offset < self.ends.get((message.topic, message.partition), 0) or self.has(origin)
        if is_past == self.folding:
            return False
        if is_past and (message.topic, message.partition) not in self._offsets:
            return False  # a partition that was added since: only the follower reads it
        self.leave(message)
        return True

    def leave(self, message: RawMessage) -> None:
        """The follower leaves a record to the backfill reader."""
        if self._kept is not None and not self.folding:
            self._kept.append(message)

    def is_next(self, message: RawMessage) -> bool:
        """Whether the record was not folded yet."""
        return message.offset >= self._offsets.get((message.topic, message.partition), 0)

    def passed(self, message: RawMessage) -> None:
        """The record was folded."""
        self._offsets[message.topic, message.partition] = message.offset + 1
        self.until_ms = max(self.until_ms, message.timestamp_ms)

    def keep_what_comes(self) -> None:
        """What the follower leaves out from now on is kept, and folded when all before it is."""
        self._kept = []

    def take_kept(self, most: int) -> list[RawMessage]:
        """The next of those records."""
        kept = self._kept or []
        taken = kept[:most]
        del kept[:most]
        return taken

    def forget(self, gone: Collection[TP]) -> None:
        """Partitions of topics that are there no more."""
        for tp in gone:
            self._offsets.pop(tp, None)


def records_between(begin: Mapping[TP, int], ends: Mapping[TP, int]) -> int:
    """How many records lie there at most."""
    return sum(max(0, end - begin.get(tp, 0)) for tp, end in ends.items())
