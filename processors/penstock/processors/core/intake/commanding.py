"""Commands of the control topic: cancel, reprioritize and erase a request, end one that is lost, end a conversation."""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass

from penstock.processors.core.effects import Effect, Erase
from penstock.processors.core.fleet.dirty_set import DirtySet
from penstock.processors.core.fleet.lane import Lanes
from penstock.processors.core.outcomes.awaiting_store import AwaitingStore
from penstock.processors.core.outcomes.endings import Endings, Erased
from penstock.processors.core.queue.scheduler import Scheduler
from penstock.processors.core.requests.holdings import Holdings
from penstock.processors.core.requests.registry import Registry
from penstock.processors.core.requests.statuses import Statuses
from penstock.processors.core.settings import Commands
from penstock.processors.core.work.states import IN_SCHEDULER, NOT_DUE, ON_LANE, Stage
from penstock.processors.core.work.work import Body, Work, WorkKey
from penstock.schemas.errors import Cancelled, Expired, conversation_deleted
from penstock.schemas.records import ControlCommand, InferenceRequest, Origin
from penstock.schemas.tasks import takes_turn
from penstock.schemas.topics import TP, conversation_key, priority_class


def key_of_lost(command: ControlCommand) -> WorkKey | None:
    """Where the record stood: the owner of this partition ends the request. None when the command does not say."""
    place = command.place or command.origin
    return None if place is None else (place.topic, place.partition, place.offset)


def lost_work(command: ControlCommand, key: WorkKey, origin: Origin, *, epoch: int, seq: int, now: float) -> Work:
    """The request as work that can only end: its payload is unknown."""
    conversation_id = command.conversation_id
    request = InferenceRequest(
        request_id=command.request_id,
        tenant=command.tenant,
        task=command.task or "UNKNOWN",
        conversation_id=conversation_id,
        created_at=origin.append_time_ms,
    )
    conversation = None
    if conversation_id is not None and takes_turn(request.task):
        conversation = conversation_key(command.tenant, conversation_id)
    return Work(
        key=key,
        request_id=command.request_id,
        tenant=command.tenant,
        task=request.task,
        conversation=conversation,
        conversation_id=conversation_id,
        arrived_at=now,
        seq=seq,
        attempt=1,
        max_attempts=1,
        epoch=epoch,
        first_place=origin,
        body=Body(request, b"", (), None),
    )


MAY_WAIT = IN_SCHEDULER | ON_LANE | NOT_DUE
"""Its end is not decided: it waits for a grant, or will wait for one again if its run fails."""


@dataclass(eq=False)
class Commanding:
    """Commands come in log order, and may come twice."""

    _registry: Registry
    _scheduler: Scheduler[Work]
    _holdings: Holdings
    _lanes: Lanes
    _endings: Endings
    _awaiting_store: AwaitingStore
    _statuses: Statuses
    _dirty: DirtySet
    _emit: Callable[[Effect], None]
    _commands: Commands

    def command(self, command: ControlCommand, now: float, wall_ms: int, partitions: Container[TP]) -> None:
        """Follow one. `partitions`: those that this worker takes work from."""
        if command.kind == "end_lost":
            self._end_lost(command, now, partitions)
            return
        if not self._commands.apply(command, wall_ms):
            return
        if command.kind == "delete_conversation":
            self._cancel_turns(command, now)
            return
        work = self._registry.find(command.tenant, command.request_id)
        if command.kind == "erase":
            self._emit(Erase(command))
            if work is not None and work.first_place.append_time_ms <= command.created_at:
                self._cancel(work, Erased(), now)  # what it writes meanwhile is erased when it is over
        elif work is None:
            return
        elif command.kind == "cancel":
            self._cancel(work, Cancelled(command.reason or "cancelled by its caller"), now)
        elif command.kind == "reprioritize" and command.priority is not None and work.stage in MAY_WAIT:
            self._reprioritize(work, command.priority, now)

    def erase_again(self) -> None:
        """A new owner carries out the erasures that are remembered."""
        for command in self._commands.erasures():
            self._emit(Erase(command))

    def _end_lost(self, command: ControlCommand, now: float, partitions: Container[TP]) -> None:
        """A request is past its deadline or cancelled, and no delivery will bring its record: gone, or passed over.

        The owner of the record's partition ends it, unless it holds it. The outcome is one that the request must have
        in any case. So a command that comes twice, or to a former owner, or for a record that is delivered after all,
        does no harm: readers follow the first outcome. A command that changes nothing now is not remembered. The
        gateway asks again.
        """
        key, origin = key_of_lost(command), command.origin
        if key is None or origin is None or key[:2] not in partitions:
            return
        registry = self._registry
        if key in registry.works or registry.find(command.tenant, command.request_id) is not None:
            return
        work = lost_work(command, key, origin, epoch=registry.generation, seq=registry.next_seq(), now=now)
        registry.hold(work)
        registry.name(work)
        cancel = self._commands.cancelled(command.tenant, command.request_id)
        if cancel is not None:
            error = Cancelled(cancel.reason or "cancelled by its caller")
        else:
            error = Expired("its record was deleted or passed over before it ran, and its deadline has passed")
        self._endings.end(work, "arrive_ended", error, now)

    def _cancel_turns(self, command: ControlCommand, now: float) -> None:
        """End what belongs to a deleted conversation and was appended up to the command's time."""
        named = (command.tenant, command.conversation_id)
        for work in [work for work in self._registry.works.values() if (work.tenant, work.conversation_id) == named]:
            if work.first_place.append_time_ms <= command.created_at:
                self._cancel(work, conversation_deleted(), now)

    def _cancel(self, work: Work, error: Cancelled, now: float) -> None:
        if work.stage in IN_SCHEDULER | NOT_DUE:
            self._endings.end_waiting(work, "cancel", error, now)
        elif work.stage in ON_LANE:
            self._endings.end_running(work, "cancel", error, now)
        elif work.stage in (Stage.STORING, Stage.AWAITING_STORE):
            self._awaiting_store.cancel(work, error, now)

    def _reprioritize(self, work: Work, priority: int, now: float) -> None:
        """Move it in its queue. One that runs or waits for a retry is queued there when it must start again."""
        klass = priority_class(priority)
        self._holdings.move_body(work, klass)
        if work.stage is Stage.PARKED:
            parked = self._lanes[work.lane].parked
            parked[work.klass] -= 1
            parked[klass] += 1
        if not self._scheduler.reprioritize(work, klass, priority):
            work.klass, work.priority = klass, priority
            return
        work.position = self._scheduler.statistics.up_to(klass)
        self._statuses.near_front(work, now, None)
        self._dirty.look_at(self._lanes[work.lane])
