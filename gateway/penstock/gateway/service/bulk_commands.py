"""Commands about many requests in one call: their end or their priority, by ids or by a filter."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from dataclasses import dataclass, replace

from penstock.common.clock import now_ms
from penstock.gateway.limits.allowances import Allowances
from penstock.gateway.limits.callers import Caller
from penstock.gateway.service.control import AT_ONCE, Control
from penstock.gateway.service.lookups import PEEKED_AT_ONCE, Lookups
from penstock.gateway.service.moving_turns import in_line
from penstock.gateway.service.selection import ALL_TENANTS, Selection
from penstock.gateway.view.entries import Entry
from penstock.gateway.view.request_state import Key
from penstock.gateway.view.view import View
from penstock.schemas.errors import PenstockError

FIRST_IDS = 1_000
CLOCKS_APART_MS = 5_000
"""The broker's clock, which dates requests, may be so far ahead. What is accepted later came after the call."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bulk:
    """What one call does. `limit`: how many requests at most; None: all. `dry_run`: count them, and do nothing."""

    chosen: Selection
    limit: int | None = None
    dry_run: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class BulkDone:
    """`request_ids`: the first of them. `has_more`: the limit was reached; a repeat continues with the others."""

    count: int
    request_ids: list[str]
    has_more: bool
    accepted_before_ms: int
    """All that the call looked at were accepted before this time. With it as the bound of further calls these end,
    however many requests are accepted meanwhile."""


class BulkCommands:
    """Holds a batch of commands and the ids of the call's requests in memory, whatever waits."""

    def __init__(self, control: Control, view: View, lookups: Lookups, allowances: Allowances) -> None:
        self._control = control
        self._view = view
        self._lookups = lookups
        self._allowances = allowances

    async def cancel(self, caller: Caller, bulk: Bulk) -> BulkDone:
        """Ask for the end of those that have not ended. Raises Unauthenticated, Forbidden, TenantLimit,
        BrokerUnavailable. The detail `count` of the error says how many were commanded before it.

        With a limit those whose end was asked for before are left out, so that a repeat goes on.
        """

        async def asked() -> AsyncIterator[Entry]:
            async for entry in self._chosen(caller, bulk.chosen):
                if bulk.limit is None or not entry.cancelled_ms:
                    yield entry

        return await self._command(caller, bulk, asked(), "cancel", None)

    async def reprioritize(self, caller: Caller, bulk: Bulk, priority: int) -> BulkDone:
        """Give those that wait another priority, with the turns that must move along. Raises as `cancel`."""
        return await self._command(caller, bulk, self._moved(caller, bulk.chosen, priority), "reprioritize", priority)

    async def _command(
        self, caller: Caller, bulk: Bulk, entries: AsyncIterator[Entry], kind: str, priority: int | None
    ) -> BulkDone:
        self._allowances.cancel(caller)
        done, some, has_more, before_ms, commanded = dict[Key, None](), list[Entry](), False, now_ms(), 0
        try:
            async for entry in entries:
                before_ms = max(before_ms, entry.accepted_ms + 1)  # the broker's clock may be ahead
                if entry.key in done:
                    continue
                if has_more := len(done) == bulk.limit:
                    break
                done[entry.key] = None
                if not bulk.dry_run:
                    some.append(entry)
                if len(some) == AT_ONCE:
                    await self._command_now(caller, kind, some, priority)
                    some, commanded = [], len(done)
            await self._command_now(caller, kind, some, priority)
        except PenstockError as error:
            error.details = {**(error.details or {}), "count": commanded}
            raise
        if not bulk.dry_run:
            self._allowances.cancelled_more(caller, len(done) - 1)
        ids = [request_id for (_, request_id), _ in zip(done, range(FIRST_IDS), strict=False)]
        return BulkDone(count=len(done), request_ids=ids, has_more=has_more, accepted_before_ms=before_ms)

    async def _command_now(self, caller: Caller, kind: str, entries: Sequence[Entry], priority: int | None) -> None:
        """Raises Unauthenticated, Forbidden when the key was revoked or lost a scope since the call began."""
        now = self._allowances.current(caller)
        now.require("cancel")
        if any(entry.tenant != caller.tenant for entry in entries):
            now.require("admin")
        await self._control.command_all(kind, entries, priority)

    async def _moved(self, caller: Caller, chosen: Selection, priority: int) -> AsyncIterator[Entry]:
        lines: set[Key] = set()
        chosen_here = _is_chosen(chosen)

        def is_chosen(entry: Entry) -> bool:
            return caller.reaches(entry) and chosen_here(entry)

        async for entry in self._chosen(caller, chosen):
            if not entry.may_move or entry.priority == priority:
                continue
            if not in_line(entry):
                yield entry
                continue
            line = (entry.tenant, entry.conversation_id or "")
            if line not in lines:
                lines.add(line)
                for turn in await self._control.moved(line, is_chosen, priority):
                    yield turn

    async def _chosen(self, caller: Caller, chosen: Selection) -> AsyncIterator[Entry]:
        """Requests that have not ended, as they are now; some may come twice. Unknown and foreign ids are left out."""
        is_chosen, tenants = _is_chosen(chosen), self._tenants(caller, chosen.tenant)
        found = self._named(tenants, chosen.ids) if chosen.ids is not None else self._live(tenants, chosen.where.klass)
        async for entry in found:
            if is_chosen(entry) and caller.reaches(entry):
                yield entry

    async def _live(self, tenants: Collection[str], klass: str | None) -> AsyncIterator[Entry]:
        await self._lookups.catch_up()
        async for entry in self._lookups.live(tenants, klass):
            yield entry

    async def _named(self, tenants: Collection[str], ids: Collection[str]) -> AsyncIterator[Entry]:
        keys = [(tenant, request_id) for tenant in tenants for request_id in ids]
        if any(self._view.in_memory(key) is None for key in keys):
            await self._lookups.catch_up()
        for number, key in enumerate(keys, start=1):
            if (entry := self._lookups.peek(*key)) is not None:
                yield entry
            if number % PEEKED_AT_ONCE == 0:
                await asyncio.sleep(0)  # others have their turn on the loop

    def _tenants(self, caller: Caller, asked: str | None) -> Collection[str]:
        if asked in (None, caller.tenant):
            return (caller.tenant,)
        caller.require("admin")
        return tuple(self._view.tenants.known()) if asked == ALL_TENANTS else (asked or "",)


def _is_chosen(chosen: Selection) -> Callable[[Entry], bool]:
    at_ms, meant = now_ms(), chosen
    if chosen.accepted_before_ms is None and chosen.ids is None:  # a caller may submit anew what the call cancels
        meant = replace(chosen, accepted_before_ms=at_ms + CLOCKS_APART_MS)
    return lambda entry: meant.meets(entry, at_ms)
