"""Conditional and partial GET: which part of the content an exchange gets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.edge.conditions import Span, Unsatisfiable, not_modified, span_of

TAG = '"abc"'


NO_RANGES = [None, "bytes=5-2", "bytes=-", "bytes=1-2,4-5", "items=1-2", "bytes=a-b", f"bytes=0-{'9' * 5_000}"]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("bytes=0-0", Span(0, 1)),
        ("bytes=2-5", Span(2, 6)),
        ("Bytes = 2-5", Span(2, 6)),
        *((value, Span(7, 10)) for value in ("bytes=7-", "bytes=7-99", "bytes=-3")),
        ("bytes=-99", Span(0, 10)),
        *((value, None) for value in NO_RANGES),
    ],
)
def test_one_range_is_a_part_and_all_else_is_the_whole(value: str | None, expected: Span | None) -> None:
    assert span_of(value, None, TAG, 10) == expected


@pytest.mark.parametrize(("value", "size"), [("bytes=10-", 10), ("bytes=11-12", 10), ("bytes=-0", 10), ("bytes=0-", 0)])
def test_a_range_behind_the_end_cannot_be_satisfied(value: str, size: int) -> None:
    with pytest.raises(Unsatisfiable, match=str(size)):
        span_of(value, None, TAG, size)


def test_conditions_know_the_tag_of_the_content() -> None:
    for if_range in (TAG, '"other"', f"W/{TAG}", "Sun, 22 Nov 2026 02:00:00 GMT"):
        assert (span_of("bytes=0-1", if_range, TAG, 10) is not None) == (if_range == TAG), if_range
    for same in (TAG, f"W/{TAG}", "*", f'"x", {TAG}'):
        assert not_modified(same, TAG), same
    for other in (None, '"x"', "abc"):
        assert not not_modified(other, TAG), other


@given(st.text(alphabet="bytes=0123456789-, ", max_size=30), st.integers(0, 1_000))
def test_no_header_leads_out_of_the_content(value: str, size: int) -> None:
    try:
        found = span_of(value, None, TAG, size)
    except Unsatisfiable:
        return
    assert found is None or 0 <= found.start < found.end <= size
