"""How every process of Penstock writes its log: one line a record, with its time in UTC as RFC 3339."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from copy import copy
from datetime import UTC, datetime

from penstock.schemas.errors import InternalError, PenstockError


class LineFormatter(logging.Formatter):
    """`2026-11-21T17:42:17.123Z WARNING penstock.kafka text`; what is no fault of ours is told without a traceback."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s %(message)s")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        time = datetime.fromtimestamp(record.created, UTC)
        return time.isoformat(timespec="milliseconds").replace("+00:00", "Z")

    def format(self, record: logging.LogRecord) -> str:
        error = record.exc_info[1] if record.exc_info else None
        if not isinstance(error, PenstockError) or isinstance(error, InternalError):
            return super().format(record)
        plain = copy(record)
        plain.exc_info = plain.exc_text = None
        because = (
            "" if error.__cause__ is None else f" (because of {type(error.__cause__).__name__}: {error.__cause__})"
        )
        return f"{super().format(plain)}: {error.code}: {error}{because}"


class OncePer(logging.Filter):
    """Lets records with the same `key` through once per `seconds`."""

    def __init__(self, seconds: float, key: Callable[[logging.LogRecord], Hashable]) -> None:
        super().__init__()
        self._seconds = seconds
        self._key = key
        self._passed_at: dict[Hashable, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        key = self._key(record)
        if abs(record.created - self._passed_at.get(key, 0.0)) < self._seconds:  # abs: the clock may be set back
            return False
        if len(self._passed_at) > 1000:
            self._passed_at.clear()
        self._passed_at[key] = record.created
        return True


def log_to_stderr(level: int | str) -> None:
    """Set up the root logger of this process, unless it is set up already."""
    handler = logging.StreamHandler()
    handler.setFormatter(LineFormatter())
    logging.basicConfig(level=level, handlers=[handler])
