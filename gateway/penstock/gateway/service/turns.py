"""The live requests of a conversation. Those that are aside are read from the view's file, on a thread, in pages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from penstock.common.clock import now_ms
from penstock.gateway.threads import Threads
from penstock.gateway.view.census import Counted, counted_as
from penstock.gateway.view.request_state import NEVER_MS
from penstock.gateway.view.rows import counted_of
from penstock.gateway.view.store import FIRST_TURN, Turn
from penstock.gateway.view.view import View
from penstock.schemas.records import InferenceRequest
from penstock.schemas.topics import priority_class

READ_AT_ONCE, COUNTED_AT_ONCE = 500, 2_000
"""Rows of the view's file that are read in one go, and requests in memory that are counted in one go."""


class Turns:
    """Used on the event loop. What it does there in one go does not grow with the conversation."""

    def __init__(self, view: View, threads: Threads) -> None:
        self._view = view
        self._threads = threads

    async def ids(self, tenant: str, conversation_id: str) -> list[str]:
        """Their ids. Nothing waits between the last look into memory and the return."""
        found: dict[str, None] = {}
        with self._view.known.staying(tenant, conversation_id):
            async for page in self._aside(tenant, conversation_id):
                found.update((turn.request_id, None) for turn in page)
        found.update(dict.fromkeys(self._view.census.of_conversation(tenant, conversation_id)))
        return list(found)

    async def any_lives(self, tenant: str, conversation_id: str, until_ms: int = NEVER_MS) -> bool:
        """Whether there is one that was accepted until then, or whose time is not known."""
        held = self._view.census.of_conversation(tenant, conversation_id)
        if any(turn.origin is None or turn.origin.append_time_ms <= until_ms for turn in held.values()):
            return True
        async for page in self._aside(tenant, conversation_id, until_ms):
            if page:
                return True
        return False

    async def before(self, request: InferenceRequest) -> int:
        """How many turns of its conversation go first: those of its class, and one that runs."""
        if request.conversation_id is None:
            return 0
        klass, line = priority_class(request.priority), (request.tenant, request.conversation_id)
        count = 0
        for number, turn in enumerate(list(self._view.census.of_conversation(*line).values()), start=1):
            count += _goes_before(counted_as(turn), klass)
            if number % COUNTED_AT_ONCE == 0:
                await asyncio.sleep(0)  # others have their turn on the loop
        async for page in self._aside(*line):
            count += sum(_goes_before(counted_of(turn.counted), klass) for turn in page)
        return count

    async def _aside(self, tenant: str, conversation_id: str, until_ms: int = NEVER_MS) -> AsyncIterator[list[Turn]]:
        """Those that are aside and were accepted until then, the oldest first."""
        known, last = self._view.known, FIRST_TURN
        while known.some_on_disk:
            page = await self._threads.lists.run_for(
                tenant, self._view.live_turns, tenant, conversation_id, last, until_ms, READ_AT_ONCE
            )
            yield [turn for turn in page if known.is_on_disk((tenant, turn.request_id))]
            if len(page) < READ_AT_ONCE:
                return
            last = page[-1]


def _goes_before(state: Counted, klass: str) -> bool:
    if state.kind is None:
        return True
    if state.from_ms is not None and state.from_ms > now_ms():
        return False
    return state.klass == klass and state.kind[0] != "summarization"  # it is no turn
