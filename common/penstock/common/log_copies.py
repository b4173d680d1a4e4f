"""SQLite files that hold what topics hold: how they are opened, and what becomes of a foreign or unreadable one."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from penstock.schemas.errors import Overloaded

logger = logging.getLogger(__name__)

BUSY_S = 10
"""So long a call waits for another connection's lock."""
META = "CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value TEXT NOT NULL);"
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


@dataclass(frozen=True, kw_only=True, slots=True)
class CopyFormat:
    """The tables of a file. `tables` names those that are dropped with what they hold, of earlier versions too."""

    what: str
    """As errors name it."""
    schema: str
    tables: Sequence[str]


def connect(path: Path) -> sqlite3.Connection:
    """A connection for any thread. Raises sqlite3.Error."""
    connection = sqlite3.connect(path, check_same_thread=False, isolation_level=None, timeout=BUSY_S)
    connection.execute("PRAGMA journal_mode=WAL")
    # The log is the truth: what a power cut takes from this file is read again.
    connection.execute("PRAGMA synchronous=NORMAL")
    # What was erased is overwritten in the file, not left in free pages.
    connection.execute("PRAGMA secure_delete=ON")
    return connection


def wiped(connection: sqlite3.Connection) -> bool:
    """Empty the log of writes, where pages of before a deletion stand until it is full.

    False while somebody reads: nobody is waited for, and the writer asks again.
    """
    connection.execute("PRAGMA busy_timeout = 0")
    try:
        busy, _, _ = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    except sqlite3.Error:
        return False
    finally:
        connection.execute(f"PRAGMA busy_timeout = {BUSY_S * 1000}")
    return not busy


def open_or_start_anew(path: Path, identity: str, made_as: CopyFormat) -> None:
    """Make sure that the file is there, with these tables. Raises Overloaded when it cannot be opened now, OSError.

    One of another identity says nothing about this log: it is emptied.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        _prepare(path, identity, made_as)
    except sqlite3.DatabaseError as error:
        raise_if_passing(error, made_as.what, path)
        logger.warning("copy.unreadable path=%s: it is made anew from the topics", path)
        remove(path)
        _prepare(path, identity, made_as)


def raise_if_passing(error: sqlite3.DatabaseError, what: str, path: Path) -> None:
    """Raises Overloaded for an error that says nothing about what the file holds."""
    if getattr(error, "sqlite_errorcode", 0) & 0xFF in _PASSING:
        raise Overloaded(f"{what} at {path} cannot be opened: {error}", retry_after_s=1) from error


def _prepare(path: Path, wanted: str, made_as: CopyFormat) -> None:
    with closing(connect(path)) as connection:
        connection.executescript(META)
        if identity(connection) not in (None, wanted):
            # Of another version its columns may differ too.
            connection.executescript("".join(f"DROP TABLE IF EXISTS {name};" for name in made_as.tables))
        connection.executescript(made_as.schema)
        identify(connection, wanted)


def remove(path: Path) -> None:
    """Remove the file and what SQLite keeps beside it; one that is not there is no error."""
    for suffix in ("", "-wal", "-shm"):
        Path(f"{path}{suffix}").unlink(missing_ok=True)


def identity(connection: sqlite3.Connection) -> str | None:
    """As `identify` was last given; None in a new file."""
    row = connection.execute("SELECT value FROM meta WHERE name = 'identity'").fetchone()
    return None if row is None else row[0]


def identify(connection: sqlite3.Connection, identity: str) -> None:
    """The file holds what a log of this identity says."""
    connection.execute("INSERT OR REPLACE INTO meta VALUES ('identity', ?)", (identity,))
