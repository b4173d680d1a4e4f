"""Fault points for tests: `PENSTOCK_FAULTS=kill:before_commit@40` ends this process with SIGKILL at the 40th passage.

Points: before_terminal, after_answer_append, before_commit, mid_stream; `stall:fetch@3` lets the third fetch from Kafka
wait for ever, as the consumer's open bugs do. Without the variable every hook is a no-op.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping

POINTS = {
    "kill": frozenset({"before_terminal", "after_answer_append", "before_commit", "mid_stream"}),
    "stall": frozenset({"fetch"}),
}


def parse_faults(text: str) -> dict[str, int]:
    """`kill:point[@n],…` as point → passage at which to die. Raises ValueError for what is not a known point."""
    counts: dict[str, int] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        action, _, rest = part.partition(":")
        point, _, count = rest.partition("@")
        if point not in POINTS.get(action, ()):
            known = " or ".join(f"{action}:<{'|'.join(sorted(points))}>[@n]" for action, points in POINTS.items())
            raise ValueError(f"PENSTOCK_FAULTS: {part!r} is not {known}")
        counts[point] = int(count or "1")
    return counts


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Faults:
    """Counts passages of each armed point; `hit` is one dictionary look-up when nothing is armed."""

    __slots__ = ("_die", "_left")

    def __init__(self, armed: Mapping[str, int], die: Callable[[], None] = kill_self) -> None:
        self._left = dict(armed)
        self._die = die

    @classmethod
    def from_env(cls) -> Faults:
        return cls(parse_faults(os.environ.get("PENSTOCK_FAULTS", "")))

    def armed(self, point: str) -> bool:
        return point in self._left

    def hit(self, point: str) -> None:
        """Pass a point at which the process may be made to die."""
        if self.due(point):
            self._die()

    def due(self, point: str) -> bool:
        """Pass a point; whether this is the passage, or a later one, at which its fault happens."""
        left = self._left.get(point)
        if left is None:
            return False
        self._left[point] = left - 1
        return left <= 1
