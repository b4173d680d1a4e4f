"""The view on disk: rows of requests and the offsets they reflect, written in one SQLite transaction by one thread."""

from __future__ import annotations

import logging
import queue
import sqlite3
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.gateway.entries import Entry, Key, facts, restored
from penstock.schemas.codec import Codec, default_codec
from penstock.schemas.records import ResultEvent
from penstock.schemas.topics import TP

logger = logging.getLogger(__name__)

VERSION = 2
MAX_WAITING = 4
"""Batches that wait for the writer."""
RETRY_S = 1.0

_META = "CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value TEXT NOT NULL);"
_SCHEMA = """
CREATE TABLE IF NOT EXISTS requests (
  tenant TEXT NOT NULL, request_id TEXT NOT NULL, accepted_ms INTEGER NOT NULL, updated_ms INTEGER NOT NULL,
  status TEXT NOT NULL, done INTEGER NOT NULL, conversation_id TEXT, facts TEXT NOT NULL, text TEXT NOT NULL,
  terminal BLOB, erased INTEGER NOT NULL DEFAULT 0, PRIMARY KEY (tenant, request_id)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_time ON requests (tenant, accepted_ms, request_id);
CREATE INDEX IF NOT EXISTS by_update ON requests (updated_ms);
CREATE TABLE IF NOT EXISTS offsets (
  topic TEXT NOT NULL, partition INTEGER NOT NULL, offset INTEGER NOT NULL, PRIMARY KEY (topic, partition));
"""
_UPSERT = "INSERT OR REPLACE INTO requests VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
_COLUMNS = "tenant, request_id, accepted_ms, facts, text, terminal, erased"

Row = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Batch:
    """What one transaction holds; `written` is set when it stands in the file."""

    rows: Sequence[Row]
    offsets: Mapping[TP, int]
    written: threading.Event


