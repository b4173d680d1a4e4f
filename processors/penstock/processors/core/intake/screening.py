"""Screening of new requests: whether one may run at all, and which model it waits for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from penstock.processors.core.fleet.lane import UNSERVED, Lanes
from penstock.processors.core.fleet.memory import DeviceMemory
from penstock.processors.core.intake.arrivals import Taken
from penstock.processors.core.intake.unserved import UnservedRequests
from penstock.processors.core.outcomes.endings import Erased
from penstock.processors.core.runs.retry_queue import RetryQueue
from penstock.processors.core.settings import Commands
from penstock.processors.core.work.retries import most_deaths
from penstock.processors.core.work.work import Work, WorkKey
from penstock.schemas.errors import Cancelled, EngineFailed, Expired, PenstockError, conversation_deleted
from penstock.schemas.topics import priority_class


@dataclass(eq=False)
class Screening:
    """Holds a request against earlier commands, its deadline, the models that are served and the crash journal."""

    _lanes: Lanes
    _memory: DeviceMemory
    _unserved: UnservedRequests
    _commands: Commands
    _retries: RetryQueue
    _deaths: Callable[[WorkKey, str], int]

    def screen(self, work: Work, read: Taken, wall_ms: int) -> PenstockError | None:
        """Returns why the request must not run at all. Returns None when it may: then its lane is known."""
        cancel = self._commands.cancelled(work.tenant, work.request_id)
        if cancel is not None:
            return Cancelled(cancel.reason or "cancelled before it ran")
        if self._commands.erasure(work.tenant, work.request_id, read.origin.append_time_ms) is not None:
            return Erased()
        if work.conversation_id is not None and self._conversation_was_deleted(read):
            return conversation_deleted()
        if work.deadline_ms is not None and wall_ms >= work.deadline_ms:
            return Expired("its deadline passed before it was taken")
        try:
            self._unserved.resolve(work, read.request.model, read.request.payload, wall_ms)
            if work.unserved is None:
                self._memory.check_fits(self._lanes[work.lane], read.request.requirements)
        except PenstockError as error:
            never_fits = work.lane != UNSERVED and self._lanes[work.lane].never_fits is error
            if not never_fits or not self._unserved.wait_for_others(work, error):
                return error
            work.lane = UNSERVED
        deaths = self._deaths(work.first_key, work.request_id)
        if deaths >= most_deaths(self._retries.settings_of(work)):
            return EngineFailed(f"{deaths} times a worker died while it ran")
        work.alone = deaths >= 2
        changed = self._commands.priority(work.tenant, work.request_id)
        if changed is not None:
            work.priority, work.klass = changed, priority_class(changed)
        return None

    def _conversation_was_deleted(self, read: Taken) -> bool:
        """Whether it was deleted after this turn was sent."""
        deleted_at = self._commands.deleted_at(read.request.tenant, read.request.conversation_id or "")
        return deleted_at is not None and read.origin.append_time_ms <= deleted_at
