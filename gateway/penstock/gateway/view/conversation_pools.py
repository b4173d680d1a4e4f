"""Which pool the turns of a conversation go to: that of its first request that names one. Pure."""

from __future__ import annotations

from collections.abc import Callable

from penstock.gateway.view.entries import Entry

REMEMBERED = 100_000
"""Conversations of pools other than the common one that are remembered while nothing of them is under way."""


class ConversationPools:
    """Notes each request; the oldest note is forgotten first."""

    def __init__(self, a_turn: Callable[[str, str], Entry | None]) -> None:
        """`a_turn`: a live request of a conversation, if there is one."""
        self._a_turn = a_turn
        self._pools: dict[tuple[str, str], str] = {}

    def note(self, entry: Entry) -> None:
        """A request of a conversation was heard of."""
        if entry.conversation_id is None or entry.pool is None:
            return
        self._pools.setdefault((entry.tenant, entry.conversation_id), entry.pool)
        if len(self._pools) > REMEMBERED:
            del self._pools[next(iter(self._pools))]

    def of(self, tenant: str, conversation_id: str, unknown: str) -> str | None:
        """The pool that its turns go to (None: the common one); `unknown` while it may begin in any."""
        if (noted := self._pools.get((tenant, conversation_id))) is not None:
            return noted
        turn = self._a_turn(tenant, conversation_id)
        return unknown if turn is None else turn.pool
