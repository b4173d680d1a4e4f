"""The SQLite file that finds records of one conversation in the shared topic: a copy of what is live there.

One thread writes, in the order of the log; others read, each by a connection of its own. The topic is the truth: a file
that cannot be trusted is made anew from it.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
from collections.abc import Generator, Iterable, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.common import file_lock
from penstock.common.reader import RawMessage
from penstock.common.shards.addresses import HEAD, split_key
from penstock.schemas.errors import Overloaded
from penstock.schemas.topics import conversation_of_key

logger = logging.getLogger(__name__)

VERSION = 1
_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS heads (
  tenant TEXT NOT NULL, id TEXT NOT NULL, conversation TEXT NOT NULL, offset INTEGER NOT NULL,
  partition INTEGER NOT NULL, PRIMARY KEY (tenant, id, offset)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS heads_by_conversation ON heads (conversation, offset);
CREATE TABLE IF NOT EXISTS records (
  conversation TEXT NOT NULL, offset INTEGER NOT NULL, time_ms INTEGER NOT NULL, key BLOB NOT NULL, value BLOB,
  PRIMARY KEY (conversation, offset)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_key ON records (conversation, key);
CREATE TABLE IF NOT EXISTS positions (
  partition INTEGER PRIMARY KEY, offset INTEGER NOT NULL, followed_ms INTEGER NOT NULL);
"""
_ROW = "offset, time_ms, key, value"
_FAR = 1 << 62
_TABLES = ("meta", "heads", "records", "positions")
_PASSING = frozenset(
    {
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_NOMEM,
        sqlite3.SQLITE_PERM,
        sqlite3.SQLITE_READONLY,
    }
)
"""Errors that say nothing about what the file holds."""


Row = tuple[int, int, bytes, bytes | None]
"""(offset, time in ms since the epoch, key in the conversation, value)"""


@dataclass(frozen=True, slots=True)
class Followed:
    """How far a partition was read, and when that was known last, in ms since the epoch."""

    offset: int
    followed_ms: int


@dataclass(frozen=True, slots=True)
class Span:
    """A conversation that is there: the offset of its head, the one behind its last record, and that one's time."""

    head: int
    end: int
    newest_ms: int


class ShardFile:
    """Reads are of what was written last. Raises Overloaded when the file cannot be opened now."""

    def __init__(self, path: Path, topic_id: str) -> None:
        """What stands there of a topic with another id is dropped."""
        self._path = path
        self._lock = self._hold()
        self._prepare(f"{VERSION} {topic_id}")
        self._readers = threading.local()
        self._open: list[sqlite3.Connection] = []
        self._writer = self._connect()

    def close(self) -> None:
        """Nobody may read or write any more."""
        for connection in (*self._open, self._writer):
            connection.close()
        os.close(self._lock)

    def _hold(self) -> int:
        """Of two that write one file each would take the other's positions for its own."""
        lock = Path(f"{self._path}.lock")
        try:
            lock.parent.mkdir(parents=True, exist_ok=True)
            held = file_lock.hold(lock)
        except OSError as error:
            raise Overloaded(f"the copy of conversations at {self._path}: {error}", retry_after_s=1) from error
        if held is None:
            raise Overloaded(f"the copy of conversations at {self._path} is in use by another process", retry_after_s=1)
        return held

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self._path, check_same_thread=False, isolation_level=None, timeout=10)
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=NORMAL")
        # What was erased is overwritten in the file, not left in free pages.
        connection.execute("PRAGMA secure_delete=ON")
        return connection

    def _prepare(self, identity: str) -> None:
        try:
            with closing(self._connect()) as connection:
                connection.executescript(_SCHEMA)
                row = connection.execute("SELECT value FROM meta WHERE name = 'identity'").fetchone()
                if row is not None and row[0] != identity:
                    connection.executescript("".join(f"DROP TABLE {name};" for name in _TABLES) + _SCHEMA)
                connection.execute("INSERT OR REPLACE INTO meta VALUES ('identity', ?)", (identity,))
        except sqlite3.DatabaseError as error:
            if getattr(error, "sqlite_errorcode", 0) & 0xFF in _PASSING:
                raise Overloaded(f"the copy of conversations at {self._path}: {error}", retry_after_s=1) from error
            logger.warning("conversations.unreadable path=%s: the copy is made anew from the topic", self._path)
            for suffix in ("", "-wal", "-shm"):
                Path(f"{self._path}{suffix}").unlink(missing_ok=True)
            with closing(self._connect()) as connection:
                connection.executescript(_SCHEMA)
                connection.execute("INSERT INTO meta VALUES ('identity', ?)", (identity,))

    # -- writing, on one thread

    def positions(self) -> dict[int, Followed]:
        rows = self._writer.execute("SELECT partition, offset, followed_ms FROM positions")
        return {partition: Followed(offset, followed_ms) for partition, offset, followed_ms in rows}

    def forget(self, partition: int) -> None:
        """Drop all that was read of a partition."""
        with _transaction(self._writer) as write:
            write.execute(
                "DELETE FROM records WHERE conversation IN (SELECT conversation FROM heads WHERE partition = ?)",
                (partition,),
            )
            write.execute("DELETE FROM heads WHERE partition = ?", (partition,))
            write.execute("DELETE FROM positions WHERE partition = ?", (partition,))

    def apply(self, batch: Iterable[RawMessage], positions: Mapping[int, int], now_ms: int) -> None:
        """Take the next records of their partitions; everything below `positions` is read then."""
        erases = False
        with _transaction(self._writer) as write:
            writing = _Writing(write)
            for message in batch:
                split = split_key(message.key)
                if split is not None:
                    writing.take(message, *split)
                    erases = erases or message.value is None
            write.executemany(
                "INSERT OR REPLACE INTO positions VALUES (?, ?, ?)",
                [(partition, offset, now_ms) for partition, offset in positions.items()],
            )
        if erases:  # what was erased stands in the log of writes too, until that begins anew
            self._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    # -- reading, on any thread

    def span(self, conversation: str) -> Span | None:
        """None: there is no such conversation."""
        head = self._one("SELECT min(offset) FROM heads WHERE conversation = ?", conversation)[0]
        if head is None:
            return None
        last = self.last(conversation)
        return Span(head, head + 1, 0) if last is None else Span(head, last[0] + 1, last[1])

    def records(self, conversation: str, begin: int, end: int | None = None, most: int | None = None) -> list[Row]:
        """The records from the offset `begin` to before `end`, the first `most` of them."""
        return self._all(
            f"SELECT {_ROW} FROM records WHERE conversation = ? AND offset >= ? AND offset < ? ORDER BY offset LIMIT ?",
            conversation,
            begin,
            _FAR if end is None else end,
            -1 if most is None else most,
        )

    def back(self, conversation: str, end: int, records: int) -> int | None:
        """The offset of the record that stands so many before `end`; None: there are not so many."""
        row = self._one(
            "SELECT offset FROM records WHERE conversation = ? AND offset < ? ORDER BY offset DESC LIMIT 1 OFFSET ?",
            conversation,
            end,
            records - 1,
        )
        return None if row is None else row[0]

    def last(self, conversation: str) -> Row | None:
        """The newest record."""
        return self._one(
            f"SELECT {_ROW} FROM records WHERE conversation = ? ORDER BY offset DESC LIMIT 1", conversation
        )

    def live_keys(self, conversation: str) -> list[bytes]:
        """Of the records that have no tombstone, in the order of the log."""
        rows = self._all(
            "SELECT key FROM records WHERE conversation = ? AND value IS NOT NULL ORDER BY offset", conversation
        )
        return list(dict.fromkeys(key for (key,) in rows))

    def ids(self, tenant: str) -> list[str]:
        """Of a tenant's conversations, in order."""
        return [one for (one,) in self._all("SELECT DISTINCT id FROM heads WHERE tenant = ? ORDER BY id", tenant)]

    def everyone(self) -> list[tuple[str, str]]:
        """(tenant, id) of all conversations."""
        return self._all("SELECT DISTINCT tenant, id FROM heads")

    def _one(self, statement: str, *values: str | int) -> Any:
        return self._reader().execute(statement, values).fetchone()

    def _all(self, statement: str, *values: str | int) -> list[Any]:
        return self._reader().execute(statement, values).fetchall()

    def _reader(self) -> sqlite3.Connection:
        connection: sqlite3.Connection | None = getattr(self._readers, "connection", None)
        if connection is None:
            connection = self._readers.connection = self._connect()
            self._open.append(connection)
        return connection


