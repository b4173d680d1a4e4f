"""The view on disk: rows of requests and the offsets they reflect, written in one SQLite transaction by one thread."""

from __future__ import annotations

import logging
import queue
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from penstock.common import log_copies
from penstock.gateway.view import view_file
from penstock.gateway.view.change_over import COLUMNS, IF_KNOWN, ChangeOver, Imported, LiveCount
from penstock.gateway.view.entries import Entry
from penstock.gateway.view.filters import ALL, RequestFilter
from penstock.gateway.view.key_filter import KeyFilter
from penstock.gateway.view.request_pages import numbers_of_page
from penstock.gateway.view.request_state import NEVER_MS, Key
from penstock.gateway.view.rows import Row, Snapshot, counted_of, restored, row_of
from penstock.gateway.view.wait_counts import AGES_MS
from penstock.schemas.topics import TP

logger = logging.getLogger(__name__)

MAX_WAITING = 4
"""Batches that wait for the writer."""
RETRY_S = 1.0
_AT_ONCE = (256, 64, 16, 4, 1)
"""Rows of one statement: few sizes, so that each is compiled once."""

_REQUESTS = f"requests ({COLUMNS})"
_PRUNED_AT_ONCE = 1_000
_OLDEST = " UNION ALL ".join(f"SELECT min(updated_ms) FROM requests WHERE done = {done}" for done in (0, 1))

Due = tuple[int, str, str]
"""(when it had to end, tenant, request_id)"""
LivePlace = tuple[str, int, str]
"""(as what it is counted, when it was accepted, request_id)"""


class Turn(NamedTuple):
    """A request of a conversation. `counted_of` reads as what it is counted."""

    accepted_ms: int
    request_id: str
    counted: str


FIRST_TURN = Turn(-1, "", "")


class DeviceMinute(NamedTuple):
    """Memory of a device in bytes, as its worker last reported it in a minute."""

    minute: int
    worker: str
    device: str
    limit_bytes: int
    reserved_bytes: int
    foreign_bytes: int | None


@dataclass(frozen=True, slots=True)
class Batch:
    """What one transaction holds; `written` is set when it stands in the file."""

    rows: Sequence[Snapshot]
    offsets: Mapping[TP, int]
    written: threading.Event
    facts: Mapping[str, bytes | None] = field(default_factory=dict[str, bytes | None])
    """Records of conversations' facts, by the conversation's key; None for those that were taken away."""
    counted: Mapping[str, Sequence[tuple[Any, ...]]] = field(default_factory=dict[str, Sequence[tuple[Any, ...]]])
    """Rows of the history and of usage, by table."""


