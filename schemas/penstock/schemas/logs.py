"""The two forms of a log line, text and JSON: a record's event, its fields, its trace, its exception.

Calls have the form `logger.warning("group.lost partitions=%d: others may work on them", 3)`: the event, fields, then
a text for people. JSON has the fields under their names, with the types of the arguments.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Hashable, Iterator, Mapping
from copy import copy
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, NamedTuple

from penstock.schemas.errors import InternalError, PenstockError

OWN = "penstock"
"""The loggers of Penstock begin with it. Lines of other libraries are text without fields."""
RESERVED = frozenset({"time", "level", "logger", "event", "message", "trace_id", "exception"})
"""Keys of a JSON line that no field has."""
_COLORS = {logging.DEBUG: "2", logging.WARNING: "33", logging.ERROR: "31", logging.CRITICAL: "1;31"}
_PLACE = r"%[-#0 +]*\d*(?:\.\d+)?[a-zA-Z]"
_ODD = re.compile(r"[^\w.:/+@{}\x1f-]")
_ENCODE = json.JSONEncoder(ensure_ascii=False, default=str).encode
_PLACES = re.compile(_PLACE)
_EVENT = re.compile(rf"(?:[a-z0-9_]|{_PLACE})+(?:\.(?:[a-z0-9_]|{_PLACE})+)*(?=[ :]|$)")
_FIELD = re.compile(rf" ([a-z][a-z0-9_]*)=((?:{_PLACE}|[^\s%:;]|:(?=\S))+)")


class Fields:
    """The message of a line with many fields. Those that are None are left out."""

    __slots__ = ("event", "fields")

    def __init__(self, event: str, **fields: Any) -> None:
        self.event, self.fields = event, {name: value for name, value in fields.items() if value is not None}

    def __str__(self) -> str:
        values = list(map(str, self.fields.values()))
        if _ODD.search("\x1f".join(values)) is not None:
            values = [value if _ODD.search(value) is None else json.dumps(value) for value in values]
        return " ".join((self.event, *map("=".join, zip(self.fields, values, strict=True))))


class LineFormatter(logging.Formatter):
    """`2026-11-21T17:42:17.123Z WARNING penstock.kafka text`, for people. An error of a caller has no traceback."""

    def __init__(self, *, colored: bool = False) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s %(message)s")
        self._colored = colored

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        return _time(record)

    def formatMessage(self, record: logging.LogRecord) -> str:
        if (trace_id := getattr(record, "trace_id", None)) is not None:
            record.message += f" trace_id={trace_id}"
        return super().formatMessage(record)

    def format(self, record: logging.LogRecord) -> str:
        color, error = _COLORS.get(record.levelno) if self._colored else None, _plain_error(record)
        if color is None and error is None:
            return super().format(record)
        shown = copy(record)
        if color is not None:
            shown.levelname = f"\x1b[{color}m{record.levelname}\x1b[0m"
        if error is None:
            return super().format(shown)
        shown.exc_info = shown.exc_text = None
        return f"{super().format(shown)}: {_in_a_line(error)}"


class JsonFormatter(logging.Formatter):
    """One JSON object a line.

    `time` (RFC 3339, UTC), `level` and `logger` are always there. `event` is the name of what happened, `message` a
    text; each line has one of them or both. Then come the fields, `trace_id` if the line names a request whose trace is
    known, and `exception`: the traceback, or the code and text of an error of a caller.
    """

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {"time": _time(record), "level": record.levelname, "logger": record.name}
        try:
            event, fields, message = parts_of(record)
        except Exception:  # the arguments do not fit the text, or one cannot be shown
            event, fields, message = None, {}, f"{record.msg} {record.args}"
        if event is not None:
            line["event"] = event
        if message:
            line["message"] = message
        for name, value in fields.items():
            line.setdefault(name, value)
        if (trace_id := getattr(record, "trace_id", None)) is not None:
            line["trace_id"] = trace_id
        if record.exc_info and record.exc_info[1] is not None:
            error = _plain_error(record)
            line["exception"] = self.formatException(record.exc_info) if error is None else _in_a_line(error)
        if record.stack_info:
            line["stack"] = self.formatStack(record.stack_info)
        return _ENCODE(line)


def parts_of(record: logging.LogRecord) -> tuple[str | None, Mapping[str, Any], str]:
    """The event, the fields and the text of a record. Raises as `%` does for arguments that do not fit."""
    if isinstance(record.msg, Fields):
        return record.msg.event, record.msg.fields, ""
    form = _form_of(record.msg) if isinstance(record.msg, str) and record.name.split(".", 1)[0] == OWN else None
    args = record.args or ()
    if form is None or not isinstance(args, tuple) or (not args and "%" in record.msg):
        return None, {}, record.getMessage()
    left = iter(args)
    event = _filled(form.event, left)
    fields = {name: _value(template, left) for name, template in form.fields}
    return event, fields, _filled(form.text, left)


class _Form(NamedTuple):
    event: str
    fields: tuple[tuple[str, str], ...]
    text: str


@lru_cache(2000)
def _form_of(template: str) -> _Form | None:
    """None for a text that does not begin with the name of an event."""
    found = _EVENT.match(template)
    if found is None:
        return None
    end, fields = found.end(), list[tuple[str, str]]()
    while (field := _FIELD.match(template, end)) is not None:
        fields.append((field[1], field[2].removesuffix(",")))
        end = field.end()
    if "." not in found[0] and not (fields and "%" in found[0]):
        return None
    return _Form(found[0], tuple(fields), template[end:].lstrip(":; "))


def _filled(template: str, left: Iterator[Any]) -> str:
    count = len(_PLACES.findall(template.replace("%%", "")))
    return template % tuple(next(left) for _ in range(count)) if "%" in template else template


def _value(template: str, left: Iterator[Any]) -> Any:
    """A value that stands alone keeps its type."""
    if _PLACES.fullmatch(template) is None:
        return _filled(template, left)
    value = next(left)
    if value is None or (isinstance(value, str | int | float) and not template.endswith("r")):
        return round(value, 6) if isinstance(value, float) else value
    return template % (value,)


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _plain_error(record: logging.LogRecord) -> PenstockError | None:
    """The error of the record if its code and text say all: no fault of ours."""
    error = record.exc_info[1] if record.exc_info else None
    return error if isinstance(error, PenstockError) and not isinstance(error, InternalError) else None


def _in_a_line(error: PenstockError) -> str:
    cause = error.__cause__
    return f"{error.code}: {error}" + ("" if cause is None else f" (because of {type(cause).__name__}: {cause})")


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
