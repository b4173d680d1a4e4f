"""Looking requests up: one by its id, one when it is done, a page of a tenant's."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from penstock.common.tasks import set_within
from penstock.gateway.service.selection import ALL_TENANTS
from penstock.gateway.service.subscriptions import Stopping
from penstock.gateway.service.turns import Turns
from penstock.gateway.threads import Threads
from penstock.gateway.view.entries import Entry
from penstock.gateway.view.filters import ALL, RequestFilter
from penstock.gateway.view.follower import Follower
from penstock.gateway.view.hub import Gone, Hub
from penstock.gateway.view.outcomes import Outcomes
from penstock.gateway.view.outputs import json_bytes, on_output_thread
from penstock.gateway.view.request_state import Key
from penstock.gateway.view.rows import counted_start
from penstock.gateway.view.view import View
from penstock.schemas.errors import BrokerUnavailable, InvalidRequest, NotFound, Overloaded
from penstock.schemas.errors import Gone as GoneError

LOOKED_AT_ONCE, LIVE_AT_ONCE = 2_000, 500
"""Requests in memory that are looked at in one go, and rows of the view's file that are read in one go."""
PEEKED_AT_ONCE = 50
"""Requests that are looked up in the view's file in one go, on the loop: that takes 3 ms."""
NAMED_TENANTS = 10
"""That a message names, of those that have a request of one id."""
PAGE_S = 3.0
"""So long a page waits for outcomes that must be read again; those that do not come are left out."""
PART, MOST_PARTS = 1_000, 50
"""Requests are read so many at a time, and so often at most, to fill a page."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChangedRequests:
    """Requests that changed. `left`: those that the filter does not match, or not any more, and erased ones.

    `cursor` continues behind them.
    """

    cursor: str
    has_more: bool
    entries: list[Entry] = field(default_factory=list[Entry])
    left: list[Key] = field(default_factory=list[Key])


class Lookups:
    """Tenants are checked by construction: every look-up names one."""

    def __init__(
        self, view: View, follower: Follower, hub: Hub, threads: Threads, outcomes: Outcomes, turns: Turns
    ) -> None:
        self._turns = turns
        self._outcomes = outcomes
        self._threads = threads
        self._view = view
        self._follower = follower
        self._hub = hub

    async def catch_up(self) -> None:
        """As `Follower.catch_up`."""
        await self._follower.catch_up()

    def check_whole(self) -> None:
        """As `Follower.check_whole`."""
        self._follower.check_whole()

    def peek(self, tenant: str, request_id: str) -> Entry | None:
        """The request as far as the view has read, or a copy that hears no news."""
        return self._view.known.peek((tenant, request_id))

    async def find(self, tenant: str, request_id: str) -> Entry:
        """Raises NotFound for unknown and foreign alike (after catching up), Gone for one that any gateway has erased.

        Raises Overloaded for one that has not ended here while the view cannot be written, or lacks its history: it may
        have ended long ago; and for an unknown one while the history is not known.
        """
        key: Key = (tenant, request_id)
        entry = self._view.find(key)
        if entry is None or not (entry.content or entry.origin):
            try:
                await self._follower.catch_up()
            except (BrokerUnavailable, Overloaded):
                if entry is None and self._view.find(key) is None:
                    raise
            entry = self._view.find(key)
        if entry is None:
            raise NotFound("there is no such request")
        if not self._view.is_settled(entry):
            self._follower.check_whole()
        if entry.done:  # another gateway may have erased it
            await self._follower.read_commands()
            entry = self._view.find(key) or entry
        if entry.erased:
            raise GoneError("this request was erased")
        if not entry.done and (reason := self._follower.stands_still()):
            raise Overloaded(f"this gateway does not follow the topics now: {reason}", retry_after_s=1)
        return entry

    async def tenant_of(self, request_id: str, own: str) -> str:
        """Whose request it is, for operators alone; `own` for an unknown one.

        Raises InvalidRequest when several tenants have one of this id, as far as is known; BrokerUnavailable.
        """
        with suppress(Overloaded):
            await self._follower.catch_up()
        live: list[str] = []
        erased: list[str] = []
        for count, tenant in enumerate(dict.fromkeys((own, *self._view.tenants.known())), start=1):
            if (entry := self.peek(tenant, request_id)) is not None:
                (erased if entry.erased else live).append(tenant)
            if count % PEEKED_AT_ONCE == 0:
                await asyncio.sleep(0)  # others have their turn on the loop
        if len(live) > 1:
            named = ", ".join(sorted(live)[:NAMED_TENANTS])
            raise InvalidRequest(f"{len(live)} tenants have a request of this id: {named}; name one", param="tenant")
        return next(iter((*live, *erased)), own)

    async def find_whole(self, tenant: str, request_id: str) -> Entry:
        """As `find`, with its outcome if it has ended. Raises also as `Outcomes.whole`."""
        return await self._outcomes.whole(await self.find(tenant, request_id))

    async def wait(self, tenant: str, request_id: str, timeout_s: float) -> Entry:
        """The entry when it is done, or as it is after `timeout_s`. Raises Stopping when the gateway ends meanwhile."""
        entry = await self.find(tenant, request_id)
        if entry.done or timeout_s <= 0:
            return entry
        ready = asyncio.Event()
        client = self._hub.connect(ready.set)
        self._hub.subscribe(client, ("outcome", tenant, request_id))
        try:
            if client.gone is None:
                await set_within(ready, timeout_s)
        finally:
            stopping = client.gone is Gone.STOPPING
            self._hub.drop(client, Gone.CLOSED)
        entry = self._view.find((tenant, request_id)) or entry
        if entry.erased:
            raise GoneError("this request was erased")
        if stopping and not entry.done:
            raise Stopping("the gateway restarts; wait on at any other", retry_after_s=1)
        return entry

    async def with_outcome(self, entry: Entry) -> Entry:
        """The entry, with its outcome if it has ended and the topic still has that.

        Raises Gone when it was erased meanwhile, BrokerUnavailable, RegistryUnavailable, Overloaded.
        """
        try:
            return await self._outcomes.whole(entry)
        except GoneError:
            if (self._view.known.peek(entry.key) or entry).erased:
                raise
            return entry

    async def public(self, entry: Entry, beside: Mapping[str, Any] | None = None) -> bytes:
        """The request as callers see it, whole, as JSON, with fields `beside` its own or in their place.

        A large output is decoded and encoded on a thread. An outcome that the topic has deleted is left out. Raises
        BrokerUnavailable, RegistryUnavailable when the outcome cannot be read.
        """
        entry = await self.with_outcome(entry)
        if entry.large is None:
            body = {**entry.to_json(), **(beside or {})}
            return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
        return await on_output_thread(lambda: json_bytes(entry.to_json(whole=True)))

    async def page(self, tenant: str | None, **options: Any) -> list[Entry]:
        """A page of a tenant's requests, or of all tenants', as `Store.page` has it, with what has happened until now.

        Raises InvalidRequest when `after` names no request.
        """
        await self._follower.read_commands()
        await self._written()
        limit: int = options["limit"]
        where: RequestFilter = options.get("where", ALL)
        shown: list[Entry] = []
        for _ in range(MOST_PARTS):
            entries = await self._threads.lists.run_for(tenant or ALL_TENANTS, self._view.page, tenant, **options)
            if entries is None:
                raise InvalidRequest("after names no request that is still known; begin anew without it", param="after")
            newest = [self._view.in_memory(entry.key) or entry for entry in entries]
            shown += [one for one in newest if not one.erased and self._view.is_settled(one) and where.matches(one)]
            # A page with less is the last one. What is left out here does not make it so.
            if len(shown) >= limit or len(entries) < options["limit"]:
                break
            options = {**options, "after": entries[-1].key, "limit": PART}
        return await self._outcomes.all_whole(shown[:limit], PAGE_S)

    def changes_cursor(self) -> str:
        """Behind all changes that a page holds that is asked for after this call."""
        return self._view.changes.cursor(time.monotonic())

    async def changes(
        self, tenant: str | None, cursor: str, where: RequestFilter, reached: RequestFilter, limit: int
    ) -> ChangedRequests | None:
        """Up to `limit` requests of a tenant, or of all, that changed behind a cursor, as they are now.

        None as `Changes.since`. Those that `reached` does not match are left out. None also if it may have matched what
        is gone or erased.
        """
        await self._follower.read_commands()
        changed = self._view.changes.since(cursor, tenant, limit, time.monotonic())
        if changed is None:
            return None
        found = ChangedRequests(cursor=changed.cursor, has_more=changed.has_more)
        for number, key in enumerate(changed.keys, start=1):
            entry = self._view.known.peek(key)
            if number % PEEKED_AT_ONCE == 0:
                await asyncio.sleep(0)  # others have their turn on the loop
            if reached != ALL and (entry is None or entry.erased):
                return None  # nobody knows any more whose it was
            if entry is not None and not reached.matches(entry):
                continue
            if entry is not None and not self._view.is_settled(entry):
                continue
            if entry is None or entry.erased or not where.matches(entry):
                found.left.append(key)
            else:
                found.entries.append(entry)
        return found

    async def live(self, tenants: Collection[str], klass: str | None = None) -> AsyncIterator[Entry]:
        """Requests of these tenants that have not ended; copies of those that are aside. Some may come twice.

        Those aside are of this class alone, if one is named.
        """
        async for entry in self._held(tenants):
            yield entry
        for tenant in tenants:
            async for entry in self._aside(tenant, "" if klass is None else counted_start(klass)):
                yield entry
        async for entry in self._held(tenants):  # some were aside at first, and in memory before their page was read
            yield entry

    async def _held(self, tenants: Collection[str]) -> AsyncIterator[Entry]:
        for number, entry in enumerate(list(self._view.known.held_live())):
            if number % LOOKED_AT_ONCE == 0:
                await asyncio.sleep(0)  # others have their turn on the loop
            if entry.tenant in tenants:
                yield entry

    async def _aside(self, tenant: str, start: str) -> AsyncIterator[Entry]:
        """Those of a tenant that are counted as something that starts so."""
        after = (start, 0, "")
        while self._view.known.some_on_disk:
            # What is written while rows are read may be old in them, and be in memory no more.
            unwritten = self._view.known.unwritten.all_now()
            entries, after = await self._threads.lists.run_for(
                tenant, self._view.live_of_tenant, tenant, after, LIVE_AT_ONCE
            )
            for copy in entries:
                yield self._view.in_memory(copy.key) or unwritten.get(copy.key) or copy
            if len(entries) < LIVE_AT_ONCE or not after[0].startswith(start):
                return

    async def turns(self, tenant: str, conversation_id: str) -> list[Entry]:
        """A conversation's requests that have not ended; copies of those that are aside."""
        found: list[Entry] = []
        for number, request_id in enumerate(await self._turns.ids(tenant, conversation_id), start=1):
            if (entry := self.peek(tenant, request_id)) is not None:
                found.append(entry)
            if number % PEEKED_AT_ONCE == 0:
                await asyncio.sleep(0)  # others have their turn on the loop
        return found

    async def _written(self) -> None:
        done = threading.Event()
        for _ in range(50):
            if self._view.flush(done):
                await self._threads.lists.run(done.wait, 2)
                return
            await asyncio.sleep(0.02)
