"""The requests that wait for their time to start: by time, and by partition."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.processors.core.queue.fairqueue import Sorted
from penstock.processors.core.requests.work import Work
from penstock.schemas.topics import TP

NEVER_MS = 2**63 - 1


class Scheduled:
    """Counts only. The registry adds and removes."""

    def __init__(self) -> None:
        self._by_time = Sorted()
        self._by_partition: dict[TP, dict[int, Work]] = {}

    def add(self, work: Work) -> None:
        """It waits until it may start, or expires."""
        self._by_time.add((_until_ms(work), work.key, work))
        self._by_partition.setdefault(work.tp, {})[work.key[2]] = work

    def remove(self, work: Work) -> None:
        """It waits no more."""
        self._by_time.remove((_until_ms(work), work.key, work))
        held = self._by_partition[work.tp]
        del held[work.key[2]]
        if not held:
            del self._by_partition[work.tp]

    def __len__(self) -> int:
        return sum(map(len, self._by_partition.values()))

    def first(self) -> tuple[int, Work | None]:
        """The next one, and when its wait ends, wall-clock milliseconds; NEVER_MS if there is none."""
        entry = self._by_time.first()
        return (NEVER_MS, None) if entry is None else (entry[0], entry[2])

    def partitions(self) -> list[TP]:
        """Those that have some."""
        return list(self._by_partition)

    def of_partition(self, tp: TP) -> Mapping[int, Work]:
        """By offset, in the order in which they came. It changes with them."""
        return self._by_partition.get(tp, {})


def _until_ms(work: Work) -> int:
    start_ms = work.start_after_ms or 0
    return start_ms if work.deadline_ms is None else min(start_ms, work.deadline_ms)
