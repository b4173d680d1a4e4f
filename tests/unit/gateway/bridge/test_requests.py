"""Requests of messages: sent once, limits of their tenant held, what was sent before followed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any, cast

import pytest

from penstock.common.settings import KafkaSettings
from penstock.gateway.bridge.known import Known
from penstock.gateway.bridge.requests import CLOCKS_MS, Requests
from penstock.gateway.limits.allowances import Allowances
from penstock.gateway.limits.limits import Limits
from penstock.producers import AsyncClient, Event, Result, Status, Submitted
from penstock.producers.core import Before
from penstock.schemas.codec import default_codec
from penstock.schemas.errors import (
    BrokerUnavailable,
    Forbidden,
    IdempotencyKeyReused,
    InvalidRequest,
    ModelNotFound,
    NotFound,
    PenstockError,
    TenantLimit,
)
from penstock.schemas.records import InferenceRequest, ModelInfo, Origin, ResultEvent, Usage
from penstock.schemas.requests import parse_request

MODEL = ModelInfo(model="m", engine="noop", state="ready", worker_id="w", tasks=["text_generation"], updated_at=1 << 50)


class FakeClient:
    """Takes what is sent, and has one outcome for all."""

    def __init__(self) -> None:
        self.sent: list[InferenceRequest] = []
        self.followed: list[tuple[object, int | None]] = []
        self.failure: PenstockError | None = None
        self.go = asyncio.Event()
        self.go.set()

    async def send(self, request: InferenceRequest, *, traceparent: str | None = None, headers: Any = ()) -> Submitted:
        await self.go.wait()
        if self.failure is not None:
            raise self.failure
        self.sent.append(request)
        before = Before(result=0, status=0)
        return Submitted(
            request_id=request.request_id,
            tenant="team",
            topic="t",
            partition=0,
            offset=1,
            append_time_ms=1 << 50,
            before=before,
        )

    async def follow(self, what: object, *, since_ms: int | None = None) -> AsyncGenerator[Event]:
        self.followed.append((what, since_ms))
        yield Status(status="running", attempt=1, model="m", ttl_ms=9)
        yield Result(outcome("r1"))

    async def flush(self) -> int:
        return 0


def outcome(request_id: str) -> ResultEvent:
    origin = Origin(topic="t", partition=0, offset=1, append_time_ms=1)
    return ResultEvent(
        request_id=request_id,
        tenant="team",
        kind="terminal",
        status="completed",
        attempt=1,
        epoch=1,
        origin=origin,
        worker_id="w",
        created_at=1,
        task="text_generation",
        text_generation={"text": "x"},
        usage=Usage(prompt_tokens=60, completion_tokens=60),
    )


class World:
    """One bridge's requests, with a client that is none. `known` reads nothing: what it knows is told here."""

    def __init__(self, **limits: Any) -> None:
        self.known = Known(KafkaSettings(), default_codec())
        self.client = FakeClient()
        self.allowances = Allowances(by_tenant={"team": Limits(**limits)})
        clients = {"team": cast("AsyncClient", self.client)}
        self.requests = Requests(clients, self.known, self.allowances, lambda store, prefix: None)
        self.known._models = {b"m": MODEL}


def made(request_id: str = "r1", **fields: Any) -> InferenceRequest:
    body = {"task": "text_generation", "payload": {"prompt": "p"}, **fields}
    return parse_request(body, tenant="team", request_id=request_id, now_ms=1)


async def test_a_request_is_sent_once_and_followed_from_where_it_was_sent() -> None:
    world = World()
    first = await world.requests.accepted(made())
    again = await world.requests.accepted(made())
    assert len(world.client.sent) == 1
    assert (await world.requests.outcome(first)).event == outcome("r1")
    assert (await world.requests.outcome(again)).status == Status(status="running", attempt=1, model="m", ttl_ms=9)
    assert world.client.followed == [(first.submitted, None), ("r1", (1 << 50) - CLOCKS_MS)]


async def test_of_two_messages_with_one_id_the_second_follows_while_the_first_is_being_sent() -> None:
    world = World()
    world.client.go.clear()
    first = asyncio.create_task(world.requests.accepted(made()))
    await asyncio.sleep(0)
    second = await world.requests.accepted(made())
    assert second.submitted is None
    world.client.go.set()
    await first
    assert len(world.client.sent) == 1


async def test_another_payload_under_the_same_id_is_refused() -> None:
    world = World()
    await world.requests.accepted(made())
    with pytest.raises(IdempotencyKeyReused):
        await world.requests.accepted(made(payload={"prompt": "another"}))


async def test_what_was_not_acknowledged_is_looked_for_before_it_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    world, looks = World(), []
    monkeypatch.setattr(world.known, "look_again", lambda: looks.append(1))
    world.client.failure = BrokerUnavailable("no answer")
    with pytest.raises(BrokerUnavailable):
        await world.requests.accepted(made())
    assert looks == [1]
    world.client.failure = None
    await world.requests.accepted(made())
    assert len(world.client.sent) == 1


async def test_a_pool_that_is_not_there_is_a_refusal_and_a_missing_common_topic_is_not() -> None:
    world = World()
    world.known._models = {}
    world.client.failure = NotFound("no such topic")
    with pytest.raises(InvalidRequest, match="there is no pool big"):
        await world.requests.accepted(made(pool="big"))
    with pytest.raises(BrokerUnavailable):
        await world.requests.accepted(made())


async def test_a_model_that_nobody_serves_is_refused() -> None:
    with pytest.raises(ModelNotFound):
        await World().requests.accepted(made(model="other"))


async def test_the_tenants_limits_hold() -> None:
    world = World(models=("other",))
    with pytest.raises(Forbidden):
        await world.requests.accepted(made(model="m"))
    world = World(outstanding=0)
    with pytest.raises(TenantLimit):
        await world.requests.accepted(made())
    world = World(tokens_per_minute=100)
    await world.requests.outcome(await world.requests.accepted(made()))
    with pytest.raises(TenantLimit, match="100 tokens per minute"):
        await world.requests.accepted(made("r2"))


async def test_what_is_under_way_counts_as_outstanding_until_its_outcome() -> None:
    world = World(outstanding=1)
    accepted = await world.requests.accepted(made())
    follow = world.client.follow

    async def waiting(what: object, *, since_ms: int | None = None) -> AsyncGenerator[Event]:
        with pytest.raises(TenantLimit):
            await world.requests.accepted(made("r2"))
        async for event in follow(what, since_ms=since_ms):
            yield event

    world.client.follow = waiting
    await world.requests.outcome(accepted)
    assert world.allowances.tenants.of("team").outstanding == 0
    await world.requests.accepted(made("r2"))


async def test_nothing_is_sent_before_the_topics_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    world, read = World(), asyncio.Event()
    monkeypatch.setattr(world.known, "_read_to_ends", read.wait)
    world.known.look_again()
    sending = asyncio.create_task(world.requests.accepted(made()))
    for _ in range(10):
        await asyncio.sleep(0)
    assert world.client.sent == []
    read.set()
    await sending
    assert len(world.client.sent) == 1


async def test_nothing_is_sent_when_the_reading_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()

    async def fails() -> None:
        raise InvalidRequest("the reader is broken")

    monkeypatch.setattr(world.known, "_read_to_ends", fails)
    world.known.look_again()
    with pytest.raises(BrokerUnavailable):
        await world.requests.accepted(made())
    assert world.client.sent == []
