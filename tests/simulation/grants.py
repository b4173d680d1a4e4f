"""What is looked at before each grant: is it this one's turn?"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from penstock.processors.core.fleet.lane import Lane
from penstock.processors.core.fleet.replica import Replica, ReplicaState
from penstock.processors.core.work.states import IN_SCHEDULER, OVER, Stage
from penstock.processors.core.work.work import Work
from simulation.inside import Inside
from simulation.truth import Violation

if TYPE_CHECKING:
    from simulation.workers import Life

RANK = {"high": 0, "medium": 1, "low": 2}
SLACK = 2
"""Starts out of order that the aged share may be ahead by."""


class Grants:
    """Looks at one flow's grants. The flow itself is untouched."""

    def __init__(self, life: Life) -> None:
        self._life = life
        self._inside = life.inside
        self._settings = life.cluster.plan.settings
        self._granted: Counter[str] = Counter()
        self._out_of_order: Counter[str] = Counter()
        self._passed_over: Counter[str] = Counter()
        self._inside.before_each_grant(self._look)
        self._inside.when_started_ungranted(self._started_ungranted)

    def _started_ungranted(self, work: Work) -> None:
        # A turn whose prompt was refused keeps its conversation by being started: that may use up the aged share.
        self._passed_over[work.lane] = 0

    def _look(self, lane: Lane, replica: Replica, work: Work, now: float) -> None:
        if work.stage not in IN_SCHEDULER:
            raise Violation(f"grant: {work} is granted twice")
        start_ms = work.request.start_after
        if start_ms is not None and self._life.world.wall_ms < start_ms:
            raise Violation(f"start: {work} is granted {start_ms - self._life.world.wall_ms} ms before its time")
        self._room(replica, work)
        self._line(work)
        self._alone(replica, work)
        self._granted[lane.name] += 1
        apart = work.alone or work.group is not None
        waiting = [other for other in self._inside.works() if other is not work and other.lane == lane.name]
        rivals = [other for other in waiting if self._could(replica, other, waiting, now)]
        self._order(lane, work, rivals, now, apart=apart)
        self._aged(lane, work, waiting, rivals, now, apart=apart)

    def _room(self, replica: Replica, work: Work) -> None:
        need = self._inside.need_tokens(work)
        if replica.state is not ReplicaState.READY:
            raise Violation(f"room: {work} is granted a slot of {replica}")
        if replica.free_slots < 1 or (replica.tokens is not None and replica.used_tokens + need > replica.tokens):
            raise Violation(
                f"room: {work} is granted {need} tokens of {replica.free_tokens} and a slot of {replica.free_slots}"
            )

    def _line(self, work: Work) -> None:
        """One turn at a time; within a class in the order of the log."""
        if work.conversation is None:
            return
        for other in self._inside.works():
            if other is work or other.conversation != work.conversation or other.stage in OVER:
                continue
            if _under_way(other):
                raise Violation(f"line: {work} is granted while {other} is under way")
            if other.end_with is not None or other.pass_to is not None:
                continue  # it waits for its bytes, to end with them or to be written again
            earlier = other.seq < work.seq and other.klass == work.klass and other.key[:2] == work.key[:2]
            if (
                earlier
                and not work.holds_conversation
                and (other.stage in IN_SCHEDULER or other.stage is Stage.RETRYING)
            ):
                raise Violation(f"line: {work} is granted before {other}")

    def _alone(self, replica: Replica, work: Work) -> None:
        holders = self._inside.holders()
        if holders and (work.alone or any(holder.alone for holder in holders)):
            raise Violation(f"alone: {work} is granted beside {holders}")
        groups = {id(holder.group) for holder in replica.holders if holder.group is not None}
        if work.group is not None and any(holder.group is not work.group for holder in replica.holders):
            raise Violation(f"suspects: {work} is granted beside {list(replica.holders)}")
        if groups and groups != {id(work.group)}:
            raise Violation(f"suspects: {work} is granted beside suspects of another group")

    def _could(self, replica: Replica, other: Work, waiting: list[Work], now: float) -> bool:
        """Whether it could be granted now as well, with room set aside for those before it that are being prepared."""
        if other.alone or other.group is not None or other.klass in self._inside.paused_classes():
            return False
        at_once = replica.inline and other.conversation is None and not (other.may_resume_stream or other.stored_input)
        if other.stage is not Stage.READY and not (other.stage is Stage.QUEUED and at_once):
            return False
        if self._inside.replica_number(other) not in (None, replica.number):
            return False
        unready = [
            one.cost
            for one in waiting
            if one.stage in IN_SCHEDULER
            and one.stage is not Stage.READY
            and (RANK[one.klass] <= RANK[other.klass] or now - one.arrived_at > self._settings.aging_s)
        ]
        if not replica.inline and replica.free_slots <= len(unready):
            return False
        need = self._inside.need_tokens(other)
        if not self._inside.memory_is_free(replica, other, now):
            return False
        if replica.tokens is not None and replica.used_tokens + sum(unready) + need > replica.tokens:
            return False
        if other.conversation is None:
            return True
        return not any(
            one is not other
            and one.conversation == other.conversation
            and (_under_way(one) or one.holds_conversation or (one.klass == other.klass and one.seq < other.seq))
            for one in self._inside.works()
        )

    def _order(self, lane: Lane, work: Work, rivals: list[Work], now: float, *, apart: bool) -> None:
        """Nothing less urgent starts while something more urgent could; the aged have their share of exceptions."""
        if apart:
            return
        before = [other for other in rivals if self._stands_before(other, work)]
        if not before:
            return
        if now - work.arrived_at <= self._settings.aging_s:
            raise Violation(f"order: {work} ({work.klass}) is granted before {before[0]} ({before[0].klass})")
        self._out_of_order[lane.name] += 1
        most = self._granted[lane.name] / self._settings.aged_share + SLACK
        if self._out_of_order[lane.name] > most:
            raise Violation(f"order: {self._out_of_order[lane.name]} of {self._granted[lane.name]} starts out of order")

    @staticmethod
    def _stands_before(other: Work, work: Work) -> bool:
        if RANK[other.klass] != RANK[work.klass]:
            return RANK[other.klass] < RANK[work.klass]
        if other.tenant != work.tenant:
            return False  # fair shares decide
        never = float("inf")
        return (other.priority, never if other.deadline is None else other.deadline, other.seq) < (
            work.priority,
            never if work.deadline is None else work.deadline,
            work.seq,
        )

    def _aged(
        self, lane: Lane, work: Work, waiting: list[Work], rivals: list[Work], now: float, *, apart: bool
    ) -> None:
        """What has waited long starts now and then, whatever more urgent comes."""
        old = [
            other
            for other in rivals
            if now - other.arrived_at > self._settings.aging_s and RANK[other.klass] > RANK[work.klass]
        ]
        eligible = self._inside.eligible
        aged_share = now - work.arrived_at > self._settings.aging_s and any(
            RANK[other.klass] < RANK[work.klass] and eligible(other) for other in waiting
        )
        if not old or apart or aged_share:
            self._passed_over[lane.name] = 0
            return
        if self._unfit(work, waiting, rivals, now) >= self._inside.aged_tried:
            return  # so many are tried in a turn of the aged, and these may stand before it
        self._passed_over[lane.name] += 1
        # The oldest may be parked or just being prepared while as many as there are slots start at once.
        if self._passed_over[lane.name] > 2 * (self._settings.aged_share + sum(one.slots for one in lane.ready)):
            raise Violation(f"aging: {self._passed_over[lane.name]} starts in a row passed over {old[0]}")

    def _unfit(self, work: Work, waiting: list[Work], rivals: list[Work], now: float) -> int:
        """The aged that cannot start now."""
        return sum(
            other.stage in IN_SCHEDULER
            and other not in rivals
            and now - other.arrived_at > self._settings.aging_s
            and RANK[other.klass] > RANK[work.klass]
            and self._inside.eligible(other)
            for other in waiting
        )


def _under_way(work: Work) -> bool:
    """Whether its conversation must wait for it; not for an answer that stood there already, to be kept elsewhere."""
    if work.stage is Stage.STORING:
        return Inside.was_granted(work)
    return work.stage in (Stage.BEGINNING, Stage.RUNNING) or (work.stage is Stage.RETRYING and work.holds_conversation)
