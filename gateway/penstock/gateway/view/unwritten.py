"""Entries on their way to the view's file, which the file does not hold yet; and those that ended lately."""

from __future__ import annotations

import threading
from collections import ChainMap, OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from penstock.gateway.view.entries import Entry
from penstock.gateway.view.request_state import ENTRY_BYTES, Key
from penstock.gateway.view.rows import snapshot
from penstock.gateway.view.store import TP, Batch, Store

MAX_ENTRIES, MAX_BYTES = 5_000, 64 * 2**20
"""Entries that were not handed to the writer, and the bytes of their outcomes: at more nothing should be read."""
HAND_OVER, HAND_OVER_BYTES = 1_000, 8 * 2**20
"""With so many a batch is handed over at once: copying them is done on the event loop, and the writer has several."""


class Unwritten:
    """Collects changed entries until `hand_over` makes a batch of them. A batch that is under way is found still."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._changed: dict[Key, Entry] = {}
        self._bytes = 0
        self._facts: dict[str, bytes | None] = {}
        self._writing: deque[tuple[threading.Event, dict[Key, Entry], dict[str, bytes | None]]] = deque()

    def __len__(self) -> int:
        """Entries that were not handed to the writer."""
        return len(self._changed)

    @property
    def is_full(self) -> bool:
        """Whether so much waits that nothing more should be read."""
        return len(self._changed) + len(self._facts) > MAX_ENTRIES or self._bytes > MAX_BYTES

    @property
    def is_due(self) -> bool:
        """Whether enough waits for a batch."""
        return len(self._changed) + len(self._facts) >= HAND_OVER or self._bytes > HAND_OVER_BYTES

    def add(self, entry: Entry) -> None:
        self._changed[entry.key] = entry
        if entry.done:
            self._bytes += entry.kept_bytes - ENTRY_BYTES

    def add_facts(self, key: str, record: bytes | None) -> None:
        """The newest record of a conversation's facts; None takes them away."""
        self._facts[key] = record
        self._bytes += 0 if record is None else len(record)

    def facts(self) -> Mapping[str, bytes | None]:
        """Of conversations, as far as the file does not hold them so. It stays as it is when they are written."""
        self._settle()
        return ChainMap(self._facts, *(facts for _, _, facts in reversed(self._writing)))

    def get(self, key: Key) -> Entry | None:
        """The entry, if the file does not hold it as it is, however long ago it was last asked for."""
        self._settle()
        entry = self._changed.get(key)
        for _, entries, _ in reversed(self._writing):
            entry = entry or entries.get(key)
        return entry

    def all_now(self) -> Mapping[Key, Entry]:
        """What the file does not hold now as it is. It stays there when it is written."""
        self._settle()
        return ChainMap(self._changed, *(entries for _, entries, _ in reversed(self._writing)))

    def hand_over(
        self,
        offsets: Mapping[TP, int],
        written: threading.Event | None,
        counted: Callable[[], Mapping[str, Sequence[tuple[Any, ...]]]],
    ) -> bool:
        """Give the writer what changed, with the offsets that it reflects; False when the writer is behind.

        `written` is set when it stands in the file. `counted` gives rows of other tables.
        """
        self._settle()
        if not self._changed and not self._facts and not offsets and written is None:
            return True
        if self._store.is_behind:
            return False
        done = written or threading.Event()
        rows = [snapshot(entry) for entry in self._changed.values()]
        self._store.submit(Batch(rows, offsets, done, self._facts, counted()))
        self._writing.append((done, self._changed, self._facts))
        self._changed, self._bytes, self._facts = {}, 0, {}
        return True

    def _settle(self) -> None:
        """Forget what stands in the file by now."""
        while self._writing and self._writing[0][0].is_set():
            self._writing.popleft()


class Recent:
    """Entries that ended lately, the last ones that fit into `limit_bytes`."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._entries: OrderedDict[Key, tuple[Entry, int]] = OrderedDict()
        """With what each counted when it came: its request may be read later, and it takes more then."""
        self.size_bytes = 0
        """What they take, about."""

    def get(self, key: Key) -> Entry | None:
        held = self._entries.get(key)
        return None if held is None else held[0]

    def forget(self, key: Key) -> None:
        if (held := self._entries.pop(key, None)) is not None:
            self.size_bytes -= held[1]

    def add(self, entry: Entry) -> None:
        _, counted = self._entries.pop(entry.key, (entry, 0))
        self._entries[entry.key] = (entry, entry.kept_bytes)
        self.size_bytes += entry.kept_bytes - counted
        while self.size_bytes > self._limit:
            _, (_, oldest) = self._entries.popitem(last=False)
            self.size_bytes -= oldest
