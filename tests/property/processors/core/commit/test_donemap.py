"""The done map: what it says is true, what fits comes back whole, and any other text says nothing."""

from __future__ import annotations

import random
from base64 import b85encode
from zlib import crc32

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kit.examples import examples
from penstock.processors.core.commit.donemap import LIMIT, LONGEST, decode, decode_flags, encode, encode_flags

BASES = st.integers(0, 2**60)
PAIRS = st.lists(st.tuples(st.integers(0, 300) | st.just(70_000), st.integers(1, 300) | st.just(40_000)), max_size=40)


def ranges_of(base: int, pairs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """(not done, done) lengths as ranges that do not touch each other."""
    ranges: list[tuple[int, int]] = []
    for gap, length in pairs:
        start = (ranges[-1][1] if ranges else base) + max(gap, 1 if ranges else 0)
        ranges.append((start, start + length))
    return ranges


@given(base=BASES, pairs=PAIRS)
def test_what_fits_comes_back_whole(base: int, pairs: list[tuple[int, int]]) -> None:
    ranges = [one for one in ranges_of(base, pairs) if one[1] - base <= LONGEST]
    text = encode(base, ranges)
    assert len(text) <= LIMIT
    assert decode(base, text) == ranges  # 40 runs always fit
    assert text.isascii()
    assert bool(text) == bool(ranges)


@settings(max_examples=examples(200))
@given(base=BASES, flags=st.binary(max_size=600), limit=st.integers(0, 120))
def test_what_does_not_fit_is_left_out_at_the_tail(base: int, flags: bytes, limit: int) -> None:
    flags = bytes(flag & 1 for flag in flags)
    text = encode_flags(base, flags, limit)
    assert len(text) <= limit
    back = decode_flags(base, text)
    assert flags.startswith(back)
    # 12 characters hold the smallest map; beyond that a map says at least what a plain bitmap of the room would say.
    room = max(((limit - 2) * 4 // 5 - 4) * 8, 0)
    assert back.count(1) >= flags.count(1, 0, room)


@pytest.mark.parametrize("share", [0.001, 0.01, 0.1, 0.5, 0.9, 0.99, 0.999])
def test_fifty_thousand_offsets(share: float) -> None:
    chance = random.Random(7)
    flags = b"\x00" + bytes(chance.random() < share for _ in range(50_000))
    text = encode_flags(123, flags)
    assert len(text) <= LIMIT
    back = decode_flags(123, text)
    assert flags.startswith(back)
    assert len(back) > (22_300 if 0.02 < share < 0.98 else 49_000)


def test_one_long_run_and_the_longest_reach() -> None:
    assert decode(5, encode(5, [(6, 50_006)])) == [(6, 50_006)]
    assert len(encode(5, [(6, 50_006)])) < 20
    assert decode(5, encode(5, [(6, 6 + 2 * LONGEST)])) == [(6, 5 + LONGEST)]
    assert encode(5, [(5 + LONGEST, 5 + 2 * LONGEST)]) == ""
    assert encode(5, []) == encode(5, [(0, 5)]) == ""
    assert decode(5, encode(5, [(0, 7)])) == [(5, 7)]


@given(text=st.text(max_size=50) | st.from_regex(r"1[rb][0-9A-Za-z!#$%&()*+;<=>?@^_`{|}~-]*", fullmatch=True))
def test_a_foreign_text_says_nothing(text: str) -> None:
    assert decode(3, text) == []


@given(base=BASES, other=BASES, pairs=PAIRS.filter(bool), cut=st.integers(0, 30))
def test_a_map_of_another_offset_or_cut_short_says_nothing(
    base: int, other: int, pairs: list[tuple[int, int]], cut: int
) -> None:
    text = encode(base, ranges_of(base, pairs))
    if other != base:
        assert decode(other, text) == []
    if cut < len(text):
        assert decode(base, text[:cut]) == []


def signed(base: int, form: str, body: bytes) -> str:
    """A map with a right checksum and any body."""
    check = crc32(body, crc32(base.to_bytes(8, "little", signed=True)))
    return form + b85encode(check.to_bytes(4, "little") + body).decode()


@given(base=BASES, form=st.sampled_from(("1r", "1b")), body=st.binary(max_size=40))
def test_no_body_raises_or_takes_much_memory(base: int, form: str, body: bytes) -> None:
    flags = decode_flags(base, signed(base, form, body))
    assert len(flags) <= LONGEST
    assert set(flags) <= {0, 1}


def test_a_map_that_reaches_too_far_says_nothing() -> None:
    assert decode(0, signed(0, "1r", b"\x01" + b"\xff" * 8 + b"\x01")) == []
    assert decode(0, signed(0, "1b", b"\x01" + bytes(LONGEST // 8) + b"\x01")) == []
    assert decode(0, signed(0, "1b", b"\x02")) == [(1, 2)]
