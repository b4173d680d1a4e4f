"""Bloom filters of the requests that a file may hold: a key that none of them has need not be looked up there. Pure.

A Bloom filter never forgets a key, and rows are pruned from the file by age. So keys go into a row of filters, one
after the other, and a filter is dropped once the file has no row as old as its newest key.
"""

from __future__ import annotations

from collections.abc import Hashable

KEYS = 1 << 21
"""Keys of one filter. With 16 bits for each it takes 4 MiB."""
MOST = 16
"""Filters at once. Up to 33 million keys, fewer than 4 in 100 unknown keys are taken for known."""
_BITS_PER_KEY = 16
_HASHES = 4
_HASH_BITS = (1 << 64) - 1


class _Filter:
    __slots__ = ("bits", "count", "newest_ms")

    def __init__(self, size_bytes: int) -> None:
        self.bits = bytearray(size_bytes)
        self.count = 0
        self.newest_ms = 0


class KeyFilter:
    """`add` and `forget` are for one thread. Any thread may look up what was added before."""

    def __init__(self, keys: int = KEYS, most: int = MOST) -> None:
        """`most` filters at once, of so many `keys` each."""
        self._keys, self._most = keys, most
        self._bits = keys * _BITS_PER_KEY
        self._filters = [_Filter(self._bits // 8)]

    @property
    def size_bytes(self) -> int:
        return len(self._filters) * self._bits // 8

    def add(self, key: Hashable, at_ms: int) -> None:
        """A row of this key was written, of this age."""
        newest = self._filters[-1]
        if newest.count >= self._keys:
            self._make_room()
            newest = _Filter(self._bits // 8)
            self._filters = [*self._filters, newest]
        newest.newest_ms = max(newest.newest_ms, at_ms)
        bits, is_new = newest.bits, False
        for at in self._places(key):
            bit = 1 << (at & 7)
            if not bits[at >> 3] & bit:
                bits[at >> 3] |= bit
                is_new = True
        newest.count += is_new

    def __contains__(self, key: Hashable) -> bool:
        places = self._places(key)
        for one in self._filters:
            bits = one.bits
            for at in places:
                if not bits[at >> 3] & 1 << (at & 7):
                    break
            else:
                return True
        return False

    def forget(self, before_ms: int) -> None:
        """No row is older than this: drop the filters whose keys are all older."""
        kept = [one for one in self._filters if one.newest_ms >= before_ms]
        self._filters = kept or [_Filter(self._bits // 8)]

    def _make_room(self) -> None:
        """At the limit, unite the two neighbours with the fewest keys. Fewer filters know more unknown keys."""
        filters = self._filters
        if len(filters) < self._most:
            return
        at = min(range(len(filters) - 1), key=lambda at: filters[at].count + filters[at + 1].count)
        left, right = filters[at : at + 2]
        united = _Filter(0)
        united.bits = bytearray((int.from_bytes(left.bits) | int.from_bytes(right.bits)).to_bytes(self._bits // 8))
        united.count, united.newest_ms = left.count + right.count, max(left.newest_ms, right.newest_ms)
        self._filters = [*filters[:at], united, *filters[at + 2 :]]

    def _places(self, key: Hashable) -> list[int]:
        value = hash(key) & _HASH_BITS
        step = (value >> 32) | 1
        return [(value + step * number) % self._bits for number in range(_HASHES)]
