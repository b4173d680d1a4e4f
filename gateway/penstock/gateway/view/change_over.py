"""A store's change from its file to one that was made from a snapshot of another gateway's view, in passes."""

from __future__ import annotations

import json
import logging
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from penstock.common import log_copies
from penstock.gateway.view import view_file
from penstock.gateway.view.census import Counted
from penstock.gateway.view.history import Minute
from penstock.gateway.view.key_filter import KeyFilter
from penstock.gateway.view.request_state import Key
from penstock.gateway.view.rows import Row, Snapshot
from penstock.schemas.topics import TP

logger = logging.getLogger(__name__)

COLUMNS = ", ".join(Row._fields)
ROWS_AT_ONCE = 1_000
"""Rows of one pass."""
_CHANGES = ", ".join(f"{name} = excluded.{name}" for name in Row._fields[2:])
IF_KNOWN = f" ON CONFLICT (tenant, request_id) DO UPDATE SET {_CHANGES}"
"""A row keeps its number then, and its key is not written again: keys are in no order, each is on a page of its own."""
_ERASED = "past.erased = 1 AND mine.erased = 1 AND mine.done = 1 AND mine.accepted_ms = 0"
"""A request that is erased in both, and of which the old file knows the erasure alone."""

_CACHE = "PRAGMA cache_size = -65536"
"""In KiB, about the index of a million keys, which are in no order: with SQLite's own cache copying takes four times as
long."""

LiveCount = tuple[str, Counted, int, int]
"""Requests that are not done: (tenant, as what they are counted, when the first was accepted, how many)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Imported:
    """A file with the rows and the indices of a snapshot, and what a view keeps in memory of it."""

    path: Path
    taken_ms: int
    offsets: dict[TP, int]
    last_number: int
    """That of the last row of the snapshot."""
    live: Sequence[LiveCount]
    minutes: dict[int, Minute]
    usage: Sequence[tuple[Any, ...]]
    known: KeyFilter


class Written(Protocol):
    """What a batch of the writer has changed in the old file: rows of these requests, facts of these conversations."""

    @property
    def rows(self) -> Sequence[Snapshot]: ...

    @property
    def facts(self) -> Mapping[str, bytes | None]: ...


@dataclass(kw_only=True, slots=True)
class ChangeOver:
    """`run` is called on the writer's thread, all else on the event loop, once `copied` is set.

    The old file is the view's until `decide`. While it is copied, each batch is written to it first, and then copied
    too. So the new file has all rows that a pass has come to or that were written since, as the old one has them.
    """

    imported: Imported
    copied: threading.Event = field(default_factory=threading.Event)
    """From then on the writer writes nothing until the event loop has called `decide`."""
    doubles: dict[Key, Row] = field(default_factory=dict[Key, Row])
    """Rows of the old file whose requests the snapshot has too, but for those in `erased`."""
    erased: set[Key] = field(default_factory=set[Key])
    """Requests of which only the erasure was read, and which are erased in the snapshot too: nothing is to be done."""
    failure: Exception | None = None
    _decided: threading.Event = field(default_factory=threading.Event)
    _is_switched: bool = False

    def decide(self, *, switched: bool) -> None:
        """Whether the store reads the new file."""
        self._is_switched = switched
        self._decided.set()

    def run(self, old: sqlite3.Connection, path: Path, write_next: Callable[[], Written | None]) -> bool:
        """Copy what the old file at `path` has. Whether the writer writes to the new file from then on.

        `write_next` writes a batch to the old file if one waits. If the files change, a thread of its own empties the
        old one and closes its connection: `old` is not to be used any more.
        """
        try:
            with closing(view_file.connect_without_log(self.imported.path)) as new:
                new.execute(_CACHE)
                new.execute("ATTACH ? AS old", (str(path),))
                for _ in self._passes(new):
                    if (written := write_next()) is not None:
                        self._copy_written(new, written)
            log_copies.connect(self.imported.path).close()  # from now on it has a write-ahead log
        except Exception as error:
            self.failure = error
        self.copied.set()
        self._decided.wait()
        if self._is_switched:
            threading.Thread(target=_empty, args=(old,), name="view-old", daemon=True).start()
        return self._is_switched

    def _passes(self, new: sqlite3.Connection) -> Iterator[None]:
        """Rows that come behind the last number and keys that come before a pass are copied as they are written."""
        ((last,),) = new.execute("SELECT coalesce(max(number), 0) FROM old.requests")
        for at in range(0, last, ROWS_AT_ONCE):
            self._copy_rows(new, "mine.number > ? AND mine.number <= ?", (at, at + ROWS_AT_ONCE))
            yield
        after, page = "", "SELECT key FROM old.conversations WHERE key > ? ORDER BY key LIMIT ?"
        while keys := [key for (key,) in new.execute(page, (after, ROWS_AT_ONCE))]:
            _copy_facts(new, keys)
            after = keys[-1]
            yield
        new.execute("INSERT OR REPLACE INTO device_minutes SELECT * FROM old.device_minutes")

    def _copy_written(self, new: sqlite3.Connection, written: Written) -> None:
        keys = json.dumps([[row.tenant, row.request_id] for row in written.rows])
        parts = "json_extract(value, '$[0]'), json_extract(value, '$[1]')"
        which = f"(mine.tenant, mine.request_id) IN (SELECT {parts} FROM json_each(?))"
        self._copy_rows(new, which, (keys,))
        _copy_facts(new, written.facts)

    def _copy_rows(self, new: sqlite3.Connection, which: str, values: Sequence[Any]) -> None:
        mine = f"FROM old.requests AS mine WHERE {which} AND"
        in_both = (
            "SELECT 1 FROM requests AS past WHERE past.tenant = mine.tenant AND past.request_id = mine.request_id"
            f" AND past.number <= {self.imported.last_number}"
        )
        doubles = f"SELECT EXISTS ({in_both} AND {_ERASED}), {COLUMNS} {mine} EXISTS ({in_both})"
        for is_erased, *columns in new.execute(doubles, values):
            row = Row._make(columns)
            key = row[:2]
            self.doubles.pop(key, None)
            self.erased.discard(key)
            if is_erased:
                self.erased.add(key)
            else:
                self.doubles[key] = row
        only_mine = f"{mine} NOT EXISTS ({in_both})"
        new.execute(f"INSERT INTO requests ({COLUMNS}) SELECT {COLUMNS} {only_mine}{IF_KNOWN}", values)
        for *key, updated_ms in new.execute(f"SELECT tenant, request_id, updated_ms {only_mine}", values):
            self.imported.known.add(tuple(key), updated_ms)


def _copy_facts(new: sqlite3.Connection, keys: Iterable[str]) -> None:
    values, which = (json.dumps([*keys]),), "key IN (SELECT value FROM json_each(?))"
    new.execute(f"DELETE FROM conversations WHERE {which}", values)
    new.execute(f"INSERT INTO conversations SELECT * FROM old.conversations WHERE {which}", values)


def _empty(old: sqlite3.Connection) -> None:
    """If it cannot be emptied: it says that it is not whole, and the next process removes it."""
    try:
        with closing(old):
            view_file.empty(old)
    except sqlite3.Error as error:  # its disk is full
        logger.warning("view.old_not_emptied error=%s", error)
