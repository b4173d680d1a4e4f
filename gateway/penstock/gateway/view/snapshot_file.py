"""Snapshots of a view as files: taken from the file of a view, and made into the file of another. For threads."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

from penstock.common import log_copies
from penstock.common.clock import now_ms
from penstock.gateway.view import view_file
from penstock.gateway.view.backfill import Backfill
from penstock.gateway.view.change_over import COLUMNS, Imported
from penstock.gateway.view.history import MINUTE_MS, Minute
from penstock.gateway.view.key_filter import KeyFilter
from penstock.gateway.view.rows import Row, restored
from penstock.gateway.view.store import add_keys, live_counts, offsets_of
from penstock.schemas.topics import TP

_COPIED = ("requests", "minutes", "device_minutes", "usage", "offsets")
"""Facts of conversations are read from their own topic at each start."""


class Unusable(Exception):
    """A view cannot begin from this snapshot."""


def take(view: Path, target: Path, cluster: str) -> None:
    """Copy the rows of a whole view, as they are at one moment, to a new file. Raises sqlite3.Error, Unusable."""
    log_copies.remove(target)
    with closing(view_file.connect_without_log(target)) as made:
        view_file.make_tables(made)
        made.execute("ATTACH ? AS view", (str(view),))
        made.execute("BEGIN")
        identity = made.execute("SELECT value FROM view.meta WHERE name = 'identity'").fetchone()
        if identity != (view_file.identity_of(cluster),):
            raise Unusable("the view is not whole")
        for table in _COPIED:
            made.execute(f"INSERT INTO {table} SELECT * FROM view.{table}")
        # Under another name than that of a whole view: no process opens it as one.
        facts = (("snapshot_of", *identity), ("taken_ms", str(now_ms())))
        made.executemany("INSERT INTO meta VALUES (?, ?)", facts)
        view_file.identify(made, None)
        made.execute("COMMIT")


def make_view(path: Path, cluster: str, begin: Mapping[TP, int], backfill: Backfill) -> Imported:
    """Make a snapshot the file of a view that knows the past up to its offsets. It says that it is not whole.

    `begin`: from where the log would be read without it. Raises sqlite3.Error, OSError, Unusable.
    """
    with closing(view_file.connect_without_log(path)) as made:
        identity = made.execute("SELECT value FROM meta WHERE name = 'snapshot_of'").fetchone()
        if identity != (view_file.identity_of(cluster),):
            raise Unusable("it is of another installation or version")
        offsets = offsets_of(made)
        _check(offsets, begin, backfill)
        minutes = {number: Minute.from_text(text) for number, text in made.execute("SELECT * FROM minutes")}
        made.execute("BEGIN")
        _leave_out_what_follows(made, backfill, minutes)
        view_file.make_indices(made)
        ((last_number,),) = made.execute("SELECT coalesce(max(number), 0) FROM requests")
        ((taken_ms,),) = made.execute("SELECT value FROM meta WHERE name = 'taken_ms'")
        usage = made.execute("SELECT * FROM usage").fetchall()
        known, live = KeyFilter(), list(live_counts(made))
        add_keys(made, known)
    return Imported(
        path=path,
        taken_ms=int(taken_ms),
        offsets=offsets,
        last_number=last_number,
        live=live,
        minutes=minutes,
        usage=usage,
        known=known,
    )


def _check(offsets: Mapping[TP, int], begin: Mapping[TP, int], backfill: Backfill) -> None:
    for tp, end in backfill.ends.items():
        at = offsets.get(tp, begin.get(tp, 0))
        if at > end:
            raise Unusable(f"it is newer than this gateway's start: {tp[0]} {tp[1]} {at} {end}")
        if at < begin.get(tp, 0):
            raise Unusable(f"the log begins behind it: {tp[0]} {tp[1]} {at} {begin[tp]}")


def _leave_out_what_follows(made: sqlite3.Connection, backfill: Backfill, minutes: Mapping[int, Minute]) -> None:
    """Requests that the other gateway had accepted and not read from the log yet, if they are not of the past.

    The follower reads them. They have no status, result or end: those lie behind the ends.
    """
    query = f"SELECT number, {COLUMNS} FROM requests WHERE done = 0 AND status = 'accepted'"
    found = ((number, restored(Row._make(row))) for number, *row in made.execute(query))
    left_out = [(number, one.noted.accepted_ms // MINUTE_MS) for number, one in found if not backfill.has_entry(one)]
    for number, minute in left_out:
        made.execute("DELETE FROM requests WHERE number = ?", (number,))
        if minute in minutes:
            minutes[minute].accepted -= 1
            made.execute("UPDATE minutes SET counted = ? WHERE minute = ?", (minutes[minute].to_text(), minute))
