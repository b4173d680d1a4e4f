"""Looking requests up: one by its id, one when it is done, a page of a tenant's."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from penstock.gateway.entries import Entry, Key
from penstock.gateway.follower import Follower
from penstock.gateway.hub import Gone, Hub
from penstock.gateway.view import View
from penstock.schemas.errors import BrokerUnavailable, InvalidRequest, NotFound
from penstock.schemas.errors import Gone as GoneError


class Lookups:
    """Tenants are checked by construction: every look-up names one."""

    def __init__(self, view: View, follower: Follower, hub: Hub) -> None:
        self._view = view
        self._follower = follower
        self._hub = hub

    async def find(self, tenant: str, request_id: str) -> Entry:
        """Raises NotFound for unknown and foreign alike (after catching up), Gone for an erased one."""
        key: Key = (tenant, request_id)
        entry = self._view.find(key)
        if entry is None or not (entry.content or entry.origin):
            try:
                await self._follower.catch_up()
            except BrokerUnavailable:
                if entry is None:
                    raise
            entry = self._view.find(key)
        if entry is None:
            raise NotFound("there is no such request")
        if entry.erased:
            raise GoneError("this request was erased")
        return entry

    async def wait(self, tenant: str, request_id: str, timeout_s: float) -> Entry:
        """The entry when it is done, or as it is after `timeout_s`."""
        entry = await self.find(tenant, request_id)
        if entry.done or timeout_s <= 0:
            return entry
        ready = asyncio.Event()
        client = self._hub.connect(ready.set)
        self._hub.subscribe(client, ("outcome", tenant, request_id))
        try:
            await asyncio.wait_for(ready.wait(), timeout_s)
        except TimeoutError:
            pass
        finally:
            self._hub.drop(client, Gone.CLOSED)
        found = self._view.find((tenant, request_id)) or entry
        if found.erased:
            raise GoneError("this request was erased")
        return found

    async def page(self, tenant: str, **options: Any) -> list[Entry]:
        """A page of the tenant's requests, as `Store.page` has it, with what has happened until now.

        Raises InvalidRequest when `after` names no request (any more): the page behind it cannot be told.
        """
        await self._written()
        after = options.get("after")
        if after is not None and self._view.find((tenant, after)) is None:
            raise InvalidRequest(f"after names no request that is kept: {after}", param="after")
        found = await asyncio.to_thread(self._view.page, tenant, **options)
        return [self._view.find(entry.key) or entry for entry in found]

    async def _written(self) -> None:
        done = threading.Event()
        for _ in range(50):
            if self._view.flush(done):
                await asyncio.to_thread(done.wait, 2)
                return
            await asyncio.sleep(0.02)
