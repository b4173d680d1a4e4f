"""The index of dead letters: facts in a SQLite file, so that lists, filters and counts read no letter again.

The file belongs to one gateway. It is made anew when it is of another topic, of another release, or damaged.
"""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from penstock.gateway.dead_letters.letters import (
    PURGED,
    LetterAction,
    LetterCount,
    LetterFacts,
    LetterGroup,
    LetterPlace,
)
from penstock.schemas.codec import RELEASED

VERSION = 3
PURGED_KEPT = 100_000
"""So many purged letters can still be named as the one to go on behind."""
_COLUMNS = tuple(one.name for one in fields(LetterFacts))
_SCHEMA = """
CREATE TABLE meta (identity TEXT NOT NULL);
CREATE TABLE offsets (partition INTEGER PRIMARY KEY, offset INTEGER NOT NULL);
CREATE TABLE letters (
  partition INTEGER NOT NULL, offset INTEGER NOT NULL, created_ms INTEGER NOT NULL, reason TEXT NOT NULL,
  error TEXT NOT NULL, tenant TEXT, request_id TEXT, task TEXT, model TEXT, origin TEXT NOT NULL,
  worker_id TEXT NOT NULL, attempts INTEGER NOT NULL, size_bytes INTEGER NOT NULL, history TEXT NOT NULL,
  redrivable INTEGER NOT NULL, redriven_as TEXT, redrives INTEGER NOT NULL,
  PRIMARY KEY (partition, offset)) WITHOUT ROWID;
CREATE TABLE purged (
  number INTEGER PRIMARY KEY, partition INTEGER NOT NULL, offset INTEGER NOT NULL, created_ms INTEGER NOT NULL);
CREATE INDEX by_purged ON purged (partition, offset);
CREATE INDEX by_time ON letters (created_ms, partition, offset);
CREATE INDEX by_request ON letters (request_id, tenant);
CREATE INDEX by_reason ON letters (reason, model, created_ms, redrivable) WHERE redriven_as IS NULL;
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class LetterFilter:
    """Which letters are meant; None is any. Times are milliseconds since the epoch: from, and to but not with."""

    reason: str | None = None
    model: str | None = None
    tenant: str | None = None
    request_id: str | None = None
    since_ms: int | None = None
    until_ms: int | None = None
    redriven: bool | None = None
    ends: Mapping[int, int] | None = None
    """Only letters below these offsets, by partition."""

    def where(self) -> tuple[list[str], list[Any]]:
        conditions: list[str] = []
        values: list[Any] = []
        for column in ("reason", "model", "tenant", "request_id"):
            if (value := getattr(self, column)) is not None:
                conditions.append(f"{column} = ?")
                values.append(value)
        for condition, value in (("created_ms >= ?", self.since_ms), ("created_ms < ?", self.until_ms)):
            if value is not None:
                conditions.append(condition)
                values.append(value)
        if self.redriven is not None:
            conditions.append(f"redriven_as IS {'NOT ' if self.redriven else ''}NULL")
        if self.ends is not None:
            conditions.append("offset < ifnull(json_extract(?, '$.\"' || partition || '\"'), 0)")
            values.append(json.dumps(self.ends))
        return conditions, values


class LetterIndex:
    """Used by several threads."""

    def __init__(self, path: Path, identity: str) -> None:
        """`identity` names the topic; a file of another one is begun anew. Raises OSError, sqlite3.Error."""
        self._path = path
        self._identity = f"{VERSION}.{RELEASED} {identity}"
        self._lock = threading.Lock()
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._db = self._opened()
        except sqlite3.DatabaseError:
            self._db = self._new()

    def _opened(self) -> sqlite3.Connection:
        db = sqlite3.connect(self._path, check_same_thread=False)
        try:
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = NORMAL")
            if db.execute("SELECT identity FROM meta").fetchone() == (self._identity,):
                return db
        except sqlite3.OperationalError:  # a new file has no table
            pass
        except sqlite3.DatabaseError:
            db.close()
            raise
        db.close()
        return self._new()

    def _new(self) -> sqlite3.Connection:
        for suffix in ("", "-wal", "-shm"):
            self._path.with_name(self._path.name + suffix).unlink(missing_ok=True)
        db = sqlite3.connect(self._path, check_same_thread=False)
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")
        db.executescript(_SCHEMA)
        with db:
            db.execute("INSERT INTO meta VALUES (?)", (self._identity,))
        return db

    def close(self) -> None:
        with self._lock:
            self._db.close()

    # -- written by the follower

    def positions(self) -> dict[int, int]:
        """By partition the offset behind the last record that the index has taken."""
        with self._lock:
            return dict(self._db.execute("SELECT partition, offset FROM offsets"))

    def take(self, records: Iterable[LetterFacts | LetterAction]) -> None:
        """The next records of the topic, in order within each partition. All of them, or none."""
        with self._lock, self._db:
            for record in records:
                if isinstance(record, LetterFacts):
                    place = record.place
                    # What stood here or behind it is gone: the topic was made anew.
                    self._db.execute("DELETE FROM letters WHERE partition = ? AND offset >= ?", place)
                    marks = ", ".join("?" * len(_COLUMNS))
                    values = [getattr(record, name) for name in _COLUMNS]
                    self._db.execute(f"INSERT INTO letters VALUES ({marks})", values)
                else:
                    place = record.partition, record.offset
                    self._act(record)
                self._db.execute("INSERT OR REPLACE INTO offsets VALUES (?, ?)", (place[0], place[1] + 1))

    def _act(self, record: LetterAction) -> None:
        partition, action = record.partition, record.action
        here = (partition, action.offset)
        found = self._db.execute("SELECT request_id FROM letters WHERE partition = ? AND offset = ?", here).fetchone()
        if found != (record.request_id,):
            return
        if action.kind == PURGED:
            found = self._db.execute(
                "INSERT INTO purged (partition, offset, created_ms)"
                " SELECT partition, offset, created_ms FROM letters WHERE partition = ? AND offset = ?",
                here,
            )
            self._db.execute("DELETE FROM purged WHERE number <= ?", ((found.lastrowid or 0) - PURGED_KEPT,))
            self._db.execute("DELETE FROM letters WHERE partition = ? AND offset = ?", here)
            return
        # Two letters of one request have one redrive: they have the same key, so the same partition.
        self._db.execute(
            "UPDATE letters SET redriven_as = ?1, redrives = redrives + 1 WHERE partition = ?2 AND (offset = ?3 OR"
            " (request_id, tenant, origin) = (SELECT request_id, tenant, origin FROM letters"
            " WHERE partition = ?2 AND offset = ?3))",
            (action.request_id, *here),
        )

    def expired(self, firsts: Mapping[int, int]) -> None:
        """The partitions begin at these offsets now."""
        with self._lock, self._db:
            self._db.executemany("DELETE FROM letters WHERE partition = ? AND offset < ?", list(firsts.items()))

    def begin_anew(self, partition: int) -> None:
        """The partition has lost what the index took of it."""
        with self._lock, self._db:
            self._db.execute("DELETE FROM letters WHERE partition = ?", (partition,))
            self._db.execute("DELETE FROM purged WHERE partition = ?", (partition,))
            self._db.execute("DELETE FROM offsets WHERE partition = ?", (partition,))

    # -- read

    def counts(self) -> dict[str, int]:
        """Letters that were not run again, by reason."""
        with self._lock:
            return dict(
                self._db.execute("SELECT reason, count(*) FROM letters WHERE redriven_as IS NULL GROUP BY reason")
            )

    def groups(self, limit: int) -> list[LetterGroup]:
        """Letters that were not run again, by reason and model; those with the newest letters first."""
        asked = (
            "SELECT reason, model, count(*), sum(redrivable), min(created_ms), max(created_ms) AS newest FROM letters"
            " WHERE redriven_as IS NULL GROUP BY reason, model ORDER BY newest DESC, reason, model LIMIT ?"
        )
        names = [one.name for one in fields(LetterGroup)]
        with self._lock:
            rows = self._db.execute(asked, (limit,)).fetchall()
        return [LetterGroup(**dict(zip(names, row, strict=True))) for row in rows]

    def recent(self, since_ms: int) -> list[LetterCount]:
        """Letters written since then that were not run again, by reason and by whether they can be."""
        newest = "substr(max(printf('%015d', created_ms) || error), 16)"
        asked = (
            f"SELECT reason, count(*), min(created_ms), redrivable, {newest} FROM letters"
            " WHERE redriven_as IS NULL AND created_ms >= ? GROUP BY reason, redrivable ORDER BY reason"
        )
        with self._lock:
            rows = self._db.execute(asked, (since_ms,)).fetchall()
        return [
            LetterCount(reason=reason, letters=letters, since_ms=oldest, redrivable=redrivable == 1, newest=error)
            for reason, letters, oldest, redrivable, error in rows
        ]

    def get(self, place: LetterPlace) -> LetterFacts | None:
        found = self._select("partition = ? AND offset = ?", place, "")
        return found[0] if found else None

    def page(
        self, chosen: LetterFilter, *, after: LetterPlace | None = None, limit: int, newest_first: bool = False
    ) -> list[LetterFacts]:
        """In the order of their times. `after` may have been purged meanwhile. KeyError when it is unknown."""
        where, values = self._where(chosen, after, "<" if newest_first else ">")
        direction = "DESC" if newest_first else "ASC"
        order = f"ORDER BY created_ms {direction}, partition {direction}, offset {direction} LIMIT ?"
        return self._select(where, [*values, limit], order)

    def count(self, chosen: LetterFilter, *, after: LetterPlace | None = None) -> int:
        """The number of letters in all pages from the oldest. Raises as `page`."""
        where, values = self._where(chosen, after, ">")
        with self._lock:
            return self._db.execute(f"SELECT count(*) FROM letters WHERE {where}", values).fetchone()[0]

    def _where(self, chosen: LetterFilter, after: LetterPlace | None, side: str) -> tuple[str, list[Any]]:
        conditions, values = chosen.where()
        if after is not None:
            conditions.append(f"(created_ms, partition, offset) {side} (?, ?, ?)")
            values += [self._time_of(after), *after]
        return " AND ".join(conditions) or "1", values

    def _time_of(self, place: LetterPlace) -> int:
        """When the letter was written, also of a purged one. Raises KeyError."""
        where = "WHERE partition = ?1 AND offset = ?2"
        with self._lock:
            found = self._db.execute(
                f"SELECT created_ms FROM letters {where} UNION ALL SELECT created_ms FROM purged {where}", place
            ).fetchone()
        if found is None:
            raise KeyError(place)
        return found[0]

    def first_offsets(self) -> dict[int, int]:
        """By partition the first letter that is left; where none is left, the offset behind all that was read."""
        with self._lock:
            first = dict(self._db.execute("SELECT partition, min(offset) FROM letters GROUP BY partition"))
        return self.positions() | first

    def _select(self, where: str, values: Sequence[Any], order: str) -> list[LetterFacts]:
        with self._lock:
            rows = self._db.execute(f"SELECT {', '.join(_COLUMNS)} FROM letters WHERE {where} {order}", values)
            found: list[dict[str, Any]] = [dict(zip(_COLUMNS, row, strict=True)) for row in rows]
        return [LetterFacts(**(row | {"redrivable": row["redrivable"] == 1})) for row in found]
