"""Control: asking for the end of requests (one, many, lost ones, a deleted conversation's), and erasing ended ones."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace

from penstock.common.artifacts import ArtifactStore
from penstock.common.artifacts.inputs import erase_inputs
from penstock.common.clock import now_ms
from penstock.common.kafka_errors import unavailable
from penstock.common.outgoing import control_record
from penstock.common.transport import AsyncTransport, Delivery
from penstock.gateway.limits.allowances import Allowances
from penstock.gateway.limits.callers import Caller
from penstock.gateway.service.lookups import Lookups
from penstock.gateway.service.submitting import SOURCE
from penstock.gateway.threads import Threads
from penstock.gateway.view.entries import Entry
from penstock.gateway.view.follower import Follower
from penstock.gateway.view.lost_requests import Overdue, end_command
from penstock.gateway.view.view import View
from penstock.schemas.codec import Codec
from penstock.schemas.errors import Conflict, NotFound
from penstock.schemas.records import ControlCommand
from penstock.schemas.topics import TopicNames

CANCELS_AT_ONCE = 500
PEEKED_AT_ONCE = 50
"""Requests that are looked up in the view's file in one go, on the loop: that takes 3 ms."""
TURNS_END_S = 5.0
"""So long the deletion of a conversation waits for its turns to end. Without a worker they end later."""
LOOK_AGAIN_S = 0.02
MOST_TURNS = 100
"""Turns in the view's file that are looked at in one go."""
WITHOUT_IMAGES = frozenset({"embedding", "image_generation", "summarization"})
"""Requests of these tasks have no images as inputs: erasing one does not need the artifact store."""


class Control:
    """Writes commands to the control topic, which every worker reads."""

    def __init__(
        self,
        transport: AsyncTransport,
        view: View,
        follower: Follower,
        lookups: Lookups,
        codec: Codec,
        names: TopicNames,
        artifacts: ArtifactStore,
        allowances: Allowances,
        threads: Threads,
    ) -> None:
        self._transport = transport
        self._view = view
        self._follower = follower
        self._lookups = lookups
        self._codec = codec
        self._names = names
        self._artifacts = artifacts
        self._allowances = allowances
        self._threads = threads

    async def cancel(self, caller: Caller, request_id: str) -> tuple[Entry, bool]:
        """Its entry, and whether its end was asked for: False when it had ended already. Raises NotFound, TenantLimit.

        It may have ended by the time that this returns: a worker is quick.
        """
        self._allowances.cancel(caller)
        return await self._cancel(caller.tenant, request_id, None)

    async def abandon(self, tenant: str, request_id: str, reason: str = "the client disconnected") -> None:
        """Cancel a request that nobody wants any more. It counts against no limit. Raises NotFound."""
        await self._cancel(tenant, request_id, reason)

    async def _cancel(self, tenant: str, request_id: str, reason: str | None) -> tuple[Entry, bool]:
        entry = await self._lookups.find(tenant, request_id)
        if entry.done:
            return await self._lookups.with_outcome(entry), False
        await self._command("cancel", entry, reason)
        return entry, True

    async def cancel_ids(self, caller: Caller, request_ids: Sequence[str]) -> list[str]:
        """Ask for the end of those of these requests that run; their ids. Unknown and foreign ones are left out.

        Raises TenantLimit.
        """
        self._allowances.cancel(caller)
        keys = [(caller.tenant, one) for one in dict.fromkeys(request_ids)]
        if any(self._view.in_memory(key) is None for key in keys):
            await self._follower.catch_up()
        known: list[Entry | None] = []
        for key in keys:
            known.append(self._view.known.peek(key))
            if len(known) % PEEKED_AT_ONCE == 0:
                await asyncio.sleep(0)  # others have their turn on the loop
        return await self._cancel_all(caller, [entry for entry in known if entry is not None])

    async def cancel_where(self, caller: Caller, *, status: str | None, conversation_id: str | None) -> list[str]:
        """The same for all of the tenant's requests in a status, in a conversation, or both. Raises TenantLimit."""
        self._allowances.cancel(caller)
        asked, some = dict[str, None](), list[Entry]()
        async for entry in self._lookups.live(caller.tenant):
            chosen = conversation_id in (None, entry.conversation_id) and status in (None, entry.status_name)
            if chosen and not entry.done and not entry.erased and entry.request_id not in asked:
                asked[entry.request_id] = None
                some.append(entry)
            if len(some) == CANCELS_AT_ONCE:
                await self._cancel_these(some)
                some = []
        await self._cancel_these(some)
        self._allowances.cancelled_more(caller, len(asked) - 1)
        return list(asked)

    async def _cancel_all(self, caller: Caller, entries: Sequence[Entry]) -> list[str]:
        running = [entry for entry in entries if not entry.done and not entry.erased]
        for start in range(0, len(running), CANCELS_AT_ONCE):
            await self._cancel_these(running[start : start + CANCELS_AT_ONCE])
        self._allowances.cancelled_more(caller, len(running) - 1)
        return [entry.request_id for entry in running]

    async def _cancel_these(self, entries: Sequence[Entry]) -> None:
        await asyncio.gather(*(self._command("cancel", entry, None) for entry in entries))

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
        if entry.task not in WITHOUT_IMAGES:
            await self._threads.artifacts.run_for(
                tenant, erase_inputs, self._artifacts, tenant, request_id, entry.conversation_id
            )
        self._allowances.artifacts.removed(tenant)
        offset = await self._command("erase", entry, None)
        await self._follower.reached({(self._names.control, 0): offset + 1}, 2.0)

    async def end_lost(self, lost: Overdue) -> None:
        """Ask the owner of the partition to end a request that no delivery will bring. Raises BrokerUnavailable."""
        await self._send(end_command(lost, now_ms()))

    async def has_turns(self, tenant: str, conversation_id: str) -> bool:
        """Whether turns of the conversation wait or run."""
        await self._follower.catch_up()
        return self._view.known.a_turn(tenant, conversation_id) is not None

    async def end_turns(self, tenant: str, conversation_id: str) -> None:
        """Cancel all turns of a conversation that are on Kafka now, and wait a while until those have ended.

        The command holds for turns that no view knows and for workers that start later.
        """
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
        known, until_ms = self._view.known, commanded.timestamp_ms

        def one_lives() -> bool:
            held = self._view.census.of_conversation(tenant, conversation_id)
            if any(turn.origin is None or turn.origin.append_time_ms <= until_ms for turn in held):
                return True
            return bool(known.aside_turns(tenant, conversation_id, until_ms + 1, most=MOST_TURNS))

        while one_lives() and time.monotonic() < give_up:
            await asyncio.sleep(LOOK_AGAIN_S)

    async def _command(self, kind: str, entry: Entry, reason: str | None) -> int:
        return (await self._send(replace(_command_about(entry, kind), reason=reason))).offset

    async def _send(self, command: ControlCommand) -> Delivery:
        """Raises BrokerUnavailable."""
        record = control_record(command, self._names, self._codec, source=SOURCE)
        try:
            return await self._transport.produce(record.topic, record.value, key=record.key, headers=record.headers)
        except NotFound as error:
            raise unavailable(error) from error


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
