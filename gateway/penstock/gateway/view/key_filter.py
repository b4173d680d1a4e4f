"""A Bloom filter of the requests that a file may hold: what it does not know need not be looked up there."""

from __future__ import annotations

from collections.abc import Hashable

BITS = 1 << 24
"""2 MiB. Of 500,000 keys one unknown key in 250 is taken for known, of five millions one in five."""
_HASHES = 2


class KeyFilter:
    """Knows for sure what was never added."""

    __slots__ = ("_bits",)

    def __init__(self) -> None:
        self._bits = bytearray(BITS // 8)

    def add(self, key: Hashable) -> None:
        value = hash(key)
        for _ in range(_HASHES):
            at = value % BITS
            self._bits[at >> 3] |= 1 << (at & 7)
            value >>= 24

    def __contains__(self, key: Hashable) -> bool:
        value = hash(key)
        for _ in range(_HASHES):
            at = value % BITS
            if not self._bits[at >> 3] & 1 << (at & 7):
                return False
            value >>= 24
        return True