class Store:
    """One SQLite file. `submit` hands batches to the writer thread; reads come from connections of their own.

    Raises Overloaded when the file cannot be opened now.
    """

    def __init__(self, path: Path, cluster: str, known: KeyFilter | None = None) -> None:
        """`known` is empty; by default it has the usual size."""
        self.path, self._cluster = path, cluster
        view_file.open_or_start_anew(path, cluster)
        # Pages are read on threads; a look-up on the event loop must not wait for one.
        self._reader = self._connect()
        self._pages = threading.local()
        self._page_readers: list[sqlite3.Connection] = []
        self._known = known or KeyFilter()
        self._imported: Imported | None = None
        add_keys(self._reader, self._known)
        self._pruned = False
        """Rows were deleted since the filter was last asked to forget."""
        self._queue: queue.Queue[Batch | ChangeOver | None] = queue.Queue()
        self._closing = threading.Event()
        self.failure: BaseException | None = None
        """Why the newest batch could not be written; None again when it was."""
        self._to_wipe = False
        """Facts were taken away, which may still stand in the write-ahead log."""
        self._thread = threading.Thread(target=self._write_forever, name="view-writer", daemon=True)
        self._thread.start()

    def _connect(self) -> sqlite3.Connection:
        return log_copies.connect(self.path)

    # -- writing

    @property
    def is_behind(self) -> bool:
        """Whether enough batches wait: the caller keeps what it has, and reads no further."""
        return self._queue.qsize() >= MAX_WAITING

    @property
    def is_busy(self) -> bool:
        """Whether a batch waits behind the one that is being written."""
        return self._queue.qsize() > 1

    @property
    def has_ended(self) -> bool:
        """Whether nothing is written any more: the store is closed, or a fault has ended the writer."""
        return not self._thread.is_alive()

    def submit(self, batch: Batch) -> None:
        """Hand a batch to the writer."""
        self._queue.put_nowait(batch)

    def _write_forever(self) -> None:
        connection = self._connect()
        try:
            while (batch := self._queue.get()) is not None:
                if isinstance(batch, ChangeOver):
                    if batch.run(connection, self.path, partial(self._write_next, connection)):
                        connection = self._connect()
                    if self._closing.is_set() and self.failure is not None:
                        return
                elif not self._write_at_last(connection, batch):
                    return  # a later batch's offsets would cover the rows that are missing
        except Exception as error:
            logger.exception("view.writer_ended")
            self.failure = error
        finally:
            connection.close()

    def _write_next(self, connection: sqlite3.Connection) -> Batch | None:
        """While files change: write a batch if one waits. Raises InterruptedError when the store closes."""
        try:
            batch = self._queue.get_nowait()
        except queue.Empty:
            return None
        if not isinstance(batch, Batch):
            self._queue.put_nowait(batch)
        elif self._write_at_last(connection, batch):
            return batch
        raise InterruptedError("the gateway stops")

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
        rows = batch.rows
        connection.execute("BEGIN IMMEDIATE")
        _put(connection, _REQUESTS, [row_of(row) for row in rows], IF_KNOWN)
        _put(connection, "conversations", [(key, one) for key, one in batch.facts.items() if one is not None])
        gone = [(key,) for key, one in batch.facts.items() if one is None]
        connection.executemany("DELETE FROM conversations WHERE key = ?", gone)
        for table, counted in batch.counted.items():
            _put(connection, table, counted)
        _put(connection, "offsets", [(*tp, offset) for tp, offset in batch.offsets.items()])
        connection.execute("COMMIT")
        for row in rows:  # here rather than on the event loop: until `written` nobody needs to ask the file
            self._known.add((row.tenant, row.request_id), row.updated_ms)
        if self._pruned:  # by this thread, which alone writes rows: no row comes in between
            self._pruned = False
            self._known.forget(min((at_ms for (at_ms,) in connection.execute(_OLDEST) if at_ms), default=NEVER_MS))
        batch.written.set()
        self._to_wipe = self._to_wipe or bool(gone)
        if self._to_wipe:
            self._to_wipe = not log_copies.wiped(connection)

    def begin_change_over(self, imported: Imported) -> ChangeOver:
        """The writer copies what the file has to the new one, between the batches that it writes."""
        over = ChangeOver(imported=imported)
        self._queue.put_nowait(over)
        return over

    def switch(self, imported: Imported) -> None:
        """Read the new file. Raises sqlite3.Error."""
        reader = log_copies.connect(imported.path)
        self._page_readers.append(self._reader)  # it is closed with the others
        self.path, self._reader, self._known, self._imported = imported.path, reader, imported.known, imported

    def of_snapshot(self, key: Key) -> Entry | None:
        """The request as the snapshot has it that the file was made from."""
        imported = self._imported
        if imported is None or key not in self._known:
            return None
        query = f"SELECT {COLUMNS} FROM requests WHERE tenant = ? AND request_id = ? AND number <= ?"
        row = self._reader.execute(query, (*key, imported.last_number)).fetchone()
        return None if row is None else restored(Row._make(row))

    def is_whole(self, whole: bool) -> None:
        """Say whether the file holds all up to its offsets; if not, the next process starts it anew. For a thread."""
        with closing(self._connect()) as connection:
            view_file.identify(connection, self._cluster if whole else None)

    def prune(self, before_ms: int) -> bool:
        """Delete some rows of what has ended that were not touched since; whether there may be more.

        For a thread: the writer has its turns in between.
        """
        chosen = f"SELECT number FROM requests WHERE done = 1 AND updated_ms < ? LIMIT {_PRUNED_AT_ONCE}"
        query = f"DELETE FROM requests WHERE number IN ({chosen})"
        with closing(self._connect()) as connection:
            deleted = connection.execute(query, (before_ms,)).rowcount
        if deleted:
            self._pruned = True
        return deleted == _PRUNED_AT_ONCE and not self._closing.is_set()

    def prune_counted(self, before: int, before_day: str) -> None:
        """Delete the history before this minute, and usage before this day. For a thread."""
        with closing(self._connect()) as connection:
            connection.execute("DELETE FROM usage WHERE day < ?", (before_day,))
            for table in ("minutes", "device_minutes"):
                connection.execute(f"DELETE FROM {table} WHERE minute < ?", (before,))

    def silent_live(self, before_ms: int) -> list[Entry]:
        """Some rows of what has not ended that were not touched since. For a thread."""
        query = f"SELECT {COLUMNS} FROM requests WHERE done = 0 AND updated_ms < ? LIMIT {_PRUNED_AT_ONCE}"
        return [restored(Row._make(row)) for row in self._page_connection().execute(query, (before_ms,))]

    def delete(self, keys: Sequence[Key], before_ms: int) -> None:
        """Delete these rows, but for those that were touched since. For a thread."""
        query = "DELETE FROM requests WHERE tenant = ? AND request_id = ? AND updated_ms < ?"
        with closing(self._connect()) as connection:
            connection.execute("BEGIN IMMEDIATE")
            connection.executemany(query, [(*key, before_ms) for key in keys])
            connection.execute("COMMIT")
        self._pruned = True

    def close(self) -> None:
        """Write what was handed over, unless that fails, and end."""
        self._closing.set()
        self._queue.put(None)
        self._thread.join(10)
        for connection in (self._reader, *self._page_readers):
            connection.close()

    # -- reading

    def offsets(self) -> dict[TP, int]:
        return offsets_of(self._reader)

    def live_counts(self) -> Iterator[LiveCount]:
        return live_counts(self._reader)

    def minutes(self) -> list[tuple[int, str]]:
        """The history, as `Minute.to_text` has it, by minute since the epoch."""
        return self._reader.execute("SELECT * FROM minutes").fetchall()

    def usage(self) -> list[tuple[Any, ...]]:
        """Rows as `Usage.drain` has them."""
        return self._reader.execute("SELECT * FROM usage").fetchall()

    def devices(self, first: int) -> list[tuple[str, str]]:
        """Worker and name of all devices that were reported from a minute on, in order. For a thread."""
        query = "SELECT DISTINCT worker, device FROM device_minutes WHERE minute >= ? ORDER BY worker, device"
        return self._page_connection().execute(query, (first,)).fetchall()

    def device_minutes(self, first: int, last_device: tuple[str, str]) -> Iterable[DeviceMinute]:
        """The memory of devices up to this one from a minute on, in the order of time. For a thread."""
        query = "SELECT * FROM device_minutes WHERE minute >= ? AND (worker, device) <= (?, ?)"
        return map(DeviceMinute._make, self._page_connection().execute(query, (first, *last_device)))

    def live_turns(self, tenant: str, conversation_id: str, after: Turn, until_ms: int, most: int) -> list[Turn]:
        """A conversation's requests that are not done and were accepted until then: the first of those behind `after`.

        Blocks.
        """
        query = (
            "SELECT accepted_ms, request_id, counted FROM requests INDEXED BY live_turns"
            " WHERE done = 0 AND tenant = ? AND conversation_id = ? AND (accepted_ms, request_id) > (?, ?)"
            " AND accepted_ms <= ? ORDER BY accepted_ms, request_id LIMIT ?"
        )
        found = self._page_connection().execute(query, (tenant, conversation_id, *after[:2], until_ms, most))
        return list(map(Turn._make, found))

    def live_of_tenant(self, tenant: str, after: LivePlace, most: int) -> tuple[list[Entry], LivePlace]:
        """Some of the tenant's requests that are not done, behind a place, and where the last one is. For a thread."""
        query = (
            f"SELECT {COLUMNS} FROM requests INDEXED BY live WHERE done = 0 AND tenant = ?"
            " AND (counted, accepted_ms, request_id) > (?, ?, ?) ORDER BY counted, accepted_ms, request_id LIMIT ?"
        )
        found = [Row._make(row) for row in self._page_connection().execute(query, (tenant, *after, most))]
        last = found[-1] if found else None
        place = after if last is None else (last.counted or "", last.accepted_ms, last.request_id)
        return [restored(row) for row in found], place

    def overdue(self, after: Due, before_ms: int, most: int) -> list[Due]:
        """Requests that are not done and had to end before a time: the first of those behind `after`. For a thread."""
        query = (
            "SELECT must_end_ms, tenant, request_id FROM requests"
            " WHERE done = 0 AND must_end_ms < ? AND (must_end_ms, tenant, request_id) > (?, ?, ?)"
            " ORDER BY must_end_ms, tenant, request_id LIMIT ?"
        )
        return self._page_connection().execute(query, (before_ms, *after, most)).fetchall()

    def get(self, key: Key) -> Entry | None:
        """What was handed over at some time before, if it is written by now."""
        if key not in self._known:
            return None
        query = f"SELECT {COLUMNS} FROM requests WHERE tenant = ? AND request_id = ?"
        row = self._reader.execute(query, key).fetchone()
        return None if row is None else restored(Row._make(row))

    def facts_of(self, keys: Sequence[str]) -> dict[str, bytes]:
        """The records of conversations' facts, by key; for those that have some. For a thread."""
        chosen = f"SELECT key, facts FROM conversations WHERE key IN ({', '.join('?' * len(keys))})"
        return dict(self._page_connection().execute(chosen, keys).fetchall())

    def page(
        self,
        tenant: str | None,
        *,
        limit: int,
        after: Key | None,
        newest_first: bool,
        where: RequestFilter = ALL,
    ) -> list[Entry] | None:
        """One page of the requests of a tenant, or of all, in the order of acceptance, behind the request `after`.

        None if that is unknown, which it is when it is older than two horizons. Blocks; any number of threads may ask.
        """
        connection = self._page_connection()
        numbers = numbers_of_page(connection, tenant, limit=limit, after=after, newest_first=newest_first, where=where)
        if not numbers:
            return numbers if numbers is None else []
        query = f"SELECT number, {COLUMNS} FROM requests WHERE number IN ({', '.join('?' * len(numbers))})"
        found = {number: restored(Row._make(row)) for number, *row in connection.execute(query, numbers)}
        return [found[number] for number in numbers if number in found]

    def _page_connection(self) -> sqlite3.Connection:
        """This thread's own."""
        path, connection = self.path, getattr(self._pages, "connection", None)
        if connection is None or self._pages.path != path:
            connection = log_copies.connect(path)
            self._pages.path, self._pages.connection = path, connection
            self._page_readers.append(connection)
        return connection


