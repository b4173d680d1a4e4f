"""Errands of messages that another bridge had before: the same answer comes again, whatever time it is by then."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock.common.group_consumer import Read
from penstock.common.settings import KafkaSettings
from penstock.common.transport import AsyncTransport
from penstock.gateway.bridge import errands as errands_module
from penstock.gateway.bridge.errands import Errands, StoreReads, TryAgain
from penstock.gateway.bridge.known import Known
from penstock.gateway.bridge.requests import Requests
from penstock.gateway.limits.allowances import Allowances
from penstock.gateway.queues.formats import request_key
from penstock.gateway.queues.settings import QueueSection
from penstock.producers import AsyncClient, Event, Result, Submitted
from penstock.producers.core import Before
from penstock.schemas.codec import default_codec
from penstock.schemas.ids import idempotent_request_id
from penstock.schemas.records import ErrorInfo, InferenceRequest, ModelInfo, Origin, ResultEvent, Usage

QUEUE = QueueSection(topic="jobs", tenant="team", result_topic="answers")
DEADLINE_S = 1_000
MODEL = ModelInfo(model="m", engine="noop", state="ready", worker_id="w", tasks=["text_generation"], updated_at=1 << 50)
FAILED = ErrorInfo(type="server_error", code="engine_failed", message="it broke", retryable=True)


def request_id(tries: int) -> str:
    return idempotent_request_id("team", request_key(QUEUE, "one", tries))


def outcome(of: str, error: ErrorInfo | None = None) -> ResultEvent:
    return ResultEvent(
        request_id=of,
        tenant="team",
        kind="terminal",
        status="completed" if error is None else "failed",
        attempt=1,
        epoch=1,
        origin=Origin(topic="t", partition=0, offset=1, append_time_ms=1),
        worker_id="w",
        created_at=1,
        task="text_generation",
        model="m",
        text_generation={"text": "Paris"} if error is None else None,
        usage=Usage(prompt_tokens=1, completion_tokens=1, total_tokens=2),
        finish_reason="stop" if error is None else None,
        error=error,
    )


class FakeClient:
    """Takes what is sent; `outcomes` are told by request."""

    def __init__(self) -> None:
        self.sent: list[str] = []
        self.outcomes: dict[str, ResultEvent] = {}

    async def send(self, request: InferenceRequest, **_: Any) -> Submitted:
        self.sent.append(request.request_id)
        return Submitted(
            request_id=request.request_id,
            tenant="team",
            topic="t",
            partition=0,
            offset=1,
            append_time_ms=1 << 50,
            before=Before(result=0, status=0),
        )

    async def follow(self, what: Submitted | str, *, since_ms: int | None = None) -> AsyncGenerator[Event]:
        yield Result(self.outcomes[what if isinstance(what, str) else what.request_id])


class FakeTransport:
    def __init__(self) -> None:
        self.answers: list[dict[str, Any]] = []

    async def produce(self, topic: str, value: bytes, *, key: bytes | None = None) -> None:
        self.answers.append(json.loads(value))


class World:
    """`bridge()` is one life of a bridge. What was sent stands on the topics, so that the next one knows it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.client, self.transport, self.now_s = FakeClient(), FakeTransport(), 0
        self.known = Known(KafkaSettings(), default_codec())
        self.known._models = {b"m": MODEL}
        monkeypatch.setattr(errands_module, "now_ms", lambda: self.now_s * 1000)
        monkeypatch.setattr(errands_module, "time", SimpleNamespace(time=lambda: self.now_s))

    def bridge(self) -> Errands:
        clients = {"team": cast("AsyncClient", self.client)}
        requests = Requests(clients, self.known, Allowances(), lambda store, prefix: None)
        transport = cast("AsyncTransport", self.transport)
        return Errands(requests, transport, cast("StoreReads", None), KafkaSettings(), default_codec())

    async def live(self, times_s: Sequence[int]) -> str:
        """A life of a bridge: a try at each of these times, until one ends."""
        bridge = self.bridge()
        for tries, self.now_s in enumerate(times_s):
            try:
                return await bridge.run(QUEUE, message(), tries)
            except TryAgain:
                continue
        raise AssertionError("it did not end")

    @property
    def texts(self) -> list[str]:
        """What was answered: the text, or the error."""
        given = self.transport.answers
        return [one.get("error") or one["payload"]["choices"][0]["message"]["content"] for one in given]


def message() -> Read:
    body = {"messages": [{"role": "user", "content": "the capital of France?"}]}
    value = {"id": "one", "deadline": str(DEADLINE_S), "payload": body}
    return Read(("jobs", 0), 7, None, json.dumps(value).encode(), 1)


async def test_an_answer_that_came_in_time_comes_again_when_the_deadline_has_passed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A bridge was killed before it could commit a message that it had answered. The next one, behind the message's
    deadline, answered that it was exceeded."""
    world = World(monkeypatch)
    world.client.outcomes[request_id(0)] = outcome(request_id(0))
    assert await world.live([DEADLINE_S - 1]) == "completed"
    assert await world.live([DEADLINE_S + 1]) == "completed"
    assert world.texts == ["Paris", "Paris"]
    assert world.client.sent == [request_id(0)]


async def test_so_does_the_answer_of_a_later_try(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    world.client.outcomes = {request_id(0): outcome(request_id(0), FAILED), request_id(1): outcome(request_id(1))}
    assert await world.live([DEADLINE_S - 9, DEADLINE_S - 1]) == "completed"
    assert await world.live([DEADLINE_S + 1, DEADLINE_S + 9]) == "completed"
    assert world.texts == ["Paris", "Paris"]
    assert world.client.sent == [request_id(0), request_id(1)]


async def test_what_nobody_has_sent_before_its_deadline_is_not_sent_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    assert await world.live([DEADLINE_S + 1]) == "refused"
    world.client.outcomes[request_id(0)] = outcome(request_id(0), FAILED)
    assert await world.live([DEADLINE_S - 1, DEADLINE_S + 1]) == "refused"
    assert world.client.sent == [request_id(0)]
    assert world.texts == ["deadline exceeded", "deadline exceeded"]
