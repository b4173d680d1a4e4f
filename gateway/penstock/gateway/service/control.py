"""Control: commands about requests: end, move or erase one, end lost ones, end a deleted conversation's turns."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from penstock.common.artifacts import ArtifactStore
from penstock.common.artifacts.inputs import erase_inputs
from penstock.common.clock import now_ms
from penstock.common.kafka_errors import unavailable
from penstock.common.outgoing import Outgoing, control_record
from penstock.common.transport import AsyncTransport, Delivery
from penstock.gateway.limits.allowances import Allowances
from penstock.gateway.limits.callers import Caller
from penstock.gateway.service.lookups import Lookups
from penstock.gateway.service.moving_turns import in_line, moved_turns
from penstock.gateway.service.submitting import SOURCE
from penstock.gateway.service.turns import Turns
from penstock.gateway.threads import Threads
from penstock.gateway.view.entries import Entry
from penstock.gateway.view.follower import Follower
from penstock.gateway.view.lost_requests import Overdue, end_command
from penstock.gateway.view.view import View
from penstock.schemas.codec import Codec
from penstock.schemas.errors import Conflict, NotFound, PenstockError
from penstock.schemas.records import ControlCommand
from penstock.schemas.times import rfc3339
from penstock.schemas.topics import TopicNames

AT_ONCE = 100
"""Commands that are on their way to the broker at once. So many are made in one go, and others wait for the loop."""
FOLLOWED_S = 2.0
"""So long a call waits for the view to have read its own command."""
TURNS_END_S = 5.0
"""So long the deletion of a conversation waits for its turns to end. Without a worker they end later."""
LOOK_AGAIN_S = 0.02
WITHOUT_IMAGES = frozenset({"embedding", "image_generation", "summarization"})
"""Requests of these tasks have no images as inputs: erasing one whose text stands in its record needs no store."""


@dataclass(eq=False)
class Control:
    """Writes commands to the control topic, which every worker reads."""

    _transport: AsyncTransport
    _view: View
    _follower: Follower
    _lookups: Lookups
    _codec: Codec
    _names: TopicNames
    _artifacts: ArtifactStore
    _allowances: Allowances
    _threads: Threads
    _turns: Turns

    async def cancel(self, caller: Caller, request_id: str) -> tuple[Entry, bool]:
        """Its entry, and whether its end was asked for: False when it had ended already. Raises NotFound, TenantLimit.

        It may have ended by the time that this returns: a worker is quick.
        """
        self._allowances.cancel(caller)
        return await self._cancel(caller.tenant, request_id, None, caller)

    async def abandon(self, tenant: str, request_id: str) -> None:
        """Cancel a request that nobody wants any more. It counts against no limit. Raises NotFound."""
        await self._cancel(tenant, request_id, "the client disconnected")

    async def abandon_some(self, tenant: str, request_ids: Sequence[str], reason: str) -> list[str]:
        """Cancel the first of these, `AT_ONCE` at most, as `abandon`. Those that need no further call.

        One that is not known yet is not among them. Raises BrokerUnavailable.
        """
        peeked = ((one, self._lookups.peek(tenant, one)) for one in request_ids)
        known = dict(islice(((one, entry) for one, entry in peeked if entry is not None), AT_ONCE))
        open_ones = [entry for entry in known.values() if not entry.done and not entry.erased]
        await self.command_all("cancel", open_ones, reason=reason)
        return list(known)

    async def _cancel(
        self, tenant: str, request_id: str, reason: str | None, caller: Caller | None = None
    ) -> tuple[Entry, bool]:
        entry = await self._lookups.find(tenant, request_id)
        if caller is not None:
            now = self._allowances.current(caller)
            now.require("cancel")
            now.check_reaches(entry)
        if entry.done:
            return await self._lookups.with_outcome(entry), False
        await self._command("cancel", entry, reason)
        return entry, True

    async def reprioritize(self, caller: Caller, request_id: str, priority: int) -> Entry:
        """The entry with its new priority. Turns of its conversation are moved too if they must be: `moved_turns`.

        Raises NotFound, TenantLimit, BrokerUnavailable, Conflict when it has ended or runs.
        """
        self._allowances.cancel(caller)
        entry = await self._lookups.find(caller.tenant, request_id)
        self._allowances.current(caller).require("cancel")
        if entry.done:
            details = {"status": entry.ended_as, "finished_at": rfc3339(entry.finished_ms)}
            raise Conflict(f"the request has ended ({entry.ended_as}): its priority stays as it is", details=details)
        if not entry.may_move:
            details = {"status": entry.status_name}
            raise Conflict("the request runs already: another priority would change nothing", details=details)
        moved = [entry]
        if in_line(entry):
            line = (entry.tenant, entry.conversation_id or "")
            moved = await self.moved(line, lambda turn: turn.request_id == request_id, priority) or [entry]
        offset = await self.command_all("reprioritize", moved, priority)
        self._allowances.cancelled_more(caller, len(moved) - 1)
        await self._follower.reached({(self._names.control, 0): offset + 1}, FOLLOWED_S)
        return self._view.find(entry.key) or entry

    async def moved(self, line: tuple[str, str], is_chosen: Callable[[Entry], bool], priority: int) -> list[Entry]:
        """The turns of a conversation, given as (tenant, id), that another priority of the chosen ones moves."""
        turns = await self._lookups.turns(*line)
        return await self._threads.lists.run_for(line[0], moved_turns, turns, is_chosen, priority)

    async def command_all(
        self, kind: str, entries: Sequence[Entry], priority: int | None = None, reason: str | None = None
    ) -> int:
        """Send a command about each of these, in their order, and return the offset of the last one; -1 for none.

        Raises BrokerUnavailable; some may be sent by then.
        """
        offset = -1
        for start in range(0, len(entries), AT_ONCE):
            some = entries[start : start + AT_ONCE]
            commands = [replace(_command_about(entry, kind), priority=priority, reason=reason) for entry in some]
            for delivery in await self._transport.produce_all([self._record(command) for command in commands]):
                if delivery.error is not None:
                    raise _refused(delivery.error)
                offset = max(offset, delivery.offset)
        return offset

    async def erase(self, tenant: str, request_id: str) -> None:
        """Erase an ended request everywhere, with its outputs and the inputs that a gateway or worker stored for it.

        After a refusal, call it again: it goes on where it stopped.

        Raises NotFound, Conflict while it runs, Gone when it is erased, StoreUnavailable, BrokerUnavailable.
        """
        entry = await self._lookups.find(tenant, request_id)
        if not entry.done:
            raise Conflict("the request has not ended; cancel it first")
        # The artifacts first: once it is erased nobody can find them by it, and a store that is away would keep them.
        for artifact_id in entry.artifact_ids:
            await self._threads.artifacts.run_for(tenant, self._artifacts.delete, tenant, artifact_id, even_held=True)
        if entry.stored_text or entry.task not in WITHOUT_IMAGES:
            await self._threads.artifacts.run_for(
                tenant, erase_inputs, self._artifacts, tenant, request_id, entry.conversation_id
            )
        self._allowances.artifacts.removed(tenant)
        offset = await self._command("erase", entry, None)
        await self._follower.reached({(self._names.control, 0): offset + 1}, FOLLOWED_S)

    async def end_lost(self, lost: Overdue) -> None:
        """Ask the owner of the partition to end a request that no delivery will bring. Raises BrokerUnavailable."""
        await self._send(end_command(lost, now_ms()))

    async def has_turns(self, tenant: str, conversation_id: str) -> bool:
        """Whether turns of the conversation wait or run."""
        await self._follower.catch_up()
        return await self._turns.any_lives(tenant, conversation_id)

    async def end_turns(self, tenant: str, conversation_id: str) -> None:
        """Cancel what of a conversation is on Kafka now, and wait a while until it has ended.

        The command holds for turns that no view knows and for workers that start later. Raises as `check_whole`.
        """
        self._follower.check_whole()
        command = ControlCommand(
            kind="delete_conversation",
            request_id="",
            tenant=tenant,
            created_at=now_ms(),
            created_by="gateway",
            conversation_id=conversation_id,
        )
        commanded = await self._send(command)
        give_up = time.monotonic() + TURNS_END_S
        await self._follower.catch_up()
        while await self._turns.any_lives(tenant, conversation_id, commanded.timestamp_ms):
            if time.monotonic() >= give_up:
                return
            await asyncio.sleep(LOOK_AGAIN_S)

    async def _command(self, kind: str, entry: Entry, reason: str | None) -> int:
        return (await self._send(replace(_command_about(entry, kind), reason=reason))).offset

    def _record(self, command: ControlCommand) -> Outgoing:
        return control_record(command, self._names, self._codec, source=SOURCE)

    async def _send(self, command: ControlCommand) -> Delivery:
        """Raises BrokerUnavailable."""
        record = self._record(command)
        try:
            return await self._transport.produce(record.topic, record.value, key=record.key, headers=record.headers)
        except NotFound as error:
            raise _refused(error) from error


def _refused(error: PenstockError) -> PenstockError:
    """Without the control topic the broker is of no use; that no request was found would be wrong."""
    return unavailable(error) if isinstance(error, NotFound) else error


def _command_about(entry: Entry, kind: str) -> ControlCommand:
    return ControlCommand(
        kind=kind,
        request_id=entry.request_id,
        tenant=entry.tenant,
        created_at=now_ms(),
        created_by="gateway",
        origin=entry.origin,
        conversation_id=entry.conversation_id,
    )
