"""A command about many requests that ends early: nothing is commanded behind its end, and its error says how far."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.common.clock import now_ms
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

    def __init__(self, change: Any, *, comes_again: bool = False) -> None:
        self.change = change
        self.commanded: list[str] = []
        self._comes_again = comes_again
        """Each request that is commanded is submitted anew."""
        self._accepted_ms = [1] * 3 * AT_ONCE
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
        for number, accepted_ms in enumerate(self._accepted_ms):  # it gets longer meanwhile
            name = f"r{number}"
            yield SimpleNamespace(
                key=("others", name), request_id=name, tenant="others", accepted_ms=accepted_ms, done=False,
                erased=False, cancelled_ms=None,
            )  # fmt: skip

    async def command_all(self, kind: str, entries: Sequence[Any], priority: int | None) -> int:
        if self.commanded and isinstance(self.change, BrokerUnavailable):
            raise self.change
        self.commanded += [entry.request_id for entry in entries]
        assert len(self.commanded) <= 3 * AT_ONCE, "it follows what its own commands bring about"
        if self._comes_again:
            self._accepted_ms += [now_ms() + 60_000] * len(entries)
        return 0


@pytest.mark.parametrize("change", CHANGES)
async def test_the_error_of_a_command_that_ends_early_says_how_many_were_commanded(change: str) -> None:
    raised, code = CHANGES[change]
    world = World(raised)
    with pytest.raises(PenstockError) as ended:
        await world.commands.cancel(OPERATOR, Bulk(chosen=Selection(tenant=ALL_TENANTS)))
    assert (ended.value.code, ended.value.details) == (code, {"count": AT_ONCE})
    assert len(world.commanded) == AT_ONCE


@pytest.mark.parametrize("comes_again", [False, True])
async def test_all_that_were_accepted_before_the_call_are_commanded(comes_again: bool) -> None:
    world = World(OPERATOR, comes_again=comes_again)
    done = await world.commands.cancel(OPERATOR, Bulk(chosen=Selection(tenant=ALL_TENANTS)))
    assert (done.count, len(world.commanded)) == (3 * AT_ONCE, 3 * AT_ONCE)
