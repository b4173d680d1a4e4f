"""Fault points for tests: `PENSTOCK_FAULTS=kill:before_commit@40` ends this process with SIGKILL at the 40th passage.

Points: before_terminal, after_answer_append, before_commit, mid_stream. Without the variable every hook is a no-op.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping

POINTS = frozenset({"before_terminal", "after_answer_append", "before_commit", "mid_stream"})


def parse_faults(text: str) -> dict[str, int]:
    """`kill:point[@n],…` as point → passage at which to die. Raises ValueError for what is not a known point."""
    found: dict[str, int] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        action, _, rest = part.partition(":")
        point, _, count = rest.partition("@")
        if action != "kill" or point not in POINTS:
            raise ValueError(f"PENSTOCK_FAULTS: {part!r} is not kill:<{'|'.join(sorted(POINTS))}>[@n]")
        found[point] = int(count or "1")
    return found


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
        left = self._left.get(point)
        if left is None:
            return
        self._left[point] = left - 1
        if left <= 1:
            self._die()
