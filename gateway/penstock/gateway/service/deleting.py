"""Deleting a conversation everywhere: because a caller asks, or because nobody has touched it for long.

Both take the same steps, and both go on where an earlier call was cut off. What differs is who gives way: a caller's
deletion ends the turns that wait or run, an expiry gives way to them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

from penstock.common.clock import now_ms
from penstock.gateway.conversations.pages import Conversations
from penstock.gateway.limits.allowances import Allowances
from penstock.gateway.limits.retention import Retention, last_active_ms
from penstock.gateway.service.control import Control
from penstock.gateway.service.conversation_facts import FactsOfConversations
from penstock.gateway.service.conversation_feeds import Feeds
from penstock.gateway.service.forking import Forking
from penstock.gateway.threads import Threads
from penstock.schemas.errors import NotFound


@dataclass(eq=False)
class Deleting:
    """All methods raise BrokerUnavailable, and can then be called again."""

    _control: Control
    _facts: FactsOfConversations
    _forking: Forking
    _conversations: Conversations
    _feeds: Feeds
    _allowances: Allowances
    _threads: Threads
    _retention: Retention
    _clock: Callable[[], int] = now_ms

    async def delete(self, tenant: str, conversation_id: str) -> None:
        """Its turns that wait or run end as cancelled. A turn that is sent afterwards begins it anew, empty.

        Raises NotFound.
        """
        exists = await self._forking.exists(tenant, conversation_id)
        if not exists and not await self._control.has_turns(tenant, conversation_id):
            await self._facts.take_away(tenant, conversation_id)
            raise NotFound("there is no such conversation")
        # The command comes first: a worker that sees that the topic is gone can know of the deletion.
        await self._control.end_turns(tenant, conversation_id)
        await self._take_away(tenant, conversation_id, self._forking.delete)

    async def expire(self, tenant: str, conversation_id: str) -> bool:
        """Delete it if its time is over and no request of it is open. False: it stays, or was gone already.

        No command ends turns here: a turn that comes from now on begins the conversation anew. Only one that writes its
        first record between the last look and the record that ends the conversation ends as cancelled
        (`docs/decisions/0075`).
        """
        try:
            if not await self._forking.end(tenant, conversation_id, lambda: self._is_due(tenant, conversation_id)):
                return False
            await self._take_away(tenant, conversation_id, self._let_go)
        except NotFound:  # another gateway was quicker
            return False
        return True

    async def finish(self, tenant: str, conversation_id: str) -> None:
        """Take away what is left of one that was deleted, by a call that was cut off; it stays where forks need it."""
        with suppress(NotFound):  # another gateway was quicker
            if await self._forking.end(tenant, conversation_id, _never):
                await self._take_away(tenant, conversation_id, self._let_go)

    async def _is_due(self, tenant: str, conversation_id: str) -> bool:
        """As Kafka has it now. Requests are looked at first: one that has ended by then has left its records."""
        if await self._control.has_turns(tenant, conversation_id):
            return False
        facts = (await self._facts.of_some(tenant, [conversation_id])).get(conversation_id)
        changed_ms = None if facts is None else facts.updated_at
        record_ms = await self._threads.conversations.run_for(
            tenant, self._conversations.newest_ms, tenant, conversation_id
        )
        expires_ms = self._retention.expires_ms(tenant, last_active_ms(record_ms, changed_ms))
        return expires_ms is not None and expires_ms <= self._clock()

    async def _let_go(self, tenant: str, conversation_id: str) -> None:
        await self._forking.let_go(tenant, conversation_id, self._control.has_turns)

    async def _take_away(
        self, tenant: str, conversation_id: str, remove: Callable[[str, str], Awaitable[None]]
    ) -> None:
        # Its facts go before it, so that none outlive it if this ends here; and again, for some may be set meanwhile.
        await self._facts.take_away(tenant, conversation_id)
        await remove(tenant, conversation_id)
        await self._facts.take_away(tenant, conversation_id)
        self._feeds.wake(tenant, conversation_id)
        self._allowances.tenants.conversation_gone(tenant, conversation_id)


async def _never() -> bool:
    return False