def offsets_of(connection: sqlite3.Connection) -> dict[TP, int]:
    return {(topic, partition): at for topic, partition, at in connection.execute("SELECT * FROM offsets")}


def live_counts(connection: sqlite3.Connection) -> Iterator[LiveCount]:
    query = (
        "SELECT tenant, counted, min(accepted_ms), count(*) FROM requests INDEXED BY live WHERE done = 0"
        f" GROUP BY tenant, counted, accepted_ms / {AGES_MS}"
    )
    for tenant, counted, accepted_ms, count in connection.execute(query):
        yield tenant, counted_of(counted), accepted_ms, count


def add_keys(connection: sqlite3.Connection, known: KeyFilter) -> None:
    """Add the keys of all rows."""
    ((newest_ms,),) = connection.execute("SELECT max(updated_ms) FROM requests")
    for key in connection.execute("SELECT tenant, request_id FROM requests INDEXED BY by_key"):
        known.add(key, newest_ms)


def _put(connection: sqlite3.Connection, table: str, rows: Sequence[Sequence[Any]], if_known: str = "") -> None:
    """Insert or replace, many rows in one statement: after each statement this thread waits its turn."""
    insert, at = "INSERT" if if_known else "INSERT OR REPLACE", 0
    for count in _AT_ONCE:
        while len(rows) - at >= count:
            places = f"({', '.join('?' * len(rows[at]))})"
            values = [value for row in rows[at : at + count] for value in row]
            connection.execute(f"{insert} INTO {table} VALUES {', '.join([places] * count)}{if_known}", values)
            at += count
