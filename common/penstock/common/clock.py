"""The wall clock as records carry it, and one that nobody sets."""

from __future__ import annotations

import time


def now_ms() -> int:
    """Milliseconds since the epoch."""
    return time.time_ns() // 1_000_000


_STARTED_NS = time.time_ns() - time.monotonic_ns()


def steady_ms() -> int:
    """The same by the monotonic clock: only the differences between its values hold."""
    return (_STARTED_NS + time.monotonic_ns()) // 1_000_000
