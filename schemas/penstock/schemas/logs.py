"""How every process of Penstock writes its log: one line a record, with its time in UTC as RFC 3339."""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from types import TracebackType

from penstock.schemas.errors import InternalError, PenstockError

ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]


class LineFormatter(logging.Formatter):
    """`2026-11-21T17:42:17.123Z WARNING penstock.kafka text`; an error that is no fault of ours without its traceback."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s %(message)s")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        time = datetime.fromtimestamp(record.created, UTC)
        return time.isoformat(timespec="milliseconds").replace("+00:00", "Z")

    def formatException(self, ei: ExcInfo) -> str:
        error = ei[1]
        if not isinstance(error, PenstockError) or isinstance(error, InternalError):
            return super().formatException(ei)
        cause = error.__cause__
        because = "" if cause is None else f" (because of {type(cause).__name__}: {cause})"
        return f"{error.code}: {error}{because}"


def log_to_stderr(level: int | str) -> None:
    """Set up the root logger of this process, unless it is set up already."""
    handler = logging.StreamHandler()
    handler.setFormatter(LineFormatter())
    logging.basicConfig(level=level, handlers=[handler])
