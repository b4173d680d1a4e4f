"""`POST /v1/requests?wait=…`: the answer is the request, done or not. An accepted request is never an error."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from gateway_parts import service_with
from kit.gateway_http import client
from penstock.gateway.app import create_app
from penstock.gateway.context import context_of_app
from penstock.gateway.service.submitting import Accepted, Checked
from penstock.gateway.service.subscriptions import Stopping
from penstock.gateway.settings import GatewaySettings
from penstock.schemas.errors import BrokerUnavailable, Gone

BODY = {"task": "text_generation", "payload": {"prompt": "p"}}


class Parts:
    """Accepts each request; `outcome` says what becomes of it."""

    def __init__(self, outcome: Any) -> None:
        self.outcome = outcome
        self.waited_s: list[float] = []

    def catching_up(self) -> None:
        return None

    async def check(self, caller: Any, request: Any) -> Checked:
        return Checked(caller, request, None)

    async def submit(self, checked: Checked, **_: Any) -> Accepted:
        return Accepted("r1")

    async def wait(self, tenant: str, request_id: str, timeout_s: float) -> Any:
        self.waited_s.append(timeout_s)
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return SimpleNamespace(done=self.outcome)

    def waits_unseen(self, entry: Any) -> dict[str, Any]:
        return {}

    async def public(self, entry: Any, beside: Any) -> bytes:
        return b'{"request_id":"r1","done":%s}' % (b"true" if entry.done else b"false")


async def submitted(parts: Parts, query: str) -> httpx.Response:
    app = create_app(GatewaySettings())
    context_of_app(app).connected = service_with(parts)
    async with client(app) as http:
        return await http.post(f"/v1/requests{query}", json=BODY)


@pytest.mark.parametrize(
    ("outcome", "query", "status", "done", "waited_s"),
    [
        (True, "?wait=3", 200, True, [3.0]),
        (False, "?wait=0.5", 202, False, [0.5]),
        (True, "", 202, False, []),
        (True, "?wait=0", 202, False, []),
        (Stopping("restarts"), "?wait=3", 202, False, [3.0]),
        (BrokerUnavailable("away"), "?wait=3", 202, False, [3.0]),
        (Gone("erased"), "?wait=3", 202, False, [3.0]),
    ],
)
async def test_the_answer_is_the_request(
    outcome: Any, query: str, status: int, done: bool, waited_s: list[float]
) -> None:
    parts = Parts(outcome)
    answer = await submitted(parts, query)
    assert (answer.status_code, answer.json()["done"], parts.waited_s) == (status, done, waited_s), answer.text
    assert answer.json()["request_id"] == "r1"
    assert (answer.headers["location"], answer.headers["x-request-id"]) == ("/v1/requests/r1", "r1")


@pytest.mark.parametrize("query", ["?wait=61", "?wait=-1", "?wait=soon"])
async def test_a_wait_out_of_range_is_refused(query: str) -> None:
    answer = await submitted(Parts(True), query)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "wait")
