"""One form of log lines in every process: the time in UTC, and no traceback for an error of our own."""

from __future__ import annotations

import logging
import sys

from penstock.schemas.errors import NotFound
from penstock.schemas.logs import LineFormatter


def line(error: Exception) -> str:
    try:
        raise error
    except Exception:
        record = logging.LogRecord("penstock.x", logging.WARNING, "f.py", 1, "x.failed n=%d", (3,), sys.exc_info())
    record.created = 1_700_000_000.25
    return LineFormatter().format(record)


def test_times_are_utc_with_milliseconds() -> None:
    assert line(NotFound("no such thing")).startswith("2023-11-14T22:13:20.250Z WARNING penstock.x x.failed n=3\n")


def test_an_error_of_our_own_is_one_line_and_a_fault_has_its_traceback() -> None:
    assert line(NotFound("no such thing")).splitlines()[1:] == ["not_found: no such thing"]
    assert "Traceback" in line(ZeroDivisionError("x"))
