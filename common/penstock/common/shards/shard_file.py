"""The SQLite file that finds records of one conversation in the shared topic: a copy of what is live there.

One thread writes, in the order of the log; others read, each by a connection of its own. The topic is the truth: a file
that cannot be trusted is made again from it.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.common import file_lock, log_copies
from penstock.common.log_copies import CopyFormat
from penstock.common.reader import RawMessage
from penstock.common.shards.addresses import HEAD, split_key
from penstock.schemas.errors import Overloaded
from penstock.schemas.topics import conversation_of_key

VERSION = 2
# Records come in the order of the log and are read by conversation: so their table grows at its end, and only an index
# of numbers is written everywhere. `place` is the offset times the number of partitions, and the partition.
_SCHEMA = """
CREATE TABLE IF NOT EXISTS conversations (
  number INTEGER PRIMARY KEY, conversation TEXT NOT NULL UNIQUE, tenant TEXT NOT NULL, id TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS by_tenant ON conversations (tenant, id);
CREATE TABLE IF NOT EXISTS heads (
  number INTEGER NOT NULL, place INTEGER NOT NULL, PRIMARY KEY (number, place)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS records (
  place INTEGER PRIMARY KEY, number INTEGER NOT NULL, time_ms INTEGER NOT NULL, key BLOB NOT NULL, value BLOB);
CREATE INDEX IF NOT EXISTS by_conversation ON records (number, place);
CREATE TABLE IF NOT EXISTS positions (
  partition INTEGER PRIMARY KEY, offset INTEGER NOT NULL, followed_ms INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS strays (
  key BLOB PRIMARY KEY, partition INTEGER NOT NULL, time_ms INTEGER NOT NULL) WITHOUT ROWID;
"""
CACHE_KBYTES = 32 << 10
"""Of the connection that writes."""
_NUMBER = "(SELECT number FROM conversations WHERE conversation = ?)"
_ROW = "place / ?, time_ms, key, value"
_SPAN = """
SELECT (SELECT min(place) FROM heads WHERE number = found.number), place, time_ms
FROM conversations AS found JOIN records USING (number) WHERE conversation = ? ORDER BY place DESC LIMIT 1
"""
_FAR = 1 << 62
_FORMAT = CopyFormat(
    what="the copy of conversations",
    schema=_SCHEMA,
    tables=("conversations", "heads", "records", "positions", "strays"),
)

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
    """Reads are of what was written last. Opening and reading raise Overloaded when the file does not allow it now."""

    def __init__(self, path: Path, topic_id: str, partitions: int) -> None:
        """What is there of a topic with another id is dropped."""
        self._path = path
        self._partitions = partitions
        self._readers = threading.local()
        self._open: list[_Reader] = []
        self._opening = threading.Lock()
        self._is_closed = False
        self._lock = self._hold()
        try:
            log_copies.open_or_start_anew(path, f"{VERSION} {topic_id} {partitions}", _FORMAT)
            self._writer = log_copies.connect(self._path)
        except BaseException:  # who tries again in this process must not find its own lock
            os.close(self._lock)
            raise
        self._writer.execute(f"PRAGMA cache_size=-{CACHE_KBYTES}")
        self._to_wipe = False
        """Whether the log of writes may hold what was erased. What a killed process left went when this was opened."""

    def close(self) -> None:
        """Nobody may write any more. Reads that are under way end first; later ones raise Overloaded."""
        with self._opening:
            self._is_closed = True
        for reader in self._open:
            with reader.lock:  # SQLite does not bear that a connection is closed under a read
                reader.connection.close()
        self._writer.close()
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

    # -- writing, on one thread

    def positions(self) -> dict[int, Followed]:
        rows = self._writer.execute("SELECT partition, offset, followed_ms FROM positions")
        return {partition: Followed(offset, followed_ms) for partition, offset, followed_ms in rows}

    def forget(self, partition: int) -> None:
        """Drop all that was read of a partition."""
        with _transaction(self._writer) as write:
            write.execute("DELETE FROM records WHERE place % ? = ?", (self._partitions, partition))
            write.execute("DELETE FROM heads WHERE place % ? = ?", (self._partitions, partition))
            write.execute("DELETE FROM conversations WHERE number NOT IN (SELECT number FROM heads)")
            for table in ("positions", "strays"):
                write.execute(f"DELETE FROM {table} WHERE partition = ?", (partition,))

    def apply(self, batch: Iterable[RawMessage], positions: Mapping[int, int], now_ms: int) -> None:
        """Take the next records of their partitions; everything below `positions` is read then.

        What was erased is gone from the disk too, unless somebody reads just now: then with the next call.
        """
        with _transaction(self._writer) as write:
            writing = _Writing(write, self._partitions)
            for message in batch:
                split = split_key(message.key)
                if split is not None:
                    writing.take(message, *split)
            writing.flush()
            write.executemany(
                "INSERT OR REPLACE INTO positions VALUES (?, ?, ?)",
                [(partition, offset, now_ms) for partition, offset in positions.items()],
            )
        self._to_wipe = self._to_wipe or writing.erases
        if self._to_wipe:
            self._to_wipe = not log_copies.wiped(self._writer)

    # -- reading, on any thread

    def span(self, conversation: str) -> Span | None:
        """None: there is no such conversation."""
        # One statement: between two the conversation may go, and another one get its number.
        row = self._one(_SPAN, conversation)
        if row is None:
            return None
        head, place, time_ms = row
        return Span(head // self._partitions, place // self._partitions + 1, time_ms)

    def records(self, conversation: str, begin: int, end: int | None = None, most: int | None = None) -> list[Row]:
        """The records from the offset `begin` to before `end`, the first `most` of them."""
        return self._all(
            f"SELECT {_ROW} FROM records WHERE number = {_NUMBER} AND place >= ? AND place < ? ORDER BY place LIMIT ?",
            self._partitions,
            conversation,
            begin * self._partitions,
            _FAR if end is None else end * self._partitions,
            -1 if most is None else most,
        )

    def back(self, conversation: str, end: int, records: int) -> int | None:
        """The offset of the record that stands so many before `end`; None: there are not so many."""
        row = self._one(
            f"SELECT place FROM records WHERE number = {_NUMBER} AND place < ? ORDER BY place DESC LIMIT 1 OFFSET ?",
            conversation,
            end * self._partitions,
            records - 1,
        )
        return None if row is None else row[0] // self._partitions

    def last(self, conversation: str) -> Row | None:
        """The newest record."""
        return self._one(
            f"SELECT {_ROW} FROM records WHERE number = {_NUMBER} ORDER BY place DESC LIMIT 1",
            self._partitions,
            conversation,
        )

    def live_keys(self, conversation: str) -> list[bytes]:
        """Of the records that have no tombstone, in the order of the log."""
        rows = self._all(
            f"SELECT key FROM records WHERE number = {_NUMBER} AND value IS NOT NULL ORDER BY place", conversation
        )
        return list(dict.fromkeys(key for (key,) in rows))

    def ids(self, tenant: str) -> list[str]:
        """Of a tenant's conversations, in order."""
        return [one for (one,) in self._all("SELECT id FROM conversations WHERE tenant = ? ORDER BY id", tenant)]

    def everyone(self) -> list[tuple[str, str]]:
        """(tenant, id) of all conversations."""
        return self._all("SELECT tenant, id FROM conversations")

    def strays(self, before_ms: int, most: int) -> list[tuple[int, bytes]]:
        """(partition, key in the topic) of records that no conversation holds, written before that time.

        Their conversation had gone when they were written, or its removal was cut off.
        """
        return self._all("SELECT partition, key FROM strays WHERE time_ms < ? LIMIT ?", before_ms, most)

    def _one(self, statement: str, *values: str | int) -> Any:
        with self._reading() as connection:
            return connection.execute(statement, values).fetchone()

    def _all(self, statement: str, *values: str | int) -> list[Any]:
        with self._reading() as connection:
            return connection.execute(statement, values).fetchall()

    @contextmanager
    def _reading(self) -> Generator[sqlite3.Connection]:
        try:
            reader = self._reader()
            with reader.lock:
                yield reader.connection
        except sqlite3.Error as error:
            raise Overloaded(f"the copy of conversations at {self._path}: {error}", retry_after_s=1) from error

    def _reader(self) -> _Reader:
        reader: _Reader | None = getattr(self._readers, "reader", None)
        if reader is None:
            with self._opening:
                if self._is_closed:
                    raise sqlite3.ProgrammingError("it is closed")
                reader = self._readers.reader = _Reader(log_copies.connect(self._path))
                self._open.append(reader)
        return reader


@dataclass(eq=False, slots=True)
class _Reader:
    """The connection of one thread. Hold the lock while it reads."""

    connection: sqlite3.Connection
    lock: threading.Lock = field(default_factory=threading.Lock)


class _Writing:
    """One transaction. A conversation has a number while it has a head."""

    def __init__(self, write: sqlite3.Connection, partitions: int) -> None:
        self._write, self._partitions = write, partitions
        self._numbers: dict[str, int | None] = {}
        self._rows: list[tuple[int, int, int, bytes, bytes | None]] = []
        """To be inserted."""
        self._places: dict[int, dict[bytes, list[int]]] = {}
        """Of conversations in which something is erased: by key where its records stand."""
        self._has_strays = write.execute("SELECT 1 FROM strays LIMIT 1").fetchone() is not None
        self.erases = False

    def take(self, message: RawMessage, conversation: str, key: bytes) -> None:
        number = self._number(conversation)
        if self._has_strays:  # whatever is behind it with its key takes its place
            self._write.execute("DELETE FROM strays WHERE key = ?", (message.key,))
        if message.value is None:
            self.erases = True
            if number is not None:
                self._erase(message, number, conversation, key)
            return
        if key.startswith(HEAD):
            number = self._begin(conversation) if number is None else number
            self._write.execute("INSERT OR REPLACE INTO heads VALUES (?, ?)", (number, self._place(message)))
        if number is not None:
            self._insert(message, number, key)
        else:
            self._is_stray([(message.key or b"", message.partition, message.timestamp_ms)])

    def flush(self) -> None:
        self._write.executemany("INSERT OR REPLACE INTO records VALUES (?, ?, ?, ?, ?)", self._rows)
        self._rows.clear()

    def _number(self, conversation: str) -> int | None:
        if conversation not in self._numbers:
            row = self._write.execute(
                "SELECT number FROM conversations WHERE conversation = ?", (conversation,)
            ).fetchone()
            self._numbers[conversation] = None if row is None else row[0]
        return self._numbers[conversation]

    def _begin(self, conversation: str) -> int:
        tenant, name = conversation_of_key(conversation)
        made = self._write.execute(
            "INSERT INTO conversations (conversation, tenant, id) VALUES (?, ?, ?)", (conversation, tenant, name)
        )
        number = self._numbers[conversation] = made.lastrowid or 0
        return number

    def _erase(self, message: RawMessage, number: int, conversation: str, key: bytes) -> None:
        known = self._known(number)
        places = [(place,) for place in known.pop(key, ())]
        if key.startswith(HEAD):
            self._write.executemany("DELETE FROM heads WHERE number = ? AND place = ?", [(number, *p) for p in places])
            if self._write.execute("SELECT 1 FROM heads WHERE number = ?", (number,)).fetchone() is None:
                left = self._write.execute(
                    "SELECT key, time_ms FROM records WHERE number = ? AND value IS NOT NULL", (number,)
                ).fetchall()
                prefix = f"{conversation}/".encode()
                self._is_stray([(prefix + one, message.partition, time_ms) for one, time_ms in left if one != key])
                self._write.execute("DELETE FROM records WHERE number = ?", (number,))
                self._write.execute("DELETE FROM conversations WHERE number = ?", (number,))
                del self._places[number]
                self._numbers[conversation] = None
                return
        self._write.executemany("DELETE FROM records WHERE place = ?", places)
        self._insert(message, number, key)

    def _is_stray(self, records: Sequence[tuple[bytes, int, int]]) -> None:
        """(key in the topic, partition, time in ms since the epoch) of each."""
        self._write.executemany("INSERT OR REPLACE INTO strays VALUES (?, ?, ?)", records)
        self._has_strays = self._has_strays or bool(records)

    def _known(self, number: int) -> dict[bytes, list[int]]:
        if number not in self._places:
            self.flush()
            known = self._places[number] = dict[bytes, list[int]]()
            for place, key in self._write.execute("SELECT place, key FROM records WHERE number = ?", (number,)):
                known.setdefault(key, []).append(place)
        else:
            self.flush()
        return self._places[number]

    def _insert(self, message: RawMessage, number: int, key: bytes) -> None:
        place = self._place(message)
        self._rows.append((place, number, message.timestamp_ms, key, message.value))
        if (known := self._places.get(number)) is not None:
            known.setdefault(key, []).append(place)

    def _place(self, message: RawMessage) -> int:
        return message.offset * self._partitions + message.partition


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
