"""Says when the worker can do no good any more: it is stalled, no member of its group for long, or not acknowledged.

It is stalled when a partition has lag, nothing holds it back, and its position has not moved for long.

Pure: looked at with a clock passed in. Waiting work, long jobs and paused partitions are no stalls. Neither is time in
which this process itself was stopped: only time in which it looked counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.processors.kafka.batches import PartitionProgress
from penstock.schemas.topics import TP

ASLEEP_S = 5.0
"""Looked at every second, so after such a gap this process (or its machine) was stopped, or very busy."""


@dataclass(slots=True)
class _Watch:
    position: int
    since: float


class StallWatch:
    """`look` is called every second or so; `stalled` are the partitions that have not moved for `stall_s`."""

    def __init__(self, stall_s: float) -> None:
        self._stall_s = stall_s
        self._watched: dict[TP, _Watch] = {}
        self._looked_at = float("-inf")
        self.stalled: frozenset[TP] = frozenset()

    def look(self, seen: Mapping[TP, PartitionProgress], *, room: bool, now: float) -> frozenset[TP]:
        """Note the positions now. `room` is whether intake would take more; seconds are monotonic."""
        if now - self._looked_at > ASLEEP_S:
            self._watched.clear()
        self._looked_at = now
        for gone in self._watched.keys() - seen.keys():
            del self._watched[gone]
        stalled: set[TP] = set()
        for tp, part in seen.items():
            watch = self._watched.get(tp)
            lag = part.highwater is not None and part.highwater > part.position
            if watch is None or watch.position != part.position or part.paused or not room or not lag:
                self._watched[tp] = _Watch(part.position, now)
            elif now - watch.since >= self._stall_s:
                stalled.add(tp)
        self.stalled = frozenset(stalled)
        return self.stalled


class JoinWatch:
    """`look` is called every second or so; it says when a former member has not come back for `unjoined_s`.

    Before the first assignment a worker may wait for the group. After it, what is fetched goes nowhere. Nobody can join
    while Kafka is away: only time in which it answers counts.
    """

    def __init__(self, unjoined_s: float) -> None:
        self._unjoined_s = unjoined_s
        self._since: float | None = None
        self._looked_at = float("-inf")

    def look(self, *, joined: bool, was_member: bool, broker_answers: bool, now: float) -> bool:
        """Seconds are monotonic."""
        asleep = now - self._looked_at > ASLEEP_S
        self._looked_at = now
        if joined or not was_member or not broker_answers:
            self._since = None
            return False
        if asleep or self._since is None:
            self._since = now
        return now - self._since > self._unjoined_s


class DeliveryWatch:
    """`look` is called every second or so; it says when only a new process can end the deliveries that are under way.

    That is so when Kafka answers, and has acknowledged none of them for `silent_s`. It is so too when one has had no
    report for `longest_s`, within which the client reports each record, and `margin_s`: then its report is lost.
    """

    def __init__(self, silent_s: float, longest_s: float, margin_s: float = 60.0) -> None:
        self._silent_s, self._longest_s, self._margin_s = silent_s, longest_s, margin_s
        self._acknowledged = 0
        self._silent_since = self._overdue_since = self._looked_at = float("-inf")

    def look(self, oldest_s: float, acknowledged: int, broker_answers: bool, *, now: float) -> bool:
        """`oldest_s`: age of the oldest record under way, 0 without one. `acknowledged`: records so far."""
        asleep = now - self._looked_at > ASLEEP_S
        self._looked_at = now
        if asleep or not broker_answers or oldest_s == 0 or acknowledged != self._acknowledged:
            self._silent_since, self._acknowledged = now, acknowledged
        if asleep or oldest_s < self._longest_s:
            self._overdue_since = now
        return now - self._silent_since >= self._silent_s or now - self._overdue_since >= self._margin_s
