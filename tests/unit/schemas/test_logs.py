"""One form of log lines in every process: the time in UTC, and no traceback for an error of our own."""

from __future__ import annotations

import logging
import sys

from penstock.schemas.errors import BrokerUnavailable, InternalError, NotFound
from penstock.schemas.logs import LineFormatter


def line(error: Exception) -> str:
    try:
        raise error
    except Exception:
        record = logging.LogRecord("penstock.x", logging.WARNING, "f.py", 1, "x.failed n=%d", (3,), sys.exc_info())
    record.created = 1_700_000_000.25
    return LineFormatter().format(record)


def test_times_are_utc_with_milliseconds() -> None:
    assert line(NotFound("no such thing")).startswith("2023-11-14T22:13:20.250Z WARNING penstock.x x.failed n=3")


def test_what_a_person_can_mend_is_one_line_and_a_fault_has_its_traceback() -> None:
    assert line(NotFound("no such thing")).endswith(" x.failed n=3: not_found: no such thing")
    away = BrokerUnavailable("no broker")
    away.__cause__ = OSError("refused")
    assert line(away).endswith(": broker_unavailable: no broker (because of OSError: refused)")
    assert "Traceback" in line(ZeroDivisionError("x"))
    assert "Traceback" in line(InternalError("x"))
