"""A store's change from its file to one that was made from a snapshot of another gateway's view."""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from penstock.common import log_copies
from penstock.gateway.view import view_file
from penstock.gateway.view.census import Counted
from penstock.gateway.view.history import Minute
from penstock.gateway.view.key_filter import KeyFilter
from penstock.gateway.view.request_state import Key
from penstock.gateway.view.rows import Row
from penstock.schemas.topics import TP

logger = logging.getLogger(__name__)

COLUMNS = ", ".join(Row._fields)
_ERASED = "past.erased = 1 AND mine.erased = 1 AND mine.done = 1 AND mine.accepted_ms = 0"
"""A request that is erased in both, and of which the old file knows the erasure alone."""
_IN_BOTH = "SELECT 1 FROM requests AS past WHERE past.tenant = mine.tenant AND past.request_id = mine.request_id"

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
    known: KeyFilter


@dataclass(kw_only=True, slots=True)
class ChangeOver:
    """`run` is called on the writer's thread, all else on the event loop, once `copied` is set.

    The writer waits until the event loop has called `decide`.
    """

    imported: Imported
    copied: threading.Event = field(default_factory=threading.Event)
    doubles: list[Row] = field(default_factory=list[Row])
    """Rows of the old file whose requests the snapshot has too, but for those in `erased`."""
    erased: list[Key] = field(default_factory=list[Key])
    """Requests of which only the erasure was read, and which are erased in the snapshot too: nothing is to be done."""
    failure: Exception | None = None
    _decided: threading.Event = field(default_factory=threading.Event)
    _is_switched: bool = False

    def decide(self, *, switched: bool) -> None:
        """Whether the store reads the new file."""
        self._is_switched = switched
        self._decided.set()

    def run(self, old: sqlite3.Connection, path: Path, connect: Callable[[Path], sqlite3.Connection]) -> bool:
        """Copy what the old file at `path` has to the new one. Whether the writer writes to that from then on.

        An old file that cannot be emptied says that it is not whole: the next process removes it.
        """
        try:
            with closing(connect(self.imported.path)) as new:
                self._copy(new, path)
        except Exception as error:
            self.failure = error
        self.copied.set()
        self._decided.wait()
        if self._is_switched:
            try:
                view_file.empty(old)
            except sqlite3.Error as error:  # its disk is full
                logger.warning("view.old_not_emptied error=%s", error)
        return self._is_switched

    def _copy(self, new: sqlite3.Connection, path: Path) -> None:
        new.execute(_CACHE)
        new.execute("ATTACH ? AS old", (str(path),))
        new.execute("BEGIN IMMEDIATE")
        mine = "FROM old.requests AS mine WHERE"
        self.erased = new.execute(f"SELECT tenant, request_id {mine} EXISTS ({_IN_BOTH} AND {_ERASED})").fetchall()
        doubles = new.execute(f"SELECT {COLUMNS} {mine} EXISTS ({_IN_BOTH} AND NOT ({_ERASED}))")
        self.doubles = list(map(Row._make, doubles))
        keys = new.execute(f"SELECT tenant, request_id, updated_ms {mine} NOT EXISTS ({_IN_BOTH})").fetchall()
        new.execute(f"INSERT INTO requests ({COLUMNS}) SELECT {COLUMNS} {mine} NOT EXISTS ({_IN_BOTH})")
        for table in ("conversations", "device_minutes"):
            new.execute(f"INSERT OR REPLACE INTO {table} SELECT * FROM old.{table}")
        new.execute("COMMIT")
        new.execute("DETACH old")
        log_copies.wiped(new)
        for *key, updated_ms in keys:
            self.imported.known.add(tuple(key), updated_ms)
