"""Bulk submits without a broker: each line gets an answer, whatever becomes of the other lines and of the body."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from gateway_parts import service_with
from kit.gateway_http import client, gateway_app
from penstock.common.clock import now_ms
from penstock.gateway.edge.bodies import BodyLimits
from penstock.gateway.limits.allowances import Allowances
from penstock.gateway.limits.callers import Caller
from penstock.gateway.routes import bulk
from penstock.gateway.service.bulk_commands import Bulk, BulkCommands
from penstock.gateway.service.control import AT_ONCE
from penstock.gateway.service.selection import ALL_TENANTS, Selection
from penstock.gateway.service.submitting import Checked
from penstock.schemas.errors import BrokerUnavailable, PenstockError, Unauthenticated
from penstock.schemas.ids import idempotent_request_id


class Submitting:
    """Accepts every request, except those whose prompt is `fail`."""

    def __init__(self) -> None:
        self.submitted: list[Any] = []
        self.facts = self
        self.flying = self.most = 0

    def catching_up(self) -> None:
        return None

    async def check(self, caller: Any, request: Any) -> Any:
        return Checked(caller, request, None)

    async def submit(self, checked: Checked, *, idempotency_key: str | None, **_: Any) -> Any:
        request = checked.request
        if request.payload["prompt"] == "fail":
            raise RuntimeError("unforeseen")
        self.flying += 1
        self.most = max(self.most, self.flying)
        await asyncio.sleep(0.01)
        self.flying -= 1
        request_id = request.request_id
        if idempotency_key is not None:
            request_id = idempotent_request_id("default", idempotency_key)
        self.submitted.append(request)
        return SimpleNamespace(request_id=request_id)


def line(**fields: Any) -> bytes:
    return json.dumps({"task": "text_generation", "payload": {"prompt": "p"}, **fields}).encode() + b"\n"


async def answers(
    content: bytes | AsyncIterator[bytes], submitting: Submitting | None = None, limits: BodyLimits | None = None
) -> list[str]:
    """For each line "taken", or the code of its error."""
    app = gateway_app(bulk.router, service=service_with(submitting or Submitting()), bodies=limits)
    async with client(app) as http:
        response = await http.post("/v1/requests/bulk", content=content, headers={"content-type": bulk.MEDIA_TYPE})
    assert response.status_code == 200, response.text
    found = [json.loads(line) for line in response.text.splitlines()]
    assert [one["index"] for one in found] == list(range(len(found)))
    return [one["error"]["code"] if "error" in one else "taken" for one in found]


async def many_lines(stops_after: int | None = None) -> AsyncIterator[bytes]:
    for number in range(20):
        if number == stops_after:
            await asyncio.Event().wait()
        yield line()


@pytest.mark.parametrize(
    ("content", "limits", "most_lines", "taken", "code"),
    [
        (lambda: many_lines(stops_after=3), BodyLimits(timeout_s=0.1), 100, 3, "invalid"),
        (many_lines, BodyLimits(max_lines_bytes=10 * len(line())), 100, 10, "too_large"),
        (lambda: line() * 9, None, 5, 5, "too_large"),
    ],
    ids=["the body stops", "the body is too large", "too many lines"],
)
async def test_a_body_that_breaks_off_is_answered_with_what_was_taken(
    monkeypatch: pytest.MonkeyPatch, content: Any, limits: BodyLimits | None, most_lines: int, taken: int, code: str
) -> None:
    monkeypatch.setattr(bulk, "MAX_LINES", most_lines)
    assert await answers(content(), limits=limits) == ["taken"] * taken + [code]


async def test_a_line_with_an_unforeseen_failure_fails_alone() -> None:
    submitting = Submitting()
    odd = [line(idempotency_key="\ud800"), line(payload={"prompt": "x", "seed": float("inf")})]
    lines = [line(), *odd, line(payload={"prompt": "fail"}), line()]
    assert await answers(b"".join(lines), submitting) == ["taken", "invalid", "invalid", "internal", "taken"]
    assert len(submitting.submitted) == 2


@pytest.mark.parametrize("at_once", [9, 3])
async def test_lines_in_flight_are_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    submitting = Submitting()
    monkeypatch.setattr(bulk, "AT_ONCE_BYTES", at_once * len(line()))
    assert await answers(line() * 9, submitting) == ["taken"] * 9
    assert submitting.most == at_once


# -- a command about many requests that ends early


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
