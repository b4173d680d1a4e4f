"""Lines of a batch with unforeseen content or failures: each ends by itself."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest
from pydantic_core import from_json

from kit.records import new_batch
from penstock.gateway.batches.line_runs import LineEnd, LineRuns
from penstock.gateway.batches.records import Stop
from penstock.gateway.limits.allowances import Allowances
from penstock.gateway.limits.callers import Caller
from penstock.gateway.routes.line_reader import Line
from penstock.gateway.service.submitting import Checked
from penstock.gateway.service.subscriptions import Subscription
from penstock.gateway.settings import GatewaySettings
from penstock.gateway.view.frames import ResultFrame
from penstock.gateway.view.hub import Hub
from penstock.schemas.errors import Overloaded, PenstockError
from penstock.schemas.ids import idempotent_request_id
from penstock.schemas.records import InferenceRequest
from support import wait_until_async

HI = {"input": "hi"}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


class Service:
    """What lines ask of a gateway: every request that is submitted completes at once."""

    def __init__(self, failures: Sequence[Exception] = ()) -> None:
        """`failures`: of the first checks."""
        self.settings = GatewaySettings()
        self.submitting = self.subscriptions = self.lookups = self
        self.submitted: list[list[str]] = []
        self._failures = list(failures)
        self._hub = Hub()

    def open(self, most_frames: int) -> Subscription:
        return Subscription(self._hub, single=False, most_frames=most_frames)

    async def check(self, caller: Caller, request: InferenceRequest) -> Checked:
        if self._failures:
            raise self._failures.pop(0)
        return Checked(caller, request, request.model)

    async def submit_together(self, many: Sequence[Checked]) -> list[PenstockError | None]:
        self.submitted.append([checked.request.request_id for checked in many])
        return [None] * len(many)

    async def catch_up(self) -> None:
        pass

    def peek(self, tenant: str, request_id: str) -> object | None:
        return request_id if any(request_id in together for together in self.submitted) else None

    def follow_outcome(self, subscription: Subscription, tenant: str, request_id: str) -> None:
        result = {"text": "x", "finish_reason": "stop", "usage": {}}
        frame = ResultFrame(
            request_id=request_id, cursor=None, status="completed", result=result, error=None, model="m"
        )
        subscription.push([frame])

    def unfollow_outcome(self, subscription: Subscription, tenant: str, request_id: str) -> None:
        pass


async def ended(
    service: Any, bodies: Sequence[dict[str, Any]], stop: Stop | None = None, *, resumed: bool = False
) -> dict[int, LineEnd]:
    """The end of each line, by its number."""
    made = new_batch(batch_id="b", endpoint="/v1/responses")
    runs = LineRuns(made, service, Allowances(), lambda: Caller(tenant="default"), lambda: stop, resumed=resumed)
    asked = {"method": "POST", "url": made.endpoint}
    lines = [
        Line(number, 0, json.dumps({**asked, "custom_id": str(number), "body": {"model": "m", **body}}).encode())
        for number, body in enumerate(bodies)
    ]
    ends: dict[int, LineEnd] = {}
    following = asyncio.create_task(runs.follow())
    try:
        await runs.submit(lines, lambda line, end: ends.update({line.number: end}))
        await wait_until_async(lambda: len(ends) == len(lines) or following.done())
    finally:
        following.cancel()
        runs.close()
    assert not runs.flying
    return ends


async def test_an_answer_that_says_back_what_was_asked_is_written_if_json_can_hold_it() -> None:
    schemas = (nested(95), nested(130), {"type": "object", "description": "\ud800"}, {"maximum": float("nan")})
    bodies = [{**HI, "tools": [{"type": "function", "name": "f", "parameters": schema}]} for schema in schemas]
    ends = await ended(Service(), bodies)
    found = [from_json(ends[number].content, allow_inf_nan=False)["response"] for number in range(4)]
    assert found[0]["body"]["tools"][0]["parameters"] == schemas[0]
    told = [(one["status_code"], one["body"]["error"]["param"]) for one in found[1:]]
    place = "tools[0].parameters"
    assert told == [(400, None), (400, f"{place}.description"), (400, f"{place}.maximum")]


async def test_a_line_that_nobody_foresaw_is_an_error_of_that_line() -> None:
    ends = await ended(Service([RuntimeError("unforeseen")]), [HI, HI])
    found = json.loads(ends[0].content)["response"]
    assert (ends[0].completed, ends[0].counts.failed, found["status_code"]) == (False, 1, 500)
    assert found["body"]["error"]["code"] == "internal"
    assert "unforeseen" not in ends[0].content.decode()
    assert ends[1].completed


async def test_what_the_machine_fails_at_is_no_error_of_the_line() -> None:
    with pytest.raises(OSError, match="no space"):
        await ended(Service([OSError("no space")]), [HI])


async def test_a_group_is_submitted_together_but_for_what_is_refused() -> None:
    service = Service()
    ends = await ended(service, [HI, {"input": 5}, HI, {**HI, "stream": True}, {**HI, "background": True}, HI])
    assert [end.completed for _, end in sorted(ends.items())] == [True, False, True, False, False, True]
    codes = [json.loads(ends[number].content)["response"]["status_code"] for number in (1, 3, 4)]
    assert (codes, [len(together) for together in service.submitted]) == ([400, 400, 400], [3])


async def test_what_is_refused_for_now_is_submitted_later_and_once() -> None:
    service = Service([Overloaded("full", retry_after_s=0.01)] * 3)
    ends = await ended(service, [HI, HI, HI])
    assert all(end.completed for end in ends.values())
    assert sorted(len(together) for together in service.submitted if together) == [3]


@pytest.mark.parametrize("stop", [None, Stop.CANCELLED])
async def test_whoever_takes_a_batch_over_submits_only_what_is_not_there(stop: Stop | None) -> None:
    service = Service()
    first = idempotent_request_id("default", "batch/b/0")
    service.submitted.append([first])
    ends = await ended(service, [HI, HI], stop, resumed=True)
    assert (ends[0].completed, ends[1].completed) == (True, stop is None)
    sent = [one for together in service.submitted[1:] for one in together]
    assert sent == ([] if stop else [idempotent_request_id("default", "batch/b/1")])
