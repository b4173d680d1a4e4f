"""The SQLite file of a view: its tables and indices, and what becomes of one that is foreign or unreadable."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from penstock.common import log_copies
from penstock.common.log_copies import CopyFormat
from penstock.schemas.codec import RELEASED

VERSION = 11
# Lists are read in the order of acceptance. What few requests share has an index of that order; rows of one millisecond
# are put into the order of their ids when they are read. What many share, as a task, stands in the indices of time and
# status, with `erased` for SQLite to answer from them alone: rows are read only of what is listed. What is erased is in
# none. Most have completed: they are listed by the index of time.
# `counted` is as what the census counts a live request; that of one that is done is null.
_TABLES_SQL = """
CREATE TABLE IF NOT EXISTS requests (
  number INTEGER PRIMARY KEY, tenant TEXT NOT NULL, request_id TEXT NOT NULL, accepted_ms INTEGER NOT NULL,
  updated_ms INTEGER NOT NULL, done INTEGER NOT NULL, erased INTEGER NOT NULL, must_end_ms INTEGER NOT NULL,
  counted TEXT, status TEXT NOT NULL, conversation_id TEXT, user_id TEXT, session_id TEXT, correlation_id TEXT,
  task TEXT NOT NULL, model TEXT, klass TEXT NOT NULL, facts TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS conversations (key TEXT NOT NULL PRIMARY KEY, facts BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS minutes (minute INTEGER NOT NULL PRIMARY KEY, counted TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS device_minutes (
  minute INTEGER NOT NULL, worker TEXT NOT NULL, device TEXT NOT NULL,
  limit_bytes INTEGER NOT NULL, reserved_bytes INTEGER NOT NULL, foreign_bytes INTEGER,
  PRIMARY KEY (minute, worker, device)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS usage (
  day TEXT NOT NULL, tenant TEXT NOT NULL, model TEXT NOT NULL, key_id TEXT NOT NULL, shares TEXT NOT NULL,
  PRIMARY KEY (day, tenant, model, key_id)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS offsets (
  topic TEXT NOT NULL, partition INTEGER NOT NULL, offset INTEGER NOT NULL, PRIMARY KEY (topic, partition));
"""
_INDICES_SQL = """
CREATE UNIQUE INDEX IF NOT EXISTS by_key ON requests (tenant, request_id);
CREATE INDEX IF NOT EXISTS by_time ON requests (tenant, accepted_ms, request_id, task, model, klass, status, erased)
  WHERE erased = 0;
CREATE INDEX IF NOT EXISTS by_status ON requests (tenant, status, accepted_ms, request_id, task, model, klass, erased)
  WHERE erased = 0 AND status <> 'completed';
CREATE INDEX IF NOT EXISTS by_conversation ON requests (tenant, conversation_id, accepted_ms)
  WHERE erased = 0 AND conversation_id IS NOT NULL;
CREATE INDEX IF NOT EXISTS by_user ON requests (tenant, user_id, accepted_ms)
  WHERE erased = 0 AND user_id IS NOT NULL;
CREATE INDEX IF NOT EXISTS by_session ON requests (tenant, session_id, accepted_ms)
  WHERE erased = 0 AND session_id IS NOT NULL;
CREATE INDEX IF NOT EXISTS by_correlation ON requests (tenant, correlation_id, accepted_ms)
  WHERE erased = 0 AND correlation_id IS NOT NULL;
CREATE INDEX IF NOT EXISTS silent ON requests (done, updated_ms);
CREATE INDEX IF NOT EXISTS live ON requests (tenant, counted, accepted_ms, request_id) WHERE done = 0;
CREATE INDEX IF NOT EXISTS live_turns ON requests (tenant, conversation_id, accepted_ms, request_id)
  WHERE done = 0 AND conversation_id IS NOT NULL;
CREATE INDEX IF NOT EXISTS overdue ON requests (must_end_ms) WHERE done = 0;
"""
CONTENTS = ("requests", "conversations", "minutes", "device_minutes", "usage", "offsets")
_TABLES = (*CONTENTS, "texts", "outcomes")
"""Those of earlier versions too."""
_FORMAT = CopyFormat(what="the view", schema=_TABLES_SQL + _INDICES_SQL, tables=_TABLES)


def identify(connection: sqlite3.Connection, cluster: str | None) -> None:
    """The file is a whole view of this cluster. None: it is none, and is emptied when it is opened."""
    log_copies.identify(connection, "" if cluster is None else identity_of(cluster))


def open_or_start_anew(path: Path, cluster: str) -> None:
    """Make sure that the file is there. Raises Overloaded when it cannot be opened now, OSError.

    A file of another cluster, prefix or version is emptied, and one of a release that knew other schemas.
    """
    _take_over(path, cluster)
    log_copies.open_or_start_anew(path, identity_of(cluster), _FORMAT)


def imported_path(path: Path) -> Path:
    """Where a process makes its view from a snapshot. The next process moves a whole one to `path`."""
    return path.with_name(f"{path.name}.imported")


def _take_over(path: Path, cluster: str) -> None:
    imported = imported_path(path)
    if not imported.exists():
        return
    try:
        with closing(log_copies.connect(imported)) as connection:
            is_whole = log_copies.identity(connection) == identity_of(cluster)
            connection.execute("PRAGMA journal_mode=DELETE")  # all of it is in the one file then
    except sqlite3.DatabaseError as error:
        log_copies.raise_if_passing(error, _FORMAT.what, imported)
        is_whole = False
    if is_whole:
        log_copies.remove(path)
        imported.replace(path)
    log_copies.remove(imported)


def connect_without_log(path: Path) -> sqlite3.Connection:
    """For a file that is being made. If this ends halfway, the file is thrown away."""
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA journal_mode=OFF")
    connection.execute("PRAGMA synchronous=OFF")
    connection.execute("PRAGMA secure_delete=ON")
    return connection


def make_tables(connection: sqlite3.Connection) -> None:
    """Make the tables of a new file, without indices."""
    connection.executescript(log_copies.META + _TABLES_SQL)


def make_indices(connection: sqlite3.Connection) -> None:
    connection.executescript(_INDICES_SQL)


def empty(connection: sqlite3.Connection) -> None:
    """Delete and overwrite all rows."""
    connection.executescript("".join(f"DELETE FROM {name};" for name in CONTENTS))
    log_copies.wiped(connection)


def identity_of(cluster: str) -> str:
    """What views that may be compared have in common."""
    return f"{VERSION}.{RELEASED} {cluster}"
