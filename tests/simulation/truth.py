"""What really happened, written down beside the product: records accepted, runs and their words, who killed whom."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.processors.core.intake.arrivals import Poison
from penstock.processors.core.work.work import Work
from penstock.schemas.records import ControlCommand, DeadLetter
from simulation.log import TP, Stored

if TYPE_CHECKING:
    from simulation.cluster import Cluster
    from simulation.engines import EngineRun

Subject = tuple[str, str]
"""(tenant, request_id)"""


class Violation(AssertionError):
    """An invariant does not hold. The first word of its text names it."""


@dataclass(slots=True)
class Accepted:
    """A record on a request topic: a request's, or one that names nobody."""

    tp: TP
    stored: Stored
    subject: Subject | None
    first_place: tuple[str, int, int]


class Truth:
    """Facts of the world; the checks compare the product with them."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.records: dict[tuple[TP, int], Accepted] = {}
        self.subjects: dict[Subject, list[Accepted]] = {}
        self._copies: dict[tuple[str, int, int], list[tuple[str, int, int]]] = {}
        """By a request's first place, all places of its record, in the order of appending: it may be moved on."""
        self.letters: dict[tuple[str, int, int], list[DeadLetter]] = defaultdict(list)
        self.runs: dict[Subject, dict[tuple[int, int], list[EngineRun]]] = {}
        self.lost: set[Subject] = set()
        """Their records were taken by retention: they need not get an outcome."""
        self.passed_over: set[Subject] = set()
        """Of those, whose record may be on the log, and is delivered to nobody: a log was cut, an offset moved on."""
        self.awaiting_store: set[Work] = set()
        """Their output could not be kept, though the run had ended well."""
        self._lost_up_to: dict[TP, int] = {}
        """Where logs ended that have lost their ends."""
        self._unsafe: set[Stored] = set()
        """Appended below: it may be taken for what was read there before, and need not get an outcome."""
        self.skipped: set[tuple[TP, int]] = set()
        """Passed over by a tool that committed for the worker."""
        self.killers: set[Subject] = set()
        self.kills: Counter[Subject] = Counter()
        self.told_failures: Counter[Work] = Counter()
        """Failures of its own, after which it may be tried again."""
        self.solo_deaths: Counter[Work] = Counter()
        self.excused: set[Work] = set()
        """May be blamed for a death that it did not cause."""

    # -- records

    def accepted(self, tp: TP, stored: Stored) -> None:
        read = self._cluster.intake.read(tp[0], tp[1], stored.offset, stored.append_ms, stored.headers, stored.value)
        subject: Subject | None = None
        if isinstance(read, Poison):
            if read.request_id is not None:
                subject = (read.tenant or "default", read.request_id)
        else:
            subject = (read.request.tenant, read.request.request_id)
        record = Accepted(tp, stored, subject, (read.origin.topic, read.origin.partition, read.origin.offset))
        self.records[(tp, stored.offset)] = record
        if stored.offset < self._lost_up_to.get(tp, 0):
            self._unsafe.add(stored)
            if subject is not None:
                self.lost.add(subject)
                self.passed_over.add(subject)
        if subject is not None:
            self.subjects.setdefault(subject, []).append(record)
        self._copies.setdefault(record.first_place, []).append((*tp, stored.offset))

    def place_of(self, command: ControlCommand) -> TP | None:
        """The partition that a request came from."""
        found = self.subjects.get((command.tenant, command.request_id))
        return found[0].first_place[:2] if found else None

    def lose(self, record: Accepted) -> None:
        """Retention takes the record."""
        self._cluster.log.partitions[record.tp].delete(record.stored.offset)
        if record.subject is not None:
            self.lost.add(record.subject)

    def lose_beginning(self, tp: TP, start: int) -> None:
        """All records of a log below an offset are deleted."""
        log = self._cluster.log.partitions[tp]
        for offset in range(log.start, start):
            if log.slots[offset] is not None and (record := self.records.get((tp, offset))) is not None:
                self.lose(record)
        log.lose_beginning(start)

    def lose_end(self, tp: TP, end: int) -> None:
        """The broker loses the end of a log. Until its owner has begun again, nobody need work on what comes there.

        A log that has grown again beyond the commit while nobody looked looks whole.
        """
        log = self._cluster.log.partitions[tp]
        for offset in range(end, log.end):
            record = self.records.pop((tp, offset), None)
            if record is not None and record.subject is not None:
                self.lost.add(record.subject)
                self.passed_over.add(record.subject)
        self._lost_up_to[tp] = max(self._lost_up_to.get(tp, 0), log.end)
        log.lose_end(end)

    def skip(self, tp: TP, offset: int, count: int) -> None:
        """A tool commits an offset further on: nobody need work on what it passes over."""
        end = min(offset + count, self._cluster.log.partitions[tp].end)
        for passed in range(offset, end):
            self.skipped.add((tp, passed))
            record = self.records.get((tp, passed))
            if record is not None and record.subject is not None:
                self.lost.add(record.subject)
                self.passed_over.add(record.subject)
        group = self._cluster.log.group
        group.offsets[tp] = end, ""
        group.on_commit(tp, group.offsets[tp])

    def dead_lettered(self, letter: DeadLetter) -> None:
        origin = letter.origin
        self.letters[(origin.topic, origin.partition, origin.offset)].append(letter)

    def replaced(self, tp: TP, offset: int) -> bool:
        """Whether what replaces the record is on the log, so that its offset may be committed."""
        record = self.records.get((tp, offset))
        if record is None or self._cluster.log.partitions[tp].slots[offset] is None:
            return True
        if record.stored in self._unsafe:
            return True
        place = (*tp, offset)
        if (tp, offset) in self.skipped:
            return True
        if record.subject is None:
            return any(letter.original == record.stored.value for letter in self.letters[place])
        readers = self._cluster.readers
        if readers.ended(record.subject) or self._copies[record.first_place][-1] != place:
            return True
        # Its outcome is there, but readers follow another record of it, which is still to be worked on, or gone.
        return record.subject in readers.told_ends and (
            record.subject in self.lost
            or any(
                other.stored.offset not in self._cluster.checks.passed(other.tp)
                for other in self.subjects[record.subject]
                if other is not record
            )
        )

    # -- runs

    def run_begins(self, run: EngineRun) -> None:
        subject = (run.work.tenant, run.work.request_id)
        self.runs.setdefault(subject, {}).setdefault((run.epoch, run.attempt), []).append(run)

    def runs_at(self, subject: Subject, place: tuple[int, int]) -> list[EngineRun]:
        return self.runs.get(subject, {}).get(place, [])

    def killed(self, work: Work) -> None:
        """An engine dies of this request's prompt."""
        subject = (work.tenant, work.request_id)
        self.killers.add(subject)
        self.kills[subject] += 1
