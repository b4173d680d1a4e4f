"""Where the time of a test run goes, by folder: what makes tests ready, what they do, what clears up behind them.

And the files that take longest.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

PHASES = ("setup", "call", "teardown")
FOLDERS = 3
"""Parts of a path that name a room: tests/integration/worker."""
LEAST_S = 1.0
LONG_FILE_S = 60.0


class TimeTable:
    """Seconds, added up over all processes of the run."""

    def __init__(self) -> None:
        self._spent: dict[str, dict[str, float]] = defaultdict(lambda: dict.fromkeys(PHASES, 0.0))
        self._tests: dict[str, int] = defaultdict(int)
        self._files: dict[str, float] = defaultdict(float)

    def add(self, nodeid: str, phase: str, seconds: float) -> None:
        file = nodeid.partition("::")[0]
        self._files[file] += seconds
        path = file.split("/")
        room = "/".join(path[: min(FOLDERS, len(path) - 1)])
        self._spent[room][phase] += seconds
        self._tests[room] += phase == "call"

    def lines(self) -> list[str]:
        """The rooms that took a second and more, the longest first; none when no test ran so long."""
        rows = [(room, self._tests[room], spent) for room, spent in self._spent.items() if _all(spent) >= LEAST_S]
        rows.sort(key=lambda row: -_all(row[2]))
        lines = [f"{'seconds':>9} {'setup':>8} {'call':>8} {'teardown':>8} {'tests':>6}  room"] if rows else []
        for room, tests, spent in rows:
            phases = " ".join(f"{spent[phase]:8.1f}" for phase in PHASES)
            lines.append(f"{_all(spent):9.1f} {phases} {tests:6}  {room}")
        longest = sorted(self._files.items(), key=lambda one: -one[1])
        lines += [f"{seconds:9.1f} {file}" for file, seconds in longest if seconds >= LONG_FILE_S]
        return lines


def _all(spent: Mapping[str, float]) -> float:
    return sum(spent.values())
