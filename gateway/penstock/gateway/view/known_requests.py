"""The requests that a view knows: those that live, those that ended lately, and those on their way to the file."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping

from penstock.gateway.limits.tenants import Tenants
from penstock.gateway.view.census import Census
from penstock.gateway.view.entries import Entry
from penstock.gateway.view.request_state import NOT_KNOWN, Key
from penstock.gateway.view.store import TP, Store
from penstock.gateway.view.unwritten import Recent, Unwritten


class KnownRequests:
    """What changes is to be told by `touch`; `census` and `tenants` count what lives."""

    def __init__(self, store: Store, tenants: Tenants, recent_bytes: int, now_ms: int) -> None:
        """What lives according to the file is there at once: its silence begins now."""
        self._store = store
        self.tenants = tenants
        self.census = Census()
        self._live: dict[Key, Entry] = {entry.key: entry for entry in store.live(now_ms)}
        self._recent = Recent(recent_bytes)
        self.unwritten = Unwritten(store)
        self.catching_up = False
        """What is read now is old."""
        for entry in self._live.values():
            entry.updated_ms = now_ms
            self.census.count(entry)
            self.tenants.began(entry.tenant)

    @property
    def live_count(self) -> int:
        return len(self._live)

    @property
    def recent_bytes(self) -> int:
        """What the ended requests in memory take, about."""
        return self._recent.size_bytes

    def find(self, key: Key) -> Entry | None:
        """The entry in memory or on disk."""
        return self.in_memory(key) or self._store.get(key)

    def in_memory(self, key: Key) -> Entry | None:
        """The entry, if it is live, ended lately, or not written yet."""
        return self._live.get(key) or self._recent.get(key) or self.unwritten.get(key)

    def of_late(self, key: Key) -> Entry | None:
        """The entry, if it is live or ended lately."""
        return self._live.get(key) or self._recent.get(key)

    def is_live(self, key: Key) -> bool:
        return key in self._live

    def live(self) -> Iterable[Entry]:
        return self._live.values()

    def begin(self, key: Key, partitions: int, partition: int = NOT_KNOWN) -> Entry:
        """A request that is new; its results are on `partition` of so many, if that is known."""
        made = self._live[key] = Entry(key[0], key[1], partition, partitions)
        self.tenants.began(made.tenant)
        return made

    def touch(self, entry: Entry, now_ms: int) -> None:
        """It has changed: it is to be written, and counted anew."""
        entry.updated_ms = now_ms
        self.unwritten.add(entry)
        if entry.done:
            self.end(entry)
        elif not entry.blanked:
            self.census.count(entry)

    def end(self, entry: Entry) -> None:
        """Nothing will happen to it any more."""
        live = self._live.pop(entry.key, None)
        if live is not None:
            self.census.forget(live)
            self.tenants.ended(live.tenant)
        # Nobody waits for old outcomes, but for one that was read before its request that is soon asked for.
        if not self.catching_up or not entry.content:
            self._recent.add(entry)

    def keep(self, entry: Entry) -> None:
        """Its outcome was read again: its next readers find it in memory."""
        if self.in_memory(entry.key) is None:
            self._recent.add(entry)

    def hand_over(self, offsets: Mapping[TP, int], written: threading.Event | None) -> bool:
        """As `Unwritten.hand_over`."""
        return self.unwritten.hand_over(offsets, written)

    def prune(self, before_ms: int) -> list[Entry]:
        """Forget what nothing was heard of since, and say what; `Store.prune` does the same to the file."""
        silent = [entry for entry in self._live.values() if entry.updated_ms < before_ms]
        for entry in silent:
            del self._live[entry.key]
            self.census.forget(entry)
            self.tenants.ended(entry.tenant)
        return silent
