"""Requests of messages: sent once, held to the limits of their tenant, and followed if they were sent before."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from kit.gateway_bridge import MODEL, RUNNING, SENT_MS, FakeClient, KnownTopics, made, requests_of
from kit.gateway_records import outcome
from penstock.gateway.bridge.requests import CLOCKS_MS
from penstock.gateway.limits.allowances import Allowances
from penstock.gateway.limits.limits import Limits
from penstock.producers import Event
from penstock.schemas.errors import (
    BrokerUnavailable,
    Forbidden,
    IdempotencyKeyReused,
    InvalidRequest,
    ModelNotFound,
    NotFound,
    TenantLimit,
    TooLarge,
)
from penstock.schemas.records import Usage


class World:
    """The requests of one bridge, whose tenant has these limits."""

    def __init__(self, topics: KnownTopics, **limits: Any) -> None:
        self.known, self.reader, self.client = topics.known, topics.reader, FakeClient()
        self.allowances = Allowances(by_tenant={"team": Limits(**limits)})
        self.requests = requests_of(self.client, self.known, self.allowances)
        self.accepted = self.requests.accepted


@pytest.fixture
async def topics(monkeypatch: pytest.MonkeyPatch) -> KnownTopics:
    return await KnownTopics(monkeypatch).start(MODEL)


@pytest.fixture
def world(topics: KnownTopics) -> World:
    return World(topics)


async def test_a_request_is_sent_once_and_followed_from_where_it_was_sent(world: World) -> None:
    """A second message with the same id follows, also while the first is being sent."""
    world.client.go.clear()
    sending = asyncio.create_task(world.accepted(made()))
    await asyncio.sleep(0)
    assert (await world.accepted(made())).submitted is None
    world.client.go.set()
    first = await sending
    again = await world.accepted(made())
    assert world.client.sent == ["r1"]
    assert (await world.requests.outcome(first)).event == outcome("r1", tenant="team")
    assert (await world.requests.outcome(again)).status == RUNNING
    assert world.client.followed == [(first.submitted, None), ("r1", SENT_MS - CLOCKS_MS)]
    with pytest.raises(IdempotencyKeyReused):
        await world.accepted(made(payload={"prompt": "another"}))


async def test_a_queue_s_entries_of_extra_fill_a_request_s_and_may_change_between_two_tries(world: World) -> None:
    first = await world.accepted(made(extra={"X-A": "own"}), {"x-a": "queue", "x-b": "queue"})
    assert first.request.extra == {"X-A": "own", "x-b": "queue"}
    assert (await world.accepted(made(extra={"X-A": "own"}), {"x-c": "another"})).submitted is None
    assert world.client.sent == ["r1"]
    with pytest.raises(TooLarge):
        await world.accepted(made("r2"), {f"x-{number}": "x" for number in range(10_000)})


async def test_an_unacknowledged_request_is_looked_for_before_it_is_sent_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []
    monkeypatch.setattr(world.known, "look_again", lambda: looks.append(1))
    world.client.failure = BrokerUnavailable("no answer")
    with pytest.raises(BrokerUnavailable):
        await world.accepted(made())
    assert looks == [1]
    world.client.failure = None
    await world.accepted(made())
    assert world.client.sent == ["r1"]


async def test_a_pool_that_does_not_exist_is_a_refusal_and_a_missing_common_topic_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(await KnownTopics(monkeypatch).start())
    world.client.failure = NotFound("no such topic")
    with pytest.raises(InvalidRequest, match="there is no pool big"):
        await world.accepted(made(pool="big"))
    with pytest.raises(BrokerUnavailable):
        await world.accepted(made())


@pytest.mark.parametrize(
    ("limits", "model", "error"),
    [
        ({}, "other", ModelNotFound),
        ({"models": ("other",)}, "m", Forbidden),
        ({"outstanding": 0}, None, TenantLimit),
    ],
)
async def test_a_request_beyond_the_limits_is_refused(topics: KnownTopics, limits: Any, model: Any, error: Any) -> None:
    with pytest.raises(error):
        await World(topics, **limits).accepted(made(model=model))


async def test_a_request_counts_as_outstanding_until_its_outcome_and_then_its_tokens(topics: KnownTopics) -> None:
    world = World(topics, outstanding=1, tokens_per_minute=100)
    world.client.outcomes["r2"] = outcome("r2", tenant="team", usage=Usage(prompt_tokens=60, completion_tokens=60))
    accepted, follow = await world.accepted(made()), world.client.follow

    async def waiting(what: Any, *, since_ms: int | None = None) -> AsyncGenerator[Event]:
        with pytest.raises(TenantLimit):
            await world.accepted(made("r2"))
        async for event in follow(what, since_ms=since_ms):
            yield event

    world.client.follow = waiting
    await world.requests.outcome(accepted)
    assert world.allowances.tenants.of("team").outstanding == 0
    world.client.follow = follow
    await world.requests.outcome(await world.accepted(made("r2")))
    with pytest.raises(TenantLimit, match="100 tokens per minute"):
        await world.accepted(made("r3"))


@pytest.mark.parametrize("fails", [False, True])
async def test_nothing_is_sent_before_the_topics_are_read_or_when_reading_has_ended(world: World, fails: bool) -> None:
    read = threading.Event()

    def catch_up(*_: Any, **__: Any) -> None:
        assert read.wait(10)
        if fails:
            world.reader.failure = RuntimeError("the reader is broken")
            raise BrokerUnavailable("not read")

    world.reader.wait_until_caught_up = catch_up
    world.known.look_again()
    sending = asyncio.create_task(world.accepted(made()))
    for _ in range(10):
        await asyncio.sleep(0)
    assert world.client.sent == []
    read.set()
    if fails:
        with pytest.raises(BrokerUnavailable):
            await sending
    else:
        await sending
    assert world.client.sent == ([] if fails else ["r1"])
