"""The requests that a worker holds, the one method that changes their state, and how many of them are ending."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable

from penstock.processors.core.effects import Effect, RunEnded
from penstock.processors.core.requests.scheduled import Scheduled
from penstock.processors.core.work import states
from penstock.processors.core.work.states import ENDING, Stage
from penstock.processors.core.work.work import Subject, Work, WorkKey
from penstock.schemas.topics import TP

ENDINGS_PER_PARTITION = 512
ENDING_BYTES_PER_PARTITION = 8 * 2**20
"""Ends under way to the broker at which a partition pauses, and bytes of their records: a flood of what ends at once,
as of poison, must not fill memory. The budget counts only what waits.
"""
ENDINGS_IN_ALL = 8192
"""Ends under way at which nothing more starts: the broker is away or slow."""
OUTPUT_BYTES = 128 << 20


class Registry:
    """By the place of its record, and by tenant and request id."""

    def __init__(self, emit: Callable[[Effect], None], output_bytes: int = OUTPUT_BYTES) -> None:
        """`output_bytes`: of finished outputs in memory, at which nothing more starts."""
        self._emit = emit
        self.most_output_bytes = output_bytes
        self.output_bytes = 0
        """Of finished outputs that the broker, or the store of artifacts, does not have yet."""
        self.chunk_bytes = 0
        """Of pieces of streams that the broker does not have yet."""
        self.works: dict[WorkKey, Work] = {}
        self.generation = -1
        self.owned_since_ms: float = float("inf")
        """Wall-clock milliseconds of the newest assignment."""
        self.transitions: set[states.Transition] | None = None
        """Set it to a set to have every transition noted (the simulator does)."""
        self.scheduled = Scheduled()
        """Those that wait for their time to start."""
        self.endings: Counter[TP] = Counter()
        """By partition, requests whose end is under way to the broker."""
        self._ending_bytes: Counter[TP] = Counter()
        self._ends_under_way = 0
        self._by_name: dict[tuple[str, str], Work] = {}
        self._seq = itertools.count(1)

    def next_seq(self) -> int:
        """Numbers that grow with each arrival."""
        return next(self._seq)

    def hold(self, work: Work) -> None:
        """Its record was read."""
        self.works[work.key] = work

    def name(self, work: Work) -> None:
        """From here on commands find it by its id."""
        self._by_name[(work.tenant, work.request_id)] = work

    def of(self, subject: Subject) -> Work | None:
        """The request of an answer; None if it has ended or was dropped."""
        work = self.works.get(subject.key)
        return work if work is not None and work.number == subject.seq else None

    def in_stage(self, subject: Subject, stage: Stage) -> Work | None:
        """The same, if the request is in this stage still."""
        work = self.of(subject)
        return work if work is not None and work.stage is stage else None

    def of_run(self, subject: Subject, run_id: str, *stages: Stage) -> Work | None:
        """The same, if this is the request's present run still and it is in one of these stages."""
        work = self.of(subject)
        if work is None or work.run is None or work.run.run_id != run_id or work.stage not in stages:
            return None
        return work

    def find(self, tenant: str, request_id: str) -> Work | None:
        return self._by_name.get((tenant, request_id))

    def forget(self, work: Work) -> None:
        """It is done, or was dropped."""
        self.scheduled.over(work)
        if self.works.get(work.key) is work:
            del self.works[work.key]
        name = (work.tenant, work.request_id)
        if self._by_name.get(name) is work:
            del self._by_name[name]

    def transition(self, work: Work, event: str, after: Stage) -> None:
        """The one place where a request changes its state. Raises IllegalTransition."""
        before = work.stage
        states.check(before, event, after)
        if self.transitions is not None:
            self.transitions.add((str(before), event, str(after)))
        work.stage = after
        if before is Stage.SCHEDULED:
            self.scheduled.remove(work)
        elif after is Stage.SCHEDULED:
            self.scheduled.add(work)
        if before is Stage.RUNNING:
            self._emit(RunEnded(work.first_key, work.request_id))
        if (after in ENDING) != (before in ENDING):
            change = 1 if after in ENDING else -1
            self.endings[work.tp] += change
            self._ending_bytes[work.tp] += change * work.size_bytes
            self._ends_under_way += change
            if change < 0:
                self.hold_output(work, 0)

    def hold_output(self, work: Work, size: int) -> None:
        """Count the bytes of its output that are in memory until its end is durable."""
        self.output_bytes += size - work.output_bytes
        work.output_bytes = size

    def too_many_endings(self, tp: TP, *, was_paused: bool) -> bool:
        """Whether the partition should deliver no more until some of its ends are durable. Has two watermarks."""
        share = 2 if was_paused else 1
        return (
            self.endings[tp] * share >= ENDINGS_PER_PARTITION
            or self._ending_bytes[tp] * share >= ENDING_BYTES_PER_PARTITION
        )

    @property
    def stalled(self) -> bool:
        """Whether too many requests are ending, or their outputs take too much memory, for anything more to start."""
        held_bytes = self.output_bytes + self.chunk_bytes
        return self._ends_under_way >= ENDINGS_IN_ALL or held_bytes >= self.most_output_bytes
