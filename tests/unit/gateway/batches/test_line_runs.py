"""Lines of a batch that nobody foresaw: each ends by itself, whatever happens to it."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.common.clock import now_ms
from penstock.gateway.batches import line_runs
from penstock.gateway.batches.line_runs import LineEnd, LineRuns
from penstock.gateway.batches.records import Batch
from penstock.gateway.limits.allowances import Allowances
from penstock.gateway.limits.callers import Caller
from penstock.gateway.routes.line_reader import Line

RESULT: dict[str, Any] = {"text": "x", "finish_reason": "stop", "usage": {}, "model": "m"}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


class Submitting:
    def __init__(self, failure: Exception | None) -> None:
        self._failure = failure

    async def check(self, caller: Caller, request: Any) -> Any:
        if self._failure is not None:
            raise self._failure
        return request

    async def submit_first(self, *_: Any) -> None:
        return


async def ended(body: dict[str, Any], monkeypatch: pytest.MonkeyPatch, failure: Exception | None = None) -> LineEnd:
    async def outcome(*_: Any) -> dict[str, Any]:
        return RESULT

    monkeypatch.setattr(line_runs, "outcome", outcome)
    made_ms = now_ms()
    batch = Batch(
        batch_id="b",
        tenant="default",
        key_id=None,
        endpoint="/v1/responses",
        input_file_id="f",
        created_ms=made_ms,
        expires_at=made_ms // 1000 + 60,
    )
    service: Any = SimpleNamespace(
        submitting=Submitting(failure),
        subscriptions=SimpleNamespace(await_outcome=lambda *_: SimpleNamespace(close=lambda: None)),
    )
    runs = LineRuns(batch, service, Allowances(), lambda: Caller(tenant="default"), lambda: None, resumed=False)
    line = {"custom_id": "1", "method": "POST", "url": batch.endpoint, "body": {"model": "m", "input": "hi", **body}}
    return await runs.run(Line(1, 0, json.dumps(line).encode()))


@pytest.mark.parametrize(
    "schema", [nested(130), {"type": "object", "description": "\ud800"}], ids=["deep", "half a surrogate pair"]
)
async def test_an_answer_that_says_back_what_was_asked_is_written(
    schema: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = {"type": "function", "name": "f", "parameters": schema}
    end = await ended({"tools": [tool]}, monkeypatch)
    assert end.completed
    assert json.loads(end.content)["response"]["body"]["tools"][0]["parameters"] == schema


async def test_a_line_that_nobody_foresaw_is_an_error_of_that_line(monkeypatch: pytest.MonkeyPatch) -> None:
    end = await ended({}, monkeypatch, RuntimeError("unforeseen"))
    found = json.loads(end.content)["response"]
    assert (end.completed, end.counts.failed, found["status_code"]) == (False, 1, 500)
    assert found["body"]["error"]["code"] == "internal"
    assert "unforeseen" not in end.content.decode()


async def test_what_the_machine_fails_at_is_no_error_of_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OSError, match="no space"):
        await ended({}, monkeypatch, OSError("no space"))