class Store:
    """One SQLite file. `submit` hands batches to the writer thread; reads come from their own connection."""

    def __init__(self, path: Path, cluster: str, codec: Codec | None = None) -> None:
        self._codec = codec or default_codec()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._open_or_start_anew(cluster)
        self._reader = self._connect()
        # Pages are read on threads; a look-up on the event loop must not wait for one.
        self._page_reader = self._connect()
        self._queue: queue.Queue[Batch | None] = queue.Queue()
        self._closing = threading.Event()
        self.failure: BaseException | None = None
        """Why the newest batch could not be written; None again when it was."""
        self._thread = threading.Thread(target=self._write_forever, name="view-writer", daemon=True)
        self._thread.start()

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self._path, check_same_thread=False, isolation_level=None, timeout=10)
        connection.execute("PRAGMA journal_mode=WAL")
        # The log is the truth: what a power cut takes from this file is read again.
        connection.execute("PRAGMA synchronous=NORMAL")
        return connection

    def _open_or_start_anew(self, cluster: str) -> None:
        """A file of another cluster, prefix or version says nothing about this log: it is emptied."""
        identity = f"{VERSION} {cluster}"
        try:
            connection = self._connect()
            connection.executescript(_META)
            row = connection.execute("SELECT value FROM meta WHERE name = 'identity'").fetchone()
            if row is not None and row[0] != identity:
                # Of another version its columns may differ too.
                connection.executescript("DROP TABLE IF EXISTS requests; DROP TABLE IF EXISTS offsets;")
            connection.executescript(_SCHEMA)
        except sqlite3.DatabaseError as error:
            if getattr(error, "sqlite_errorcode", None) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                raise  # somebody else has it open: it is not ours to throw away
            logger.warning("view.unreadable: it is made anew from the topics")
            for suffix in ("", "-wal", "-shm"):
                Path(f"{self._path}{suffix}").unlink(missing_ok=True)
            connection = self._connect()
            connection.executescript(_META + _SCHEMA)
        connection.execute("INSERT OR REPLACE INTO meta VALUES ('identity', ?)", (identity,))
        connection.close()

    # -- writing

    def row(self, entry: Entry) -> Row:
        """An entry as its row. Text is kept until the outcome, which holds it whole."""
        terminal = entry.terminal
        return (
            entry.tenant,
            entry.request_id,
            entry.accepted_ms,
            entry.updated_ms,
            entry.status_name,
            int(entry.done or entry.blanked),
            entry.conversation_id,
            facts(entry),
            "" if terminal is not None and terminal.output_artifact is None else entry.fold.text,
            None if terminal is None else self._codec.encode(terminal),
            int(entry.erased),
        )

    @property
    def is_behind(self) -> bool:
        """Whether enough batches wait: the caller keeps what it has, and reads no further."""
        return self._queue.qsize() >= MAX_WAITING

    def submit(self, batch: Batch) -> None:
        """Hand a batch to the writer."""
        self._queue.put_nowait(batch)

    def _write_forever(self) -> None:
        connection = self._connect()
        try:
            while (batch := self._queue.get()) is not None:
                if not self._write_at_last(connection, batch):
                    return  # a later batch's offsets would cover the rows that are missing
        finally:
            connection.close()

    def _write_at_last(self, connection: sqlite3.Connection, batch: Batch) -> bool:
        """Try until it is written: a full disk is emptied, a lock is given back. False when closing ended that."""
        while True:
            try:
                self._write(connection, batch)
            except sqlite3.Error as error:
                if self.failure is None:
                    logger.exception("view.not_written: trying again")
                self.failure = error
                if connection.in_transaction:
                    connection.rollback()
                if self._closing.wait(RETRY_S):
                    return False
            else:
                self.failure = None
                return True

    def _write(self, connection: sqlite3.Connection, batch: Batch) -> None:
        connection.execute("BEGIN IMMEDIATE")
        connection.executemany(_UPSERT, batch.rows)
        connection.executemany(
            "INSERT OR REPLACE INTO offsets VALUES (?, ?, ?)",
            [(topic, partition, offset) for (topic, partition), offset in batch.offsets.items()],
        )
        connection.execute("COMMIT")
        batch.written.set()

    def prune(self, before_ms: int) -> int:
        """Delete rows not touched since, some at a time so that the writer gets its turns; how many."""
        chosen = "SELECT tenant, request_id FROM requests WHERE updated_ms < ? LIMIT 1000"
        connection = self._connect()
        total = 0
        try:
            while True:
                query = f"DELETE FROM requests WHERE (tenant, request_id) IN ({chosen})"
                count = connection.execute(query, (before_ms,)).rowcount
                total += count
                if count < 1000 or self._closing.is_set():
                    return total
        finally:
            connection.close()

    def close(self) -> None:
        """Write what was handed over, unless that fails, and end."""
        self._closing.set()
        self._queue.put(None)
        self._thread.join(10)
        self._reader.close()
        self._page_reader.close()

    # -- reading

    def offsets(self) -> dict[TP, int]:
        return {(topic, partition): at for topic, partition, at in self._reader.execute("SELECT * FROM offsets")}

    def live(self) -> list[Entry]:
        """The entries that are not done."""
        rows = self._reader.execute(f"SELECT {_COLUMNS} FROM requests WHERE done = 0").fetchall()
        return [self._entry(row) for row in rows]

    def get(self, key: Key) -> Entry | None:
        row = self._reader.execute(
            f"SELECT {_COLUMNS} FROM requests WHERE tenant = ? AND request_id = ?", key
        ).fetchone()
        return None if row is None else self._entry(row)

    def page(
        self,
        tenant: str,
        *,
        limit: int,
        after: str | None,
        newest_first: bool,
        status: str | None = None,
        conversation_id: str | None = None,
    ) -> list[Entry]:
        """One page of a tenant's requests in the order of acceptance, behind the request `after`."""
        where, values = ["tenant = ?", "erased = 0"], [tenant]
        if status is not None:
            where.append("status = ?")
            values.append(status)
        if conversation_id is not None:
            where.append("conversation_id = ?")
            values.append(conversation_id)
        if after is not None:
            compare = "<" if newest_first else ">"
            at = "(SELECT accepted_ms FROM requests WHERE tenant = ? AND request_id = ?)"
            where.append(f"(accepted_ms, request_id) {compare} ({at}, ?)")
            values += [tenant, after, after]
        order = "DESC" if newest_first else "ASC"
        query = (
            f"SELECT {_COLUMNS} FROM requests WHERE {' AND '.join(where)}"
            f" ORDER BY accepted_ms {order}, request_id {order} LIMIT ?"
        )
        return [self._entry(row) for row in self._page_reader.execute(query, [*values, limit]).fetchall()]

    def _entry(self, row: Row) -> Entry:
        tenant, request_id, accepted_ms, stored, text, terminal, erased = row
        event = None if terminal is None else self._codec.decode(terminal, ResultEvent)
        return restored(
            tenant, request_id, stored, text=text, terminal=event, accepted_ms=accepted_ms, erased=bool(erased)
        )
