"""The time of setups that many tests share. Which test pays for them is chance, so no folder is charged with them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class SharedSetups:
    """Seconds of the shared setups of this process."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._depth = 0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Wrap the start of anything that the whole session shares. One within another counts once."""
        began = time.perf_counter()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                self._seconds += time.perf_counter() - began

    def take(self) -> float:
        """The seconds since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds


SHARED_SETUPS = SharedSetups()
