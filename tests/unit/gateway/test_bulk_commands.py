"""A command about many requests that ends early: nothing is commanded behind its end, and its error says how far."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.gateway.limits.allowances import Allowances
from penstock.gateway.limits.callers import Caller
from penstock.gateway.service.bulk_commands import Bulk, BulkCommands
from penstock.gateway.service.control import AT_ONCE
from penstock.gateway.service.selection import ALL_TENANTS, Selection
from penstock.schemas.errors import BrokerUnavailable, PenstockError, Unauthenticated

OPERATOR = Caller(tenant="ops", key_id="k", scopes=frozenset({"cancel", "admin"}))
CHANGES: dict[str, Any] = {
    "revoked": (Unauthenticated("this key was revoked"), "unauthenticated"),
    "scopes": (replace(OPERATOR, scopes=frozenset({"read"})), "forbidden"),
    "operator": (replace(OPERATOR, scopes=frozenset({"cancel"})), "forbidden"),
    "broker": (BrokerUnavailable("no broker"), "broker_unavailable"),
}


class World:
    """Requests of another tenant, and a key that changes, or a broker that is away, once a batch was commanded."""

    def __init__(self, change: Any) -> None:
        self.change = change
        self.commanded: list[str] = []
        parts: Any = (self, SimpleNamespace(tenants=self), self, Allowances(renew=self.renew))
        self.commands = BulkCommands(*parts)

    def known(self) -> list[str]:
        return ["others"]

    def renew(self, caller: Caller) -> Caller:
        if not self.commanded or isinstance(self.change, BrokerUnavailable):
            return caller
        if isinstance(self.change, PenstockError):
            raise self.change
        return self.change

    async def catch_up(self) -> None: ...

    async def live(self, tenants: Collection[str], klass: str | None) -> AsyncIterator[Any]:
        for number in range(3 * AT_ONCE):
            name = f"r{number}"
            yield SimpleNamespace(
                key=("others", name), request_id=name, tenant="others", accepted_ms=1, done=False, erased=False,
                cancelled_ms=None,
            )  # fmt: skip

    async def command_all(self, kind: str, entries: Sequence[Any], priority: int | None) -> int:
        if self.commanded and isinstance(self.change, BrokerUnavailable):
            raise self.change
        self.commanded += [entry.request_id for entry in entries]
        return 0


@pytest.mark.parametrize("change", CHANGES)
async def test_the_error_of_a_command_that_ends_early_says_how_many_were_commanded(change: str) -> None:
    raised, code = CHANGES[change]
    world = World(raised)
    with pytest.raises(PenstockError) as ended:
        await world.commands.cancel(OPERATOR, Bulk(chosen=Selection(tenant=ALL_TENANTS)))
    assert (ended.value.code, ended.value.details) == (code, {"count": AT_ONCE})
    assert len(world.commanded) == AT_ONCE


async def test_one_that_nothing_ends_commands_all() -> None:
    world = World(OPERATOR)
    done = await world.commands.cancel(OPERATOR, Bulk(chosen=Selection(tenant=ALL_TENANTS)))
    assert (done.count, len(world.commanded)) == (3 * AT_ONCE, 3 * AT_ONCE)
