"""How large batches may be: halved when memory ran out, doubled again when many smaller ones went well. Pure."""

from __future__ import annotations

GROW_AFTER = 64
"""How many batches must go well before they may be larger again; twice as many after each time that memory ran out."""
SLOWEST = 10
"""It takes at most GROW_AFTER · 2**SLOWEST of them."""


class BatchLimit:
    """`size` is in what the caller counts: runs, tokens."""

    def __init__(self, largest: int, least: int = 1) -> None:
        self.largest = largest
        self.least = min(least, largest)
        self.size = largest
        self._failures = 0
        self._well = 0

    def halve(self, used: int | None = None) -> bool:
        """Memory ran out in a batch of `used` (None: of `size`); whether the limit fell: never below the least."""
        self._failures += 1
        self._well = 0
        before, self.size = self.size, max(self.least, min(self.size, used or self.size) // 2)
        return self.size < before

    def went_well(self) -> bool:
        """A batch ended as it should; whether they may be larger from now on."""
        if self.size == self.largest:
            return False
        self._well += 1
        if self._well < GROW_AFTER << min(self._failures - 1, SLOWEST):
            return False
        self._well = 0
        self.size = min(self.largest, self.size * 2)
        return True
