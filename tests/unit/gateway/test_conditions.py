"""Conditional and partial GET: which part of the content an exchange gets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.edge.conditions import Span, Unsatisfiable, not_modified, span_of

TAG = '"abc"'


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        ("bytes=0-0", Span(0, 1)),
        ("bytes=2-5", Span(2, 6)),
        ("Bytes = 2-5", Span(2, 6)),
        ("bytes=7-", Span(7, 10)),
        ("bytes=7-99", Span(7, 10)),
        ("bytes=-3", Span(7, 10)),
        ("bytes=-99", Span(0, 10)),
        ("bytes=5-2", None),
        ("bytes=-", None),
        ("bytes=1-2,4-5", None),
        ("items=1-2", None),
        ("bytes=a-b", None),
        (f"bytes=0-{'9' * 5_000}", None),
    ],
)
def test_one_range_is_a_part_and_all_else_is_the_whole(value: str | None, expected: Span | None) -> None:
    assert span_of(value, None, TAG, 10) == expected


@pytest.mark.parametrize(("value", "size"), [("bytes=10-", 10), ("bytes=11-12", 10), ("bytes=-0", 10), ("bytes=0-", 0)])
def test_a_range_behind_the_end_cannot_be_satisfied(value: str, size: int) -> None:
    with pytest.raises(Unsatisfiable, match=str(size)):
        span_of(value, None, TAG, size)


@pytest.mark.parametrize(
    ("if_range", "part"),
    [(TAG, True), ('"other"', False), (f"W/{TAG}", False), ("Sun, 22 Nov 2026 02:00:00 GMT", False)],
)
def test_if_range_gives_a_part_of_the_same_content_only(if_range: str, part: bool) -> None:
    assert (span_of("bytes=0-1", if_range, TAG, 10) is not None) == part


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, False),
        (TAG, True),
        (f"W/{TAG}", True),
        ("*", True),
        (f'"x", {TAG}', True),
        ('"x"', False),
        ("abc", False),
    ],
)
def test_if_none_match_knows_the_tag_among_others(value: str | None, expected: bool) -> None:
    assert not_modified(value, TAG) == expected


@given(st.text(alphabet="bytes=0123456789-, ", max_size=30), st.integers(0, 1_000))
def test_no_header_leads_out_of_the_content(value: str, size: int) -> None:
    try:
        found = span_of(value, None, TAG, size)
    except Unsatisfiable:
        return
    assert found is None or 0 <= found.start < found.end <= size
