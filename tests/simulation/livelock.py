"""What goes on without time passing: turns at one instant of virtual time, and seeds that never end."""

from __future__ import annotations

import signal
import threading
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from simulation.truth import Violation

MOST_EVENTS = 5_000
"""Events of the world at one instant. 1,000 seeds without a fault of this kind show 133 at most."""
MOST_ROUNDS = 800
"""Steps of one flow, its looks at models and its placements, at one instant, before the flow itself ends
a step as endless. 1,000 seeds show 136 at most.
"""
LAST = 200
"""So many of the newest turns are named."""
MOST_CPU_S = 90.0
"""Processor time of one seed. The longest take a few seconds."""


class Turns:
    """Counts what happens at one instant. Raises Violation when it is more than `most`."""

    def __init__(self, what: str, most: int) -> None:
        self._what, self._most = what, most
        self._at: float | None = None
        self._count = 0
        self._last: deque[str] = deque(maxlen=LAST)

    def turn(self, now: float, label: str) -> None:
        if now != self._at:
            self._at, self._count = now, 0
        self._count += 1
        if self._count > self._most - LAST:
            self._last.append(label)
        if self._count > self._most:
            round_ = ", ".join(f"{count} x {name}" for name, count in Counter(self._last).most_common(8))
            raise Violation(f"livelock: {self._count} {self._what} at {now:.6f}; of the last {LAST}: {round_}")


@contextmanager
def bounded_cpu(seconds: float) -> Iterator[None]:
    """Raises Violation in what runs longer. Only a main thread hears of it; elsewhere there is no bound."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def over(_: int, frame: FrameType | None) -> None:
        where = "?" if frame is None else f"{frame.f_code.co_name}:{frame.f_lineno}"
        raise Violation(f"livelock: the seed takes more than {seconds:.0f} s of processor time; it is in {where}")

    before = signal.signal(signal.SIGVTALRM, over)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
