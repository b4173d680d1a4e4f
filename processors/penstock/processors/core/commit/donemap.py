"""The done map: which offsets above a committed one are done, as a short text for the commit's metadata.

A commit names one offset: all below it is done. The map adds what is done above it, so that after a crash or a takeover
only what was unfinished runs again. The text is a version, a form and base85 of a checksum and a body:

- ``1r``: run lengths, as pairs of varints: how many offsets are not done, how many after them are.
- ``1b``: a bitmap, one bit per offset, the lowest first.

The form that says more in less space is taken. What does not fit is left out at the tail: to say less is safe, since
it only means that some work runs again. The checksum covers the committed offset too. So a foreign text, or a map that
was copied to another offset, reads as "none done" and not as a wrong map.

Inside a worker a map is a string of flags: byte `n` is 1 if the offset `base + n` is done, else 0.
"""

from __future__ import annotations

import re
from base64 import b85decode, b85encode
from collections.abc import Iterable
from zlib import crc32

LIMIT = 3_500
"""Characters. The broker takes 4,095 for each partition (`offset.metadata.max.bytes`)."""

LONGEST = 1 << 20
"""Offsets above the committed one that a map reaches, at most. It bounds what a reader must hold in memory."""

_RUNS, _BITMAP = "1r", "1b"
_CHECKSUM_BYTES = 4
_DIGITS = bytes.maketrans(b"\x00\x01", b"01")
_FLAGS = bytes.maketrans(b"01", b"\x00\x01")
_DONE = re.compile(rb"\x01+")

Ranges = list[tuple[int, int]]
"""Offsets as (first, behind the last), ascending, apart from each other."""


def encode(base: int, done_ranges: Iterable[tuple[int, int]], limit: int = LIMIT) -> str:
    """The text for ranges of done offsets; "" when nothing at or above `base` is done."""
    flags = bytearray()
    for first, behind in done_ranges:
        start, end = max(first - base, 0), min(behind - base, LONGEST)
        if end <= start:
            continue
        if end > len(flags):
            flags.extend(bytes(end - len(flags)))
        flags[start:end] = b"\x01" * (end - start)
    return encode_flags(base, flags, limit)


def decode(base: int, text: str) -> Ranges:
    """The ranges of done offsets; none for a text that is not a map of this offset."""
    return [(base + run.start(), base + run.end()) for run in _DONE.finditer(decode_flags(base, text))]


def encode_flags(base: int, flags: bytes | bytearray, limit: int = LIMIT) -> str:
    room = (limit - len(_RUNS)) * 4 // 5 - _CHECKSUM_BYTES  # base85 writes four bytes as five characters
    last = flags.rfind(1, 0, LONGEST)
    if last < 0 or room < 1:
        return ""
    reach = min(last + 1, room * 8)
    form, body = _BITMAP, b""
    # Each run takes two bytes at least, so mostly the run lengths need not be tried where they cannot win.
    if (flags.count(b"\x00\x01", 0, reach) + flags[0]) * 2 < (reach + 7) // 8:
        runs, runs_reach = _runs(flags, last, room)
        if runs_reach > reach or (runs_reach == reach and len(runs) <= (reach + 7) // 8):
            form, body = _RUNS, runs
    if form == _BITMAP:
        body = int(flags[:reach].translate(_DIGITS)[::-1], 2).to_bytes((reach + 7) // 8, "little").rstrip(b"\x00")
    if not body:
        return ""
    return form + b85encode(_checksum(base, body) + body).decode("ascii")


def decode_flags(base: int, text: str) -> bytes:
    """The flags of a text; none for a text that is not a map of this offset."""
    form = text[:2]
    if form not in {_RUNS, _BITMAP}:
        return b""
    try:
        content = b85decode(text[2:])
    except ValueError:
        return b""
    checksum, body = content[:_CHECKSUM_BYTES], content[_CHECKSUM_BYTES:]
    if checksum != _checksum(base, body):
        return b""
    if form == _RUNS:
        return _flags_of_runs(body)
    bits = int.from_bytes(body, "little")
    return b"" if bits.bit_length() > LONGEST else f"{bits:b}".encode()[::-1].translate(_FLAGS).rstrip(b"\x00")


def _checksum(base: int, body: bytes) -> bytes:
    return crc32(body, crc32(base.to_bytes(8, "little", signed=True))).to_bytes(_CHECKSUM_BYTES, "little")


def _runs(flags: bytes | bytearray, last: int, room: int) -> tuple[bytes, int]:
    """The run lengths that fit into `room` bytes, and how many offsets they reach."""
    body, reached = bytearray(), 0
    while reached <= last:
        first = flags.find(1, reached)
        behind = flags.find(0, first, last + 1)
        behind = last + 1 if behind < 0 else behind
        pair = _varint(first - reached) + _varint(behind - first)
        if len(body) + len(pair) > room:
            break
        body += pair
        reached = behind
    return bytes(body), reached


def _flags_of_runs(body: bytes) -> bytes:
    flags, number, shift, done = bytearray(), 0, 0, False
    for byte in body:
        number |= (byte & 0x7F) << shift
        shift += 7
        if byte & 0x80:
            continue
        if len(flags) + number > LONGEST:
            return b""
        flags += (b"\x01" if done else b"\x00") * number
        number, shift, done = 0, 0, not done
    return b"" if shift or done else bytes(flags)


def _varint(number: int) -> bytes:
    if number < 0x80:
        return bytes((number,))
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)
