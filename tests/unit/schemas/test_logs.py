"""One form of log lines in every process: the time in UTC, and no traceback for an error of our own."""

from __future__ import annotations

import json
import logging
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.schemas.errors import BrokerUnavailable, InternalError, NotFound
from penstock.schemas.logs import RESERVED, Fields, JsonFormatter, LineFormatter


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


def json_of(
    template: object, *args: object, name: str = "penstock.x", error: Exception | None = None
) -> dict[str, Any]:
    failed = None if error is None else (type(error), error, None)
    record = logging.LogRecord(name, logging.WARNING, "f.py", 1, template, args, failed)
    record.created = 1_700_000_000.25
    found = json.loads(JsonFormatter().format(record))
    assert (found.pop("time"), found.pop("level")) == ("2023-11-14T22:13:20.250Z", "WARNING")
    assert found.pop("logger") == name
    return found


@pytest.mark.parametrize(
    ("template", "args", "expected"),
    [
        ("a.b partitions=%d: others work", (3,), {"event": "a.b", "partitions": 3, "message": "others work"}),
        ("a.b seconds=%.1f of=%s", (1.25, None), {"event": "a.b", "seconds": 1.25, "of": None}),
        ("a.b topic=%s offset=%d %s", ("t", 7, "why"), {"event": "a.b", "topic": "t", "offset": 7, "message": "why"}),
        ("a.b tp=%s error=%r", (("t", 1), OSError("x")), {"event": "a.b", "tp": "('t', 1)", "error": "OSError('x')"}),
        ("%s.ended n=%d", ("bridge", 2), {"event": "bridge.ended", "n": 2}),
        ("%s task=%s at=%s", ("w.hangs", "t", "f > g"), {"event": "w.hangs", "task": "t", "at": "f > g"}),
        ("a.b at=%s:%d: 100%% of %s", ("h", 1, "it"), {"event": "a.b", "at": "h:1", "message": "100% of it"}),
        ("%s: exiting", ("stalled",), {"message": "stalled: exiting"}),
        ("a.b n=%d", ("x",), {"event": "a.b", "n": "x"}),
        ("a.b: %d", ("x",), {"message": "a.b: %d ('x',)"}),
        ("a.b n=%d", (), {"message": "a.b n=%d"}),
        ("half \udc80 \n", (), {"message": "half \udc80 \n"}),
        (ValueError("x"), (), {"message": "x"}),
        (Fields("a.b", n=1, none=None, text='say "x"'), (), {"event": "a.b", "n": 1, "text": 'say "x"'}),
    ],
)  # fmt: skip
def test_the_json_of_a_line_has_its_event_and_fields(
    template: object, args: tuple[object, ...], expected: dict[str, Any]
) -> None:
    assert json_of(template, *args) == expected


def test_other_libraries_and_exceptions_in_json() -> None:
    assert json_of("a.b n=%d", 1, name="httpx") == {"message": "a.b n=1"}
    assert json_of("a.b", error=NotFound("gone"))["exception"] == "not_found: gone"
    assert json_of("a.b", error=ZeroDivisionError("x"))["exception"] == "ZeroDivisionError: x"


def test_a_line_of_fields_as_text() -> None:
    text = Fields("a.b", n=1, none=None, text='two "words"', line="x\ny")
    assert str(text) == r'a.b n=1 text="two \"words\"" line="x\ny"'


def test_no_call_has_a_field_that_every_line_has() -> None:
    rooms = [Path(room) / "penstock" for room in ("schemas", "common", "producers", "processors", "gateway", "cli")]
    files = [file for room in rooms for file in (Path(__file__).parents[3] / room).rglob("*.py")]
    assert len(files) > 300
    for file in files:
        for template in re.findall(r'"([a-z_%]+\.[a-z_]+ [a-z_]+=%[^"]*)"', file.read_text()):
            named = set(re.findall(r" ([a-z_]+)=%", template.partition(": ")[0]))
            assert not named & RESERVED, (file, template)
