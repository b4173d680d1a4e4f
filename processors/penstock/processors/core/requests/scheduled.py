"""The requests that wait for their time to start: by time, by partition and by tenant."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping

from penstock.processors.core.queue.fairqueue import Sorted
from penstock.processors.core.work.states import Stage
from penstock.processors.core.work.work import Work, WorkKey
from penstock.schemas.topics import TP

NEVER_MS = 2**63 - 1


class Scheduled:
    """Counts only. The registry adds and removes.

    One that is written again keeps its place here until its copy comes: nobody else can take it meanwhile.
    """

    def __init__(self) -> None:
        self._by_time = Sorted()
        self._by_partition: dict[TP, dict[int, Work]] = {}
        self._by_tenant: Counter[tuple[TP, str]] = Counter()
        self._written_again: dict[TP, dict[WorkKey, str]] = {}
        self._length = 0

    def __len__(self) -> int:
        """Those that wait for their time now."""
        return self._length

    def add(self, work: Work) -> None:
        """It waits until it may start, or expires."""
        self._length += 1
        self._by_time.add((_until_ms(work), work.key, work))
        self._by_tenant[work.tp, work.tenant] += 1
        held, offset = self._by_partition.setdefault(work.tp, {}), work.key[2]
        is_last = not held or next(reversed(held)) < offset
        held[offset] = work
        if not is_last:  # it was delivered again
            self._by_partition[work.tp] = dict(sorted(held.items()))

    def remove(self, work: Work) -> None:
        """It waits no more."""
        self._length -= 1
        self._by_time.remove((_until_ms(work), work.key, work))
        self._count_out(work.tp, work.tenant)
        held = self._by_partition[work.tp]
        del held[work.key[2]]
        if not held:
            del self._by_partition[work.tp]

    def write_again(self, work: Work) -> None:
        """Its record is put at the end of its partition."""
        self._written_again.setdefault(work.tp, {})[work.first_key] = work.tenant
        self._by_tenant[work.tp, work.tenant] += 1

    def comes_again(self, work: Work) -> bool:
        """Whether it is the copy of one that was written again, whose place it takes."""
        expected = self._written_again.get(work.tp, {})
        if (tenant := expected.pop(work.first_key, None)) is None:
            return False
        self._count_out(work.tp, tenant)
        return True

    def assign(self, partitions: Container[TP]) -> None:
        """A new assignment: copies on other partitions come to others."""
        for tp in [tp for tp in self._written_again if tp not in partitions]:
            for tenant in self._written_again.pop(tp).values():
                self._count_out(tp, tenant)

    def over(self, work: Work) -> None:
        """It has ended here, or was dropped. Of one that was written again a copy will come."""
        if work.pass_to is None or work.stage is not Stage.DONE or work.end_with is not None:
            self.comes_again(work)

    def first(self) -> tuple[int, Work | None]:
        """The next one, and when its wait ends, wall-clock milliseconds; NEVER_MS if there is none."""
        entry = self._by_time.first()
        return (NEVER_MS, None) if entry is None else (entry[0], entry[2])

    def partitions(self) -> list[TP]:
        return list(self._by_partition)

    def of_partition(self, tp: TP) -> Mapping[int, Work]:
        """By offset, the lowest first. It changes with them."""
        return self._by_partition.get(tp, {})

    def places(self, tp: TP) -> int:
        """How many of a partition there are, those that are written again too."""
        return len(self._by_partition.get(tp, ())) + len(self._written_again.get(tp, ()))

    def places_of(self, tp: TP, tenant: str) -> int:
        return self._by_tenant[tp, tenant]

    def _count_out(self, tp: TP, tenant: str) -> None:
        self._by_tenant[tp, tenant] -= 1
        if not self._by_tenant[tp, tenant]:
            del self._by_tenant[tp, tenant]


def _until_ms(work: Work) -> int:
    start_ms = work.start_after_ms or 0
    return start_ms if work.deadline_ms is None else min(start_ms, work.deadline_ms)
