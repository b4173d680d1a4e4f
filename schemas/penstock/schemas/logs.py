"""How every process of Penstock writes its log: one line a record, with its time in UTC as RFC 3339."""

from __future__ import annotations

import logging
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


def log_to_stderr(level: int | str) -> None:
    """Set up the root logger of this process, unless it is set up already."""
    handler = logging.StreamHandler()
    handler.setFormatter(LineFormatter())
    logging.basicConfig(level=level, handlers=[handler])
