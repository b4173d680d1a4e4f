"""The requests that a view knows: those that live, those that ended lately, and those on their way to the file.

Of those that live the file holds all, and memory those that had news lately or that somebody follows. The others are
*aside*: they are counted, and found again when there is news of them or somebody asks.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from penstock.gateway.limits.tenants import Tenants
from penstock.gateway.view.backfill import Backfill, BackfillCounts
from penstock.gateway.view.census import Census
from penstock.gateway.view.change_over import ChangeOver
from penstock.gateway.view.entries import Entry
from penstock.gateway.view.history import History
from penstock.gateway.view.request_state import NEVER_MS, NOT_KNOWN, Key
from penstock.gateway.view.store import FIRST_TURN, TP, Store
from penstock.gateway.view.unwritten import Recent, Unwritten
from penstock.gateway.view.usage import Usage

MOST_TURNS = 100
"""Rows of the file that are looked at for one turn of a conversation."""


class KnownRequests:
    """Call `touch` for each change; `census` and `tenants` count what lives, `history` and `usage` all."""

    def __init__(self, store: Store, tenants: Tenants, recent_bytes: int, held_live: int) -> None:
        """Of those that live about `held_live` stay in memory, and all that `evict_to_disk` leaves there."""
        self._store = store
        self.tenants = tenants
        self.census = Census()
        self._live: dict[Key, Entry] = {}
        """In the order of their last news."""
        self._held_live = held_live
        self._aside = 0
        self._staying = Counter[tuple[str, str | None]]()
        """Conversations whose requests stay in memory now."""
        self._going: set[Key] = set()
        """Those that are forgotten and whose rows are still to be deleted."""
        self._recent = Recent(recent_bytes)
        self.unwritten = Unwritten(store)
        self.history = History(store.minutes())
        self.usage = Usage(store.usage())
        self.catching_up = False
        """What is read now is old."""
        self.backfill: Backfill | None = None
        self._to_count: BackfillCounts | None = None
        """Of a backfill that has ended."""
        for tenant, counted, accepted_ms, count in store.live_counts():
            self.census.add(tenant, counted, accepted_ms, count)
            self.tenants.began(tenant, count)
            self._aside += count

    @property
    def live_count(self) -> int:
        return len(self._live) + self._aside

    @property
    def held_live_count(self) -> int:
        """Those that live and are in memory."""
        return len(self._live)

    @property
    def recent_bytes(self) -> int:
        """What the ended requests in memory take, about."""
        return self._recent.size_bytes

    def find(self, key: Key) -> Entry | None:
        """The entry in memory or on disk. One that lives is in memory from now on."""
        entry = self.in_memory(key)
        if entry is None and (entry := self._in_file(key)) is not None and not entry.closed:
            self._live[key] = entry
            self._aside -= 1
            self._counts(entry).recall(entry)
        return entry

    def peek(self, key: Key) -> Entry | None:
        """The entry, or a copy of one that is aside, which hears no news."""
        return self.in_memory(key) or self._in_file(key)

    def _in_file(self, key: Key) -> Entry | None:
        entry = None if key in self._going else self._store.get(key)
        if entry is not None and self.backfill is not None:
            entry.backfilled = self.backfill.has_entry(entry)
        return entry

    def in_memory(self, key: Key) -> Entry | None:
        """The entry, if it had news lately, ended lately, or is not written yet."""
        return self._live.get(key) or self._recent.get(key) or self.unwritten.get(key)

    def find_recent(self, key: Key) -> Entry | None:
        """The entry, if it is live or ended lately."""
        return self._live.get(key) or self._recent.get(key) or (self.find(key) if self._aside else None)

    @property
    def some_on_disk(self) -> bool:
        """Whether news may cost a look into the file."""
        return self._aside > 0

    def is_on_disk(self, key: Key) -> bool:
        """Whether a request that the file has as live is so, and not in memory."""
        return self.in_memory(key) is None and key not in self._going

    @contextmanager
    def staying(self, tenant: str, conversation_id: str) -> Generator[None, None, None]:
        """Meanwhile no request of the conversation leaves memory. So who lists what is aside, and then looks into
        memory, misses none."""
        line = (tenant, conversation_id)
        self._staying[line] += 1
        try:
            yield
        finally:
            self._staying[line] -= 1
            if not self._staying[line]:
                del self._staying[line]

    def a_turn(self, tenant: str, conversation_id: str) -> Entry | None:
        """A live request of a conversation. It is not found behind very many whose end is still to be written."""
        for held in self.census.of_conversation(tenant, conversation_id).values():
            return held
        if not self._aside:
            return None
        some = self._store.live_turns(tenant, conversation_id, FIRST_TURN, NEVER_MS, MOST_TURNS)
        keys = ((tenant, turn.request_id) for turn in some)
        return next((self.find(key) for key in keys if self.is_on_disk(key)), None)

    def is_live(self, key: Key) -> bool:
        """Whether it is live and in memory."""
        return key in self._live

    def held_live(self) -> Iterable[Entry]:
        """Those that live and are in memory."""
        return self._live.values()

    def begin(self, key: Key, partitions: int, partition: int = NOT_KNOWN) -> Entry:
        """A request that is new; its results are on `partition` of so many, if that is known."""
        self._going.discard(key)
        self._recent.forget(key)
        made = self._live[key] = Entry(key[0], key[1], partition, partitions)
        made.backfilled = self.backfill is not None and self.backfill.folding
        self._outstanding(made, 1)
        return made

    def touch(self, entry: Entry, now_ms: int) -> None:
        """It has changed: it is to be written, and counted anew."""
        entry.updated_ms = now_ms
        self.unwritten.add(entry)
        self.history.note(entry, now_ms)
        if entry.done:
            self.end(entry)
        elif not entry.blanked:
            key = entry.key
            if (live := self._live.pop(key, None)) is not None:
                self._live[key] = live
            self._counts(entry).count(entry)

    def end(self, entry: Entry) -> None:
        """Nothing will happen to it any more."""
        live = self._live.pop(entry.key, None)
        if live is not None:
            self._counts(live).forget(live)
            self._outstanding(live, -1)
        # Nobody waits for old outcomes, but for one that was read before its request that is soon asked for.
        is_old = self.catching_up or (self.backfill is not None and self.backfill.folding)
        if not is_old or not entry.content or entry.blanked:
            self._recent.add(entry)

    def keep(self, entry: Entry) -> None:
        """Its outcome was read again: its next readers find it in memory."""
        if self._recent.get(entry.key) is entry or self.in_memory(entry.key) is None:
            self._recent.add(entry)

    def evict_to_disk(self, is_followed: Callable[[Entry], bool], most: int) -> None:
        """Leave some of those that wait to the file, if more than enough are in memory. At most so many are looked at.

        What runs stays, and what `is_followed`.
        """
        for _ in range(min(most, len(self._live) - self._held_live)):
            key, entry = next(iter(self._live.items()))
            if self.unwritten.get(key) is not None:
                return  # those behind it had news later still
            del self._live[key]
            stays = (entry.tenant, entry.conversation_id) in self._staying or is_followed(entry)
            if entry.waits and entry.counted is not None and not stays:
                self._counts(entry).evict_to_disk(entry)
                self._aside += 1
            else:
                self._live[key] = entry

    # -- the past

    def begin_backfill(self, backfill: Backfill) -> None:
        """What is known is of the past. It counts for nothing until `end_backfill`."""
        self.backfill, self.census = backfill, Census()
        self.usage.begin_unordered()
        backfill.counts.add_live(self._store.live_counts())
        for tenant, count in backfill.counts.outstanding.items():
            self.tenants.began(tenant, -count)

    def begin_from(self, over: ChangeOver) -> list[Key]:
        """The store has switched to a file made from a snapshot, which holds requests of the past alone.

        The keys of those that may be known already, as they are in memory.
        """
        assert self.backfill is not None
        for key in over.erased:
            self._recent.forget(key)
        imported = over.imported
        self.backfill.counts.add_live(imported.live)
        self._aside += sum(count for *_, count in imported.live)
        self.history.add(imported.minutes)
        self.usage.take_rows(imported.usage, imported.taken_ms)
        return [*self.unwritten.all_now()]

    def unite(self, past: Entry, since: Entry) -> Entry:
        """A request as a snapshot has it, and what was read under its id since: the one of the two that counts.

        That is the one that has results. If neither or both have some it is the one of the past, as if all had been
        read in order. The other one's record is kept as any other record with that id.
        """
        counts, other = (since, past) if past.fold.origin is None and since.fold.origin is not None else (past, since)
        for one in (since, past):
            self._take_out(one)
            one.backfilled = True
        if not other.erased_unread:
            self.history.forget(other)
            if not since.erased:
                counts.evict_to_disk(other)
        if not counts.closed:
            self._live[counts.key] = counts
            self._outstanding(counts, 1)
        self.touch(counts, counts.updated_ms)
        return counts

    def _take_out(self, entry: Entry) -> None:
        """Count it no longer."""
        live = self._live.pop(entry.key, None)
        self._recent.forget(entry.key)
        if entry.closed:
            return
        if live is None:
            self._aside -= 1
            self._counts(entry).recall(entry)
        self._counts(entry).forget(entry)
        self._outstanding(entry, -1)

    def is_backfilled(self, entry: Entry) -> None:
        """Another record with its id stood in the log before."""
        if self.backfill is None or entry.backfilled:
            return
        if self._live.get(entry.key) is entry:
            self.census.forget(entry)
            self._outstanding(entry, -1)
            entry.backfilled = True
            self._outstanding(entry, 1)
            self.backfill.counts.count(entry)
        entry.backfilled = True

    def recall_turns(self, tenant: str, conversation_id: str) -> None:
        """Have live requests of a conversation in memory; not all of very many."""
        for turn in self._store.live_turns(tenant, conversation_id, FIRST_TURN, NEVER_MS, MOST_TURNS):
            self.find((tenant, turn.request_id))

    def end_backfill(self) -> None:
        """All of it was read: it is as anything else, and counts so once `count_backfilled` has nothing left."""
        assert self.backfill is not None
        counts, self.backfill = self.backfill.counts, None
        self._to_count = counts
        for tenant, count in counts.outstanding.items():
            self.tenants.began(tenant, count)
        for entry in self._live.values():
            if entry.backfilled:
                entry.backfilled = False
                self.census.enlist(entry)

    def count_backfilled(self, now_ms: int, most: int) -> bool:
        """Count some of it; whether there is more."""
        if self._to_count is not None and not self._to_count.move_to(self.census, most):
            self._to_count = None
        return self.usage.end_unordered(now_ms, most) or self._to_count is not None

    def uncount(self, entry: Entry) -> None:
        """It is counted again when it is touched."""
        self._counts(entry).forget(entry)

    def _counts(self, entry: Entry) -> Census | BackfillCounts:
        if self.backfill is not None and entry.backfilled:
            return self.backfill.counts
        if self._to_count is not None:
            self._to_count.move_same(entry, self.census)
        return self.census

    def _outstanding(self, entry: Entry, more: int) -> None:
        if self.backfill is not None and entry.backfilled:
            self.backfill.counts.outstanding[entry.tenant] += more
        else:
            self.tenants.began(entry.tenant, more)

    def hand_over(self, offsets: Mapping[TP, int], written: threading.Event | None) -> bool:
        """As `Unwritten.hand_over`."""
        return self.unwritten.hand_over(offsets, written, self._counted)

    def _counted(self) -> Mapping[str, Sequence[tuple[Any, ...]]]:
        """Rows by table of what was counted since the last call."""
        return {**self.history.drain(), **self.usage.drain()}

    def forget(self, silent: Sequence[Entry], before_ms: int) -> list[Entry]:
        """Forget live ones, of which the file says that nothing was heard since; those of which that is true.

        Their rows are to be deleted then; tell `are_gone`.
        """
        forgotten: list[Entry] = []
        for copy in silent:
            key = copy.key
            entry = self.in_memory(key)
            if key in self._going:
                forgotten.append(copy)  # its row could not be deleted the last time
                continue
            if entry is None:
                self._aside -= 1
                copy.backfilled = self.backfill is not None and self.backfill.has_entry(copy)
                self._counts(copy).recall(copy)
                entry = copy
            elif key in self._live and entry.updated_ms < before_ms and self.unwritten.get(key) is None:
                del self._live[key]
            else:
                continue  # there is news of it, or what it is now is on its way to the file
            self._counts(entry).forget(entry)
            self._outstanding(entry, -1)
            self._going.add(key)
            forgotten.append(entry)
        return forgotten

    def are_gone(self, forgotten: Iterable[Entry]) -> None:
        """The rows of these were deleted, but for those of which there was news again."""
        self._going.difference_update(entry.key for entry in forgotten)
