"""Cursors come back as they were; nothing else is one."""

from __future__ import annotations

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.schemas.cursor import Cursor, decode_cursor, encode_cursor
from penstock.schemas.errors import InvalidCursor

CURSORS = st.builds(
    Cursor,
    partition=st.integers(0, 2**31 - 1),
    offset=st.integers(-1, 2**63 - 1),
    epoch=st.integers(-1, 2**63 - 1),
    attempt=st.integers(0, 2**31 - 1),
    text_length=st.integers(0, 2**63),
)


@given(cursor=CURSORS)
def test_round_trip(cursor: Cursor) -> None:
    text = encode_cursor(cursor)
    assert text.isascii()
    assert set(text) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_")
    assert decode_cursor(text) == cursor


@given(text=st.text(max_size=80) | st.binary(max_size=60).map(lambda b: base64.urlsafe_b64encode(b).decode()))
def test_anything_else_is_invalid(text: str) -> None:
    with pytest.raises(InvalidCursor) as caught:
        decode_cursor(text)
    assert caught.value.param == "cursor"


@given(cursor=CURSORS, at=st.integers(0, 200), other=st.sampled_from("AZaz09-_"))
def test_a_changed_character_is_found(cursor: Cursor, at: int, other: str) -> None:
    text = encode_cursor(cursor)
    at %= len(text) - 1  # the last character may hold bits that nobody reads
    changed = text[:at] + other + text[at + 1 :]
    if changed != text:
        with pytest.raises(InvalidCursor):
            decode_cursor(changed)
