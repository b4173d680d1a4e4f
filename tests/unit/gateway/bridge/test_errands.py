"""Errands of messages that another bridge had before: the same answer comes again, whatever time it is by then."""

from __future__ import annotations

import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kit.gateway_bridge import MODEL, FakeClient, KnownTopics, requests_of
from kit.gateway_records import CODEC, outcome
from penstock.common.group_consumer import Read
from penstock.common.settings import KafkaSettings
from penstock.common.transport import AsyncTransport
from penstock.gateway.bridge import errands as errands_module
from penstock.gateway.bridge.errands import Errands, StoreReads, TryAgain
from penstock.gateway.limits.allowances import Allowances
from penstock.gateway.queues.formats import request_key
from penstock.gateway.queues.settings import QueueSection
from penstock.schemas.ids import idempotent_request_id
from penstock.schemas.records import ErrorInfo, ResultEvent, Usage

QUEUE = QueueSection(topic="jobs", tenant="team", result_topic="answers")
DEADLINE_S = 1_000
FAILED = ErrorInfo(type="server_error", code="engine_failed", message="it broke", retryable=True)


def request_id(tries: int) -> str:
    return idempotent_request_id("team", request_key(QUEUE, "one", tries))


def ended(tries: int, error: ErrorInfo | None = None) -> dict[str, ResultEvent]:
    """The outcome of this try."""
    fields: dict[str, Any] = {"tenant": "team", "model": "m", "usage": Usage(prompt_tokens=1, completion_tokens=1)}
    if error is None:
        fields |= {"text_generation": {"text": "Paris"}, "finish_reason": "stop"}
    else:
        fields |= {"status": "failed", "error": error}
    return {request_id(tries): outcome(request_id(tries), **fields)}


class FakeTransport:
    def __init__(self) -> None:
        self.answers: list[dict[str, Any]] = []

    async def produce(self, topic: str, value: bytes, *, key: bytes | None = None) -> None:
        self.answers.append(json.loads(value))


class World:
    """`bridge()` is one life of a bridge. What was sent stands on the topics, so that the next one knows it."""

    def __init__(self, topics: KnownTopics, monkeypatch: pytest.MonkeyPatch) -> None:
        self.client, self.transport, self.now_s, self.known = FakeClient(), FakeTransport(), 0, topics.known
        monkeypatch.setattr(errands_module, "now_ms", lambda: self.now_s * 1000)
        monkeypatch.setattr(errands_module, "time", SimpleNamespace(time=lambda: self.now_s))

    def bridge(self) -> Errands:
        requests, transport = requests_of(self.client, self.known, Allowances()), cast("AsyncTransport", self.transport)
        return Errands(requests, transport, cast("StoreReads", None), KafkaSettings(), CODEC)

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


@pytest.fixture
async def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(await KnownTopics(monkeypatch).start(MODEL), monkeypatch)


@pytest.mark.parametrize(
    ("outcomes", "lives"),
    [
        (ended(0), [[-1], [1]]),
        ({**ended(0, FAILED), **ended(1)}, [[-9, -1], [1, 9]]),
    ],
    ids=["the first try", "a later try"],
)
async def test_an_answer_in_time_is_repeated_after_the_deadline(world: World, outcomes: Any, lives: Any) -> None:
    world.client.outcomes = outcomes
    for times_s in lives:
        assert await world.live([DEADLINE_S + one for one in times_s]) == "completed"
    assert world.texts == ["Paris", "Paris"]
    assert world.client.sent == list(outcomes)


async def test_a_message_that_was_not_sent_before_its_deadline_is_not_sent_after_it(world: World) -> None:
    assert await world.live([DEADLINE_S + 1]) == "refused"
    world.client.outcomes = ended(0, FAILED)
    assert await world.live([DEADLINE_S - 1, DEADLINE_S + 1]) == "refused"
    assert world.client.sent == [request_id(0)]
    assert world.texts == ["deadline exceeded", "deadline exceeded"]
