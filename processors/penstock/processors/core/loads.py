"""Lanes coming up and going down, and what that means for the requests on them."""

from __future__ import annotations

import itertools

from penstock.processors.core.effects import Load
from penstock.processors.core.lane import Lane, LaneState
from penstock.processors.core.runs import Runs
from penstock.processors.core.states import Stage
from penstock.processors.core.suspects import suspect_all
from penstock.schemas.errors import EngineFailed

TOLD_WAITING = 64
"""So many of those who wait for a lane are told what they wait for."""
FAILED_AT_ONCE = 256
"""So many are ended at a time when a lane cannot be loaded."""
LOOKED_THROUGH = 1024
"""Of those who wait, when some are newer than the failure."""
AFTERMATH_S = 1.0
"""A death this soon after a run was stopped may be the stopped run's fault: nobody is blamed alone for it."""
ENDINGS_IN_ALL = 8192
"""Ends under way at which nothing more starts: the broker is away or slow."""


class Loads(Runs):
    """When a lane is loaded, who is to blame for a death, and who is told that waiting is of no use any more."""

    def want(self, name: str) -> None:
        """Load the lane's model, whether somebody waits for it or not."""
        lane = self.lane(name)
        lane.wanted = True
        self._mark_changed(lane)

    def lane_up(self, name: str, slots: int, tokens: int | None, now: float, *, inline: bool) -> None:
        """The lane's model is loaded: it runs so many at once, in so many tokens of cache (None: no such limit)."""
        lane = self.lane(name)
        if lane.state is LaneState.LOADING:
            self.forecast.loaded(name, now - lane.load_span[0])
        lane.up(slots, tokens, inline=inline, now=now)
        self._mark_changed(lane)

    def lane_down(self, name: str, now: float) -> None:
        """The lane's engine died, or was unloaded. What ran on it runs again; who killed it is found by halves."""
        lane = self.lane(name)
        victims = [work for work in lane.holders if work.stage is Stage.RUNNING]
        victims += [work for work in lane.ahead if work.stage is Stage.PREPARING]
        lane.down(now, with_work=bool(victims))
        culprit = suspect_all(victims)
        if now - lane.stopped_at <= AFTERMATH_S:
            culprit = None  # what was stopped a moment ago may be to blame: it runs again by itself
        lane.exclusive = None
        for work in [*lane.holders, *lane.ahead]:
            if work is not culprit:
                self._requeue(work, "lane_down", now)
        if culprit is not None:
            culprit.spent = max(culprit.spent, min(culprit.deaths, culprit.max_attempts))
            error = EngineFailed("the engine's process died while it ran")
            self._failed(culprit, "lane_down", error, now, again=True)
        self._unset_alone(name)
        self._mark_changed(lane)

    def lane_unloaded(self, name: str, now: float) -> None:
        """The lane's model was taken away on purpose: nobody is to blame."""
        lane = self.lane(name)
        lane.state, lane.wanted = LaneState.ABSENT, False
        lane.exclusive = None
        for work in [*lane.holders, *lane.ahead]:
            self._requeue(work, "lane_down", now)
        self._unset_alone(name)
        self._mark_changed(lane)

    def lane_busy(self, name: str, seconds: float, now: float) -> None:
        """The lane's engine takes nothing new for so long."""
        lane = self.lane(name)
        lane.busy_until = max(lane.busy_until, now + seconds)

    def lane_limits(self, name: str, slots: int, now: float) -> None:
        """The lane's engine runs so many at once from now on. What is on it in excess may end."""
        lane = self.lane(name)
        lane.slots = slots
        self._mark_changed(lane)

    def load_failed(self, name: str, error: BaseException, now: float) -> None:
        """The lane's model could not be loaded. Those who wait are failed when waiting is of no use any more."""
        lane = self.lane(name)
        known = lane.load_failed(error, now)
        if known is not None:
            lane.fail_error, lane.fail_through = known, next(self._seq)
            lane.wanted = False
        self._unset_alone(name)
        self._mark_changed(lane)

    def _unset_alone(self, lane: str) -> None:
        alone = self.starter.alone
        if alone is not None and alone.lane == lane:
            self.starter.alone = None

    def _fail_waiting(self, lane: Lane, now: float) -> bool:
        """End who waited when the load failed, some at a time; whether more may wait."""
        error = lane.fail_error
        if error is None:
            return False
        near = itertools.islice(self.scheduler.candidates(lane.name, now), LOOKED_THROUGH)
        waiting = list(itertools.islice((work for work in near if work.seq <= lane.fail_through), FAILED_AT_ONCE))
        waiting += [work for _, _, work in self._retries if work.lane == lane.name and work.stage is Stage.RETRYING]
        for work in waiting:
            self._end_waiting(work, "lane_failed", error, now)
        if not waiting:
            lane.fail_error = None
        return bool(waiting)

    def _fill_or_load(self, lane: Lane, now: float) -> None:
        if lane.fail_error is not None and self._fail_waiting(lane, now):
            self._touch_later(lane)
        if self._ends_under_way >= ENDINGS_IN_ALL:
            return
        if lane.state is LaneState.UP:
            self.starter.fill(lane, now)
        elif lane.wanted or lane.name in self.scheduler.lanes():
            if lane.state is LaneState.ABSENT and now >= lane.not_before:
                lane.load(now)
                self._emit(Load(lane.name))
            status = "waiting_for_memory" if lane.short else "loading_model"
            for work in itertools.islice(self.scheduler.candidates(lane.name, now), TOLD_WAITING):
                self.statuses.say(work, status, now)
