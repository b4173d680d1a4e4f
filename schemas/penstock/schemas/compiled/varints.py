"""Avro's numbers: zigzag, seven bits a byte. What the generated encoders and decoders call for all but small values."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from operator import index
from typing import Any

from penstock.schemas.errors import BadAvro

SMALL = 1024
"""The bytes of the numbers from 0 to below this one lie ready in `NUMBERS`."""

_INT, _LONG = 1 << 31, 1 << 63


def _bytes_of(raw: int) -> bytes:
    found = bytearray()
    while raw > 127:
        found.append(raw & 127 | 128)
        raw >>= 7
    found.append(raw)
    return bytes(found)


NUMBERS: tuple[bytes, ...] = tuple(_bytes_of(number << 1) for number in range(SMALL))


def int_bytes(value: Any) -> bytes:
    """Raises BadAvro for what is no number of 32 bits."""
    if not -_INT <= (number := index(value)) < _INT:
        raise BadAvro("a number does not fit into an int")
    return _bytes_of(number << 1 if number >= 0 else ~number << 1 | 1)


@lru_cache(2048, typed=True)
def long_bytes(value: Any) -> bytes:
    """Raises BadAvro for what is no number of 64 bits.

    Kept for a while: all events of a request tell its offset and its times, and a millisecond has many events.
    """
    number = index(value)
    if 1 << 34 <= number < 1 << 41:  # times in milliseconds until the year 2039: six bytes
        return bytes(
            (
                number << 1 & 126 | 128,
                number >> 6 & 127 | 128,
                number >> 13 & 127 | 128,
                number >> 20 & 127 | 128,
                number >> 27 & 127 | 128,
                number >> 34,
            )
        )
    if not -_LONG <= number < _LONG:
        raise BadAvro("a number does not fit into a long")
    return _bytes_of(number << 1 if number >= 0 else ~number << 1 | 1)


def items_of(value: Any) -> Sequence[Any]:
    """A list as it is. Raises BadAvro for what is none; text would pass as a list of characters."""
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise BadAvro("not a list")
    return value


def binary(value: Any) -> bytes:
    """Raises BadAvro for what holds no bytes; a number would pass as so many zeros."""
    if not isinstance(value, bytes | bytearray | memoryview):
        raise BadAvro("not bytes")
    return bytes(value)


def read_raw(data: bytes, at: int, first: int) -> tuple[int, int]:
    """(the bits before zigzag, where the next value begins) of a number whose first byte was `first`, before `at`."""
    raw, shift = first & 127, 7
    while True:
        byte = data[at]
        at += 1
        raw |= (byte & 127) << shift
        if byte < 128:
            break
        shift += 7
        if shift > 63:
            raise BadAvro("a number of more than ten bytes")
    if raw >> 64:
        raise BadAvro("a number of more than 64 bits")
    return raw, at


def read_long(data: bytes, at: int, first: int) -> tuple[int, int]:
    """As `read_raw`, the number itself."""
    some = data[at : at + 5]
    if len(some) == 5:  # times in milliseconds take six bytes
        b, c, d, e, f = some
        if f < 128 <= b and c > 127 and d > 127 and e > 127 and not first & 1:
            number = (first & 127) >> 1 | (b & 127) << 6 | (c & 127) << 13 | (d & 127) << 20
            return number | (e & 127) << 27 | f << 34, at + 5
    raw, at = read_raw(data, at, first)
    return (raw >> 1) ^ -(raw & 1), at


def read_int(data: bytes, at: int, first: int) -> tuple[int, int]:
    """As `read_long`. Raises BadAvro for more than 32 bits: nobody could write such a value again."""
    raw, at = read_raw(data, at, first)
    if raw >> 32:
        raise BadAvro("a number does not fit into an int")
    return (raw >> 1) ^ -(raw & 1), at


def read_length(data: bytes, at: int, first: int) -> tuple[int, int]:
    """As `read_long`. Raises BadAvro for a negative length."""
    raw, at = read_raw(data, at, first) if first > 127 else (first, at)
    if raw & 1:
        raise BadAvro("a negative length")
    return raw >> 1, at


def read_block(data: bytes, at: int) -> tuple[int, int]:
    """(items, where they begin) of a block of a list or map. A negative count is before the block's size."""
    count, at = read_long(data, at + 1, first) if (first := data[at]) > 127 else ((first >> 1) ^ -(first & 1), at + 1)
    if count < 0:
        _, at = read_length(data, at + 1, data[at])
        count = -count
    return count, at
