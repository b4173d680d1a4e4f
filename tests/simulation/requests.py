"""What one worker may do with requests: with those of its partitions only, and with none that it heard to be cancelled.

Kept beside the flow, from what the worker was told: its assignment, the commands, and the effects of the flow.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from penstock.processors.core import effects as ask
from penstock.processors.core.fleet.lane import UNSERVED
from penstock.processors.core.work.states import IN_SCHEDULER, NOT_DUE, ON_LANE, OVER, Stage
from penstock.processors.core.work.work import Subject as AtOneMoment
from penstock.processors.core.work.work import Work
from penstock.schemas.records import ControlCommand
from penstock.schemas.topics import CLASSES
from simulation.log import TP
from simulation.truth import Subject, Violation

if TYPE_CHECKING:
    from simulation.workers import Life

WAITS = IN_SCHEDULER | NOT_DUE
MAY_START = (WAITS | ON_LANE) - {Stage.FETCHING}
"""A request in one of these stages runs, or will. One whose bytes are read again may have to end with them."""
STARTS = (ask.Prepare, ask.Begin, ask.Start, ask.Retried)


class Requests:
    """Of one life of a worker."""

    def __init__(self, life: Life) -> None:
        self._life = life
        self._inside = life.inside
        self._owned: Collection[TP] = ()
        self._cancelled: set[Subject] = set()
        self._erased_ms: dict[Subject, int] = {}
        """Requests that were appended up to then are cancelled."""
        self._deleted_ms: dict[Subject, int] = {}
        """By conversation: turns that were appended up to then are cancelled."""
        self._ending: dict[Work, None] = {}
        """Held requests that are cancelled."""
        total = life.cluster.plan.settings.intake_bytes
        self._ends_bytes = total // 8
        self._bodies_bytes = total // 2 - self._ends_bytes
        self._read_to_end: dict[Work, None] = {}
        self._inside.when_held(self._held)
        self._inside.when_read_again(self._reads_again)

    # -- partitions

    def assigned(self, tps: Collection[TP]) -> None:
        self._owned = tps

    def holds_only_its_own(self, *, fenced: bool) -> None:
        """An assignment was carried out. After a fence others may have worked on all that was held."""
        for work in self._inside.works():
            if fenced or work.tp not in self._owned:
                raise Violation(f"owner: {self._life.name} still holds {work} after an assignment")

    def effect(self, subject: AtOneMoment, effect: ask.Effect) -> None:
        """The flow asks for something that a request needs."""
        if subject.key[:2] not in self._owned:
            what = type(effect).__name__
            raise Violation(f"owner: {self._life.name} asks for {what} of {subject.request_id} at {subject.key}")
        if not self._ending and (subject.tenant, subject.request_id) not in self._cancelled:
            return
        work = self._inside.work_of(subject)
        # What is kept though nothing is appended is an answer that stands in the conversation.
        keeps = isinstance(effect, ask.StoreOutput) and (effect.to is not None or work.conversation_id is None)
        if (keeps or isinstance(effect, STARTS)) and self._is_cancelled(work):
            raise Violation(f"cancel: {type(effect).__name__} of {work}, after {self._life.name} heard its cancel")

    # -- cancels

    def hears(self, command: ControlCommand) -> None:
        """A command that the flow is about to follow."""
        if command.kind == "cancel":
            self._cancelled.add((command.tenant, command.request_id))
        elif command.kind == "erase":
            self._erased_ms[(command.tenant, command.request_id)] = command.created_at
        elif command.kind == "delete_conversation" and command.conversation_id is not None:
            named = command.tenant, command.conversation_id
            self._deleted_ms[named] = max(command.created_at, self._deleted_ms.get(named, 0))
        else:
            return
        for work in self._inside.works():
            self._held(work)

    def _held(self, work: Work) -> None:
        if self._is_cancelled(work):
            self._ending[work] = None

    def _is_cancelled(self, work: Work) -> bool:
        deleted_ms = self._deleted_ms.get((work.tenant, work.conversation_id or ""), -1)
        erased_ms = self._erased_ms.get((work.tenant, work.request_id), -1)
        cancelled = (work.tenant, work.request_id) in self._cancelled
        return cancelled or work.first_place.append_time_ms <= max(erased_ms, deleted_ms)

    def handled(self) -> None:
        """The worker has handled an event and carried out all effects."""
        for work in list(self._ending):
            if work.stage in MAY_START:
                raise Violation(f"cancel: {self._life.name} heard the cancel of {work}, which is {work.stage}")
            if work.stage in OVER:
                del self._ending[work]
        for engine in self._life.engines.values() if self._ending else ():
            for run in engine.runs.values():
                if run.work in self._ending:
                    raise Violation(f"cancel: {engine.name} goes on with {run.work}, whose cancel was heard")

    # -- bytes

    def taken(self, work: Work) -> None:
        """A record was delivered. Its bytes stay within the share of its class and model, or are alone there."""
        if not work.in_budget or work.body is None:
            return
        kept = [one for one in self._inside.works() if one.in_budget and one.body is not None]
        beside = sum(one.size_bytes for one in kept if one is not work and _pair(one) == _pair(work))
        if beside and beside + work.size_bytes > self._share_bytes:
            raise Violation(f"bodies: {work} brings {work.size_bytes} bytes to {beside} of {self._share_bytes}")
        sizes = [one.size_bytes for one in kept]
        if sum(sizes) - max(sizes) > self._bodies_bytes:
            raise Violation(f"bodies: {work} is kept, and {sum(sizes)} bytes are, of {self._bodies_bytes}")

    def _reads_again(self, works: list[Work]) -> None:
        """Their turn is near. One goes beyond the share at most, and only if those before it are within."""
        if any(work.alone or work.group for work in works) or "bytes_read_again" not in self._life.cluster.plan.checks:
            return
        ahead = self._inside.ahead(works[0].lane, works[0].klass)
        last = max(map(ahead.index, works))
        size = sum(one.size_bytes for one in ahead[: last + 1] if one.stage is not Stage.PARKED)
        size -= max(work.size_bytes for work in works)
        if size > self._share_bytes:
            raise Violation(f"bodies: {ahead[last]} is read again behind {size} bytes, of {self._share_bytes}")

    def reads_to_end(self, effect: ask.Fetch) -> None:
        """What ends, or is passed on, while it is parked has its own part of the budget."""
        read = {(*effect.tp, offset) for offset in effect.offsets}
        works = [work for work in self._inside.works() if work.key in read]
        if all(work.end_with is None and work.pass_to is None for work in works):
            return
        self._read_to_end |= dict.fromkeys(works)
        for work in [work for work in self._read_to_end if work.stage in OVER]:
            del self._read_to_end[work]
        size = sum(work.size_bytes for work in self._read_to_end)
        if len(self._read_to_end) > 1 and size > self._ends_bytes:
            raise Violation(f"bodies: {size} bytes are read again to end, of {self._ends_bytes}")

    @property
    def _share_bytes(self) -> int:
        return self._bodies_bytes // (
            len(CLASSES) * max(1, sum(lane.name != UNSERVED for lane in self._inside.lanes()))
        )

    # -- deadlines

    def ticked(self, now: float) -> None:
        """A tick is over: nothing waits beyond its deadline, but for what is read again to end, or to be passed on.

        Whoever it is passed on to ends it as it arrives.
        """
        for work in self._inside.works():
            late = work.deadline is not None and work.deadline <= now
            if late and work.stage in WAITS and work.end_with is None and work.pass_to is None:
                raise Violation(f"deadline: {work} waits, and its deadline was {now - (work.deadline or 0):.3f} s ago")


def _pair(work: Work) -> tuple[str, str]:
    """Who shares bytes with it."""
    return work.klass, work.lane
