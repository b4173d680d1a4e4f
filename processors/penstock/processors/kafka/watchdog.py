"""Says when the worker is stalled: a partition has lag, nothing holds it back, and its position has not moved for long.

Pure: looked at with a clock passed in. Waiting work, long jobs and paused partitions are no stalls.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

TP = tuple[str, int]


class Seen(Protocol):
    """What is known of one partition's fetch; `position` and `highwater` are offsets, None when not yet known."""

    @property
    def position(self) -> int | None: ...
    @property
    def highwater(self) -> int | None: ...
    @property
    def paused(self) -> bool: ...


@dataclass(slots=True)
class _Watch:
    position: int | None
    since: float


class StallWatch:
    """`look` is called every second or so; `stalled` are the partitions that have not moved for `stall_s`."""

    def __init__(self, stall_s: float) -> None:
        self._stall_s = stall_s
        self._watched: dict[TP, _Watch] = {}
        self.stalled: frozenset[TP] = frozenset()

    def look(self, seen: Mapping[TP, Seen], *, room: bool, now: float) -> frozenset[TP]:
        """Note the positions now. `room` is whether intake would take more; seconds are monotonic."""
        for gone in self._watched.keys() - seen.keys():
            del self._watched[gone]
        stalled: set[TP] = set()
        for tp, part in seen.items():
            watch = self._watched.get(tp)
            lag = part.position is None or part.highwater is None or part.highwater > part.position
            if watch is None or watch.position != part.position or part.paused or not room or not lag:
                self._watched[tp] = _Watch(part.position, now)
            elif now - watch.since >= self._stall_s:
                stalled.add(tp)
        self.stalled = frozenset(stalled)
        return self.stalled
