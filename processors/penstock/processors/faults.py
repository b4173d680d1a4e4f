"""Fault points for tests: `PENSTOCK_FAULTS=kill:before_commit@40` ends this process with SIGKILL at the 40th passage.

Points: intake, before_terminal, after_answer_append, before_commit, mid_stream. `stop:before_commit@40` stops the
process there, once, with SIGSTOP: the test that armed it sees that in /proc, and then kills it or continues it by
SIGCONT. `stall:fetch@3` lets the third fetch from Kafka wait for ever, as the consumer's open bugs do.
`plant:commit_first` is a planted defect: offsets are committed before their outcomes are published. Without the
variable every hook is a no-op.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping

PASSED = frozenset({"intake", "before_terminal", "after_answer_append", "before_commit", "mid_stream"})
POINTS = {
    "kill": PASSED,
    "stop": PASSED,
    "stall": frozenset({"fetch"}),
    "plant": frozenset({"commit_first"}),
}


def parse_faults(text: str) -> dict[str, tuple[str, int]]:
    """`kill:point[@n],…` as point → (action, passage). Raises ValueError for what is not a known point."""
    found: dict[str, tuple[str, int]] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        action, _, rest = part.partition(":")
        point, _, count = rest.partition("@")
        if point not in POINTS.get(action, ()):
            known = " or ".join(f"{action}:<{'|'.join(sorted(points))}>[@n]" for action, points in POINTS.items())
            raise ValueError(f"PENSTOCK_FAULTS: {part!r} is not {known}")
        found[point] = action, int(count or "1")
    return found


def signal_self(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


class Faults:
    """Counts passages of each armed point; `hit` is one dictionary look-up when nothing is armed."""

    __slots__ = ("_actions", "_left", "_signal")

    def __init__(
        self, armed: Mapping[str, tuple[str, int]], signal_self: Callable[[signal.Signals], None] = signal_self
    ) -> None:
        self._left = {point: passage for point, (_, passage) in armed.items()}
        self._actions = {point: action for point, (action, _) in armed.items()}
        self._signal = signal_self

    @classmethod
    def from_env(cls) -> Faults:
        return cls(parse_faults(os.environ.get("PENSTOCK_FAULTS", "")))

    def armed(self, point: str) -> bool:
        return point in self._left

    def hit(self, point: str) -> None:
        """Pass a point at which the process may be made to die or to stop."""
        if not self.due(point):
            return
        if self._actions[point] == "stop":
            del self._left[point]
            self._signal(signal.SIGSTOP)
        else:
            self._signal(signal.SIGKILL)

    def due(self, point: str) -> bool:
        """Pass a point; whether this is the passage, or a later one, at which its fault happens."""
        left = self._left.get(point)
        if left is None:
            return False
        self._left[point] = left - 1
        return left <= 1
