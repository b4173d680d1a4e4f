"""Lines of input files: read in pieces of any size, checked before any runs, in parts that can be read alone."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.batches import checking
from penstock.gateway.batches.checking import MAX_LINES, Checking, LineError, parse_line
from penstock.gateway.routes.line_reader import Line, LineReader

CHAT = "/v1/chat/completions"


def line(custom_id: Any = "a", **fields: Any) -> bytes:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": CHAT, "body": {}, **fields}).encode()


def read(text: bytes, size: int, max_bytes: int = 1_000) -> list[Line]:
    reader = LineReader(max_bytes)
    found = [one for at in range(0, len(text), size) for one in reader.feed(text[at : at + size])]
    return [*found, *reader.close()]


@given(st.lists(st.binary(max_size=20).map(lambda one: one.replace(b"\n", b" "))), st.integers(1, 30))
def test_lines_come_whole_whatever_the_pieces(lines: list[bytes], size: int) -> None:
    text = b"\n".join(lines)
    found = read(text, size)
    expected = [(number, one) for number, one in enumerate(text.split(b"\n"), 1) if one.strip()]
    assert [(one.number, one.content) for one in found] == expected
    assert all(text[one.start :].startswith(one.content or b"") for one in found)


@given(st.integers(1, 40))
def test_a_line_too_long_is_told_and_not_kept(size: int) -> None:
    found = read(b"short\n" + b"x" * 100 + b"\nshort too", size, max_bytes=10)
    assert [(one.number, one.start, one.content) for one in found] == [
        (1, 0, b"short"),
        (2, 6, None),
        (3, 107, b"short too"),
    ]


@pytest.mark.parametrize(
    ("content", "code", "param"),
    [
        (None, "line_too_large", None),
        (b"{", "invalid_json_line", None),
        (b"[1]", "invalid_json_line", None),
        (b"[" * 100_000, "invalid_json_line", None),
        (line(None), "missing_required_parameter", "custom_id"),
        (line(7), "invalid_custom_id", "custom_id"),
        (line(""), "invalid_custom_id", "custom_id"),
        (line("x" * 513), "invalid_custom_id", "custom_id"),
        (line("\ud800"), "invalid_custom_id", "custom_id"),
        (line(float("nan")), "invalid_custom_id", "custom_id"),
        (line(method="GET"), "invalid_method", "method"),
        (line(url="/v1/embeddings"), "mismatched_endpoint", "url"),
        (line(priority=1), "unsupported_parameter", "priority"),
        (line(body=None), "missing_required_parameter", "body"),
        (line(body="text"), "missing_required_parameter", "body"),
    ],
)
def test_what_a_line_may_not_be(content: bytes | None, code: str, param: str | None) -> None:
    with pytest.raises(LineError) as caught:
        parse_line(content, CHAT)
    assert (caught.value.code, caught.value.param) == (code, param)


def check(text: bytes, size: int = 10_000) -> Checking:
    checked, reader, until = Checking(CHAT), LineReader(10_000), 0
    for at in range(0, len(text), size):
        until = min(at + size, len(text))
        checked.add(reader.feed(text[at:until]), until)
    checked.add(reader.close(), until)
    checked.close()
    return checked


def test_all_errors_are_told_with_their_lines() -> None:
    checked = check(b"\n".join([line("a"), b"", b"no", line("a"), line("b", method="PUT")]))
    assert [(one["line"], one["code"]) for one in checked.errors] == [
        (3, "invalid_json_line"),
        (4, "duplicate_custom_id"),
        (5, "invalid_method"),
    ]


def test_an_empty_file_and_one_too_long() -> None:
    assert [one["code"] for one in check(b"\n \n").errors] == ["empty_file"]
    assert check(b"\n".join(line(f"{n}") for n in range(MAX_LINES))).errors == []
    many = check(b"\n".join(line(f"{n}") for n in range(MAX_LINES + 1)))
    assert [(one["code"], one["line"]) for one in many.errors] == [("too_many_tasks", None)]


def test_a_thousand_errors_are_not_all_told() -> None:
    assert len(check(b"\n".join([b"no"] * 1_000)).errors) == checking.MOST_ERRORS


@given(st.integers(1, 40), st.integers(1, 7), st.integers(30, 400), st.integers(1, 500), st.booleans())
def test_parts_hold_all_lines_and_can_be_read_alone(
    lines: int, most_lines: int, most_bytes: int, size: int, ended: bool
) -> None:
    text = b"\n".join(line(f"{n}", body={"x": "y" * (n * 7 % 50)}) + b"\n" * (n % 3 == 0) for n in range(lines))
    text += b"\n" if ended else b""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checking, "PART_LINES", most_lines)
        patch.setattr(checking, "PART_BYTES", most_bytes)
        checked = check(text, size)
    assert checked.errors == []
    assert (checked.parts[0].start, checked.parts[-1].end) == (0, len(text))
    again: list[Line] = []
    for part in checked.parts:
        reader = LineReader(part.end - part.start, number=part.number, start=part.start)
        found = [*reader.feed(text[part.start : part.end]), *reader.close()]
        assert 0 < len(found) <= most_lines
        again += found
    assert again == read(text, len(text), 10_000)