class _Writing:
    """One transaction."""

    def __init__(self, write: sqlite3.Connection) -> None:
        self._write = write
        self._there: dict[str, bool] = {}
        """By conversation: whether it has a head."""

    def take(self, message: RawMessage, conversation: str, key: bytes) -> None:
        if message.value is None:
            if self._is_there(conversation):
                self._erase(message, conversation, key)
            return
        if key.startswith(HEAD):
            if not self._is_there(conversation):
                self._forget(conversation)
            tenant, name = conversation_of_key(conversation)
            self._write.execute(
                "INSERT OR REPLACE INTO heads VALUES (?, ?, ?, ?, ?)",
                (tenant, name, conversation, message.offset, message.partition),
            )
            self._there[conversation] = True
        if self._is_there(conversation):  # else it came after the conversation had gone
            self._insert(message, conversation, key)

    def _erase(self, message: RawMessage, conversation: str, key: bytes) -> None:
        if key.startswith(HEAD):
            self._write.execute(
                "DELETE FROM heads WHERE conversation = ?1 AND offset IN"
                " (SELECT offset FROM records WHERE conversation = ?1 AND key = ?2)",
                (conversation, key),
            )
            del self._there[conversation]
            if not self._is_there(conversation):
                self._forget(conversation)
                return
        self._write.execute("DELETE FROM records WHERE conversation = ? AND key = ?", (conversation, key))
        self._insert(message, conversation, key)

    def _forget(self, conversation: str) -> None:
        self._write.execute("DELETE FROM records WHERE conversation = ?", (conversation,))

    def _insert(self, message: RawMessage, conversation: str, key: bytes) -> None:
        self._write.execute(
            "INSERT OR REPLACE INTO records VALUES (?, ?, ?, ?, ?)",
            (conversation, message.offset, message.timestamp_ms, key, message.value),
        )

    def _is_there(self, conversation: str) -> bool:
        there = self._there.get(conversation)
        if there is None:
            row = self._write.execute("SELECT 1 FROM heads WHERE conversation = ?", (conversation,)).fetchone()
            there = self._there[conversation] = row is not None
        return there


@contextmanager
def _transaction(connection: sqlite3.Connection) -> Generator[sqlite3.Connection]:
    """Commits at its end, unless it raises."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield connection
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
