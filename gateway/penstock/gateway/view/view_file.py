"""The SQLite file of a view: its tables and indices, and what becomes of one that is foreign or unreadable."""

from __future__ import annotations

import logging
import sqlite3
from pathlib import Path

from penstock.common import file_lock
from penstock.schemas.errors import Overloaded

logger = logging.getLogger(__name__)

VERSION = 7
BUSY_S = 10
"""So long a call waits for another connection's lock."""
_META = "CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value TEXT NOT NULL);"
# Lists are read in the order of acceptance. What few requests share has an index of that order. What many share, as a
# task, stands in the indices of time and status, with `erased` for SQLite to answer from them alone: rows are read only
# of what is listed. What is erased is in none.
# `counted` is as what the census counts a live request; that of one that is done is null.
_SCHEMA = """
CREATE TABLE IF NOT EXISTS requests (
  tenant TEXT NOT NULL, request_id TEXT NOT NULL, accepted_ms INTEGER NOT NULL, updated_ms INTEGER NOT NULL,
  done INTEGER NOT NULL, facts TEXT NOT NULL, erased INTEGER NOT NULL DEFAULT 0, must_end_ms INTEGER NOT NULL,
  counted TEXT, status TEXT NOT NULL, conversation_id TEXT, user_id TEXT, session_id TEXT, correlation_id TEXT,
  task TEXT NOT NULL, model TEXT, klass TEXT NOT NULL,
  PRIMARY KEY (tenant, request_id)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_time ON requests (tenant, accepted_ms, request_id, task, model, klass, erased)
  WHERE erased = 0;
CREATE INDEX IF NOT EXISTS by_status ON requests (tenant, status, accepted_ms, request_id, task, model, klass, erased)
  WHERE erased = 0;
CREATE INDEX IF NOT EXISTS by_conversation ON requests (tenant, conversation_id, accepted_ms, request_id)
  WHERE erased = 0 AND conversation_id IS NOT NULL;
CREATE INDEX IF NOT EXISTS by_both ON requests (tenant, conversation_id, status, accepted_ms, request_id)
  WHERE erased = 0 AND conversation_id IS NOT NULL;
CREATE INDEX IF NOT EXISTS by_user ON requests (tenant, user_id, accepted_ms, request_id)
  WHERE erased = 0 AND user_id IS NOT NULL;
CREATE INDEX IF NOT EXISTS by_session ON requests (tenant, session_id, accepted_ms, request_id)
  WHERE erased = 0 AND session_id IS NOT NULL;
CREATE INDEX IF NOT EXISTS by_correlation ON requests (tenant, correlation_id, accepted_ms, request_id)
  WHERE erased = 0 AND correlation_id IS NOT NULL;
CREATE INDEX IF NOT EXISTS silent ON requests (updated_ms) WHERE done = 1;
CREATE INDEX IF NOT EXISTS silent_live ON requests (updated_ms) WHERE done = 0;
CREATE INDEX IF NOT EXISTS live ON requests (tenant, counted, accepted_ms) WHERE done = 0;
CREATE INDEX IF NOT EXISTS live_turns ON requests (tenant, conversation_id, accepted_ms) WHERE done = 0;
CREATE INDEX IF NOT EXISTS overdue ON requests (must_end_ms) WHERE done = 0;
CREATE TABLE IF NOT EXISTS conversations (key TEXT NOT NULL PRIMARY KEY, facts BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS offsets (
  topic TEXT NOT NULL, partition INTEGER NOT NULL, offset INTEGER NOT NULL, PRIMARY KEY (topic, partition));
"""
_TABLES = ("requests", "texts", "outcomes", "conversations", "offsets")
"""Those of earlier versions too."""
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
"""Errors that say nothing about what the file holds: it is not ours to throw away then."""


def own(path: Path) -> int:
    """Take a view's file for this process: a descriptor, held until it is closed. Raises Overloaded, OSError.

    Two gateways that write one file take each other's requests back: what one has seen end, the other writes as live.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = Path(f"{path}.lock")
    held = file_lock.hold(lock)
    if held is None:
        raise Overloaded(
            f"the view at {path} is in use by the gateway with the pid {lock.read_text().strip()}: give each gateway a"
            " gateway.view_path of its own",
            retry_after_s=1,
        )
    return held


def connect(path: Path) -> sqlite3.Connection:
    """A connection for any thread. Raises sqlite3.Error."""
    connection = sqlite3.connect(path, check_same_thread=False, isolation_level=None, timeout=BUSY_S)
    connection.execute("PRAGMA journal_mode=WAL")
    # The log is the truth: what a power cut takes from this file is read again.
    connection.execute("PRAGMA synchronous=NORMAL")
    # What was erased is overwritten in the file, not left in free pages.
    connection.execute("PRAGMA secure_delete=ON")
    return connection


def open_or_start_anew(path: Path, cluster: str) -> None:
    """Make sure that the file is there, with our tables. Raises Overloaded when it cannot be opened now.

    A file of another cluster, prefix or version says nothing about this log: it is emptied.
    """
    identity = f"{VERSION} {cluster}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        connection = connect(path)
        connection.executescript(_META)
        row = connection.execute("SELECT value FROM meta WHERE name = 'identity'").fetchone()
        if row is not None and row[0] != identity:
            # Of another version its columns may differ too.
            connection.executescript("".join(f"DROP TABLE IF EXISTS {name};" for name in _TABLES))
        connection.executescript(_SCHEMA)
        connection.execute("INSERT OR REPLACE INTO meta VALUES ('identity', ?)", (identity,))
    except sqlite3.DatabaseError as error:
        if getattr(error, "sqlite_errorcode", 0) & 0xFF in _PASSING:
            raise Overloaded(f"the view at {path} cannot be opened: {error}", retry_after_s=1) from error
        logger.warning("view.unreadable: it is made anew from the topics")
        for suffix in ("", "-wal", "-shm"):
            Path(f"{path}{suffix}").unlink(missing_ok=True)
        connection = connect(path)
        connection.executescript(_META + _SCHEMA)
        connection.execute("INSERT OR REPLACE INTO meta VALUES ('identity', ?)", (identity,))
    connection.close()
