"""Requests of messages: sent once, held to the limits of their tenant, and followed if they were sent before."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncGenerator, Sequence
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock, Mock

import httpx
import pytest
from prometheus_client import CollectorRegistry

from kit.gateway_readers import fake_readers
from kit.records import CODEC, model_info, outcome
from penstock.cli.paths import free_port
from penstock.common.group_consumer import Read
from penstock.common.outgoing import request_record
from penstock.common.reader import RawMessage
from penstock.common.settings import KafkaSettings
from penstock.common.tracing import SpanContext
from penstock.gateway import side_process
from penstock.gateway import traces as traces_module
from penstock.gateway.bridge import known as known_module
from penstock.gateway.bridge import message_handler
from penstock.gateway.bridge.known import KNOWN_MS, Known, Sent, SentRequests, content_header, content_of, pools_of
from penstock.gateway.bridge.message_handler import MessageHandler, StoreReads, TryAgain
from penstock.gateway.bridge.requests import CLOCKS_MS, Requests
from penstock.gateway.health_server import HealthServer
from penstock.gateway.limits.allowances import Allowances
from penstock.gateway.limits.limits import Limits
from penstock.gateway.queues.formats import request_key
from penstock.gateway.queues.settings import QueueSection
from penstock.producers import AsyncClient, Event, Result, Status, Submitted
from penstock.producers.core import Before
from penstock.schemas.errors import (
    BrokerUnavailable,
    Forbidden,
    IdempotencyKeyReused,
    InvalidRequest,
    ModelNotFound,
    NotFound,
    PenstockError,
    TenantLimit,
    TooLarge,
)
from penstock.schemas.ids import idempotent_request_id
from penstock.schemas.records import ErrorInfo, InferenceRequest, ModelInfo, ResultEvent, Usage
from penstock.schemas.requests import parse_request
from penstock.schemas.topics import TopicNames
from support import wait_until_async

NAMES = TopicNames()
SENT_MS = 1 << 50
MODEL = model_info("m", updated_at=SENT_MS)
RUNNING = Status(status="running", attempt=1, model="m", ttl_ms=9)


def made(request_id: str = "r1", **fields: Any) -> InferenceRequest:
    """The request of a message of the tenant `team`."""
    body = {"task": "text_generation", "payload": {"prompt": "p"}, **fields}
    return parse_request(body, tenant="team", request_id=request_id, now_ms=1)


class KnownTopics:
    """What a bridge knows (`known`), and the reader through which it learns it. The pool `big` has request topics."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        topics = dict.fromkeys([*NAMES.request_topics(), *NAMES.request_topics("big"), NAMES.model], 4)
        self._readers = fake_readers(monkeypatch, known_module, topics)
        self.known = Known(KafkaSettings(), CODEC, worker_late_s=8)

    async def start(self, *models: ModelInfo) -> KnownTopics:
        await self.known.start()
        (self.reader,) = self._readers
        self.reader.read([self.of_model(model) for model in models])
        return self

    def of_model(self, model: ModelInfo) -> RawMessage:
        return RawMessage(NAMES.model, 0, 0, 1, model.model.encode(), CODEC.encode(model))

    def read(self, request: InferenceRequest, *, by_bridge: bool = True) -> None:
        """A record of the request is read, which a bridge has sent or another producer."""
        out = request_record(request, NAMES, CODEC, source="test")
        headers = [*out.headers, *([content_header(request.tenant, content_of(request))] if by_bridge else [])]
        self.reader.read([RawMessage(out.topic, 0, 0, 77, out.key, out.value, tuple(headers))])


class FakeClient:
    """Accepts what is sent once `go` is set. Requests end with their `outcomes`, or complete."""

    def __init__(self) -> None:
        self.sent: list[str] = []
        self.followed: list[tuple[object, int | None]] = []
        self.outcomes: dict[str, ResultEvent] = {}
        self.failure: PenstockError | None = None
        self.go = asyncio.Event()
        self.go.set()

    async def send(self, request: InferenceRequest, **_: Any) -> Submitted:
        await self.go.wait()
        if self.failure is not None:
            raise self.failure
        self.sent.append(request.request_id)
        sent: dict[str, Any] = {"request_id": request.request_id, "tenant": "team", "topic": "t", "partition": 0}
        return Submitted(**sent, before=Before(result=0, status=0), offset=1, append_time_ms=SENT_MS)

    async def follow(self, what: Submitted | str, *, since_ms: int | None = None) -> AsyncGenerator[Event]:
        self.followed.append((what, since_ms))
        request_id = what if isinstance(what, str) else what.request_id
        yield RUNNING
        yield Result(self.outcomes.get(request_id) or outcome(request_id, tenant="team"))

    async def flush(self) -> int:
        return 0


def requests_of(client: Any, known: Known, allowances: Allowances) -> Requests:
    return Requests({"team": cast("AsyncClient", client)}, known, allowances, lambda store, prefix: None, TopicNames())


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


async def test_a_send_that_fails_has_a_span(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    exporter = Mock(begin=Mock(return_value=SpanContext(1, 2)))
    monkeypatch.setattr(traces_module, "active", lambda: exporter)
    world.client.failure = BrokerUnavailable("no answer")
    with pytest.raises(BrokerUnavailable):
        await world.accepted(made())
    assert [span.error for one in exporter.end.call_args_list for span in one.args[0]] == ["broker_unavailable"]


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
    [({}, "other", ModelNotFound), ({"models": ("other",)}, "m", Forbidden), ({"outstanding": 0}, None, TenantLimit)],
)
async def test_a_request_beyond_the_limits_is_refused(topics: KnownTopics, limits: Any, model: Any, error: Any) -> None:
    with pytest.raises(error):
        await World(topics, **limits).accepted(made(model=model))


async def test_a_priority_that_nobody_named_is_raised_to_the_limit(topics: KnownTopics) -> None:
    """It is no part of the content: an order may come between two tries."""
    world = World(topics, max_priority=9)
    with pytest.raises(Forbidden):
        await world.accepted(made())
    assert (await world.accepted(made(), names_priority=False)).request.priority == 9
    world.allowances.order("team", {"max_priority": 0})
    assert (await world.accepted(made(), names_priority=False)).request.priority == 5
    assert (await world.accepted(made("r2", priority=7), names_priority=False)).request.priority == 7
    assert world.client.sent == ["r1", "r2"]


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


# -- what a bridge knows of requests that were sent


KEY = ("team", "r1")


def sent(at_ms: int = 1, *, on_topic: bool = True) -> Sent:
    return Sent(content="c", pool=None, at_ms=at_ms, on_topic=on_topic)


def test_a_claim_is_found_until_it_is_released_and_what_the_topic_has_for_longer() -> None:
    """The first record counts, in whichever order they are read: a worker that gets another pool's request publishes
    it there once more."""
    requests, claim = SentRequests(), sent(on_topic=False)
    for records, left in (((), None), ((7, 3, 9), sent(3))):
        requests.claim(KEY, claim)
        assert requests.find(KEY) is claim
        for at_ms in records:
            requests.on_record(KEY, sent(at_ms))
        requests.release(KEY, claim)
        assert requests.find(KEY) == left


def test_requests_are_forgotten_after_two_horizons() -> None:
    requests = SentRequests()
    requests.on_record(KEY, sent(10))
    requests.claim(("team", "r2"), sent(10 + KNOWN_MS))
    assert requests.find(KEY) is not None
    requests.claim(("team", "r3"), sent(11 + KNOWN_MS))
    assert requests.find(KEY) is None
    assert len(requests) == 2


def test_request_topics_are_told_with_their_pools() -> None:
    names = TopicNames("p-")
    others = [names.result, names.control, "inference.request.low", "p-inference.image.requests"]
    found = pools_of(names, dict.fromkeys([*names.request_topics(), *names.request_topics("a.b"), *others], 4))
    assert found == {**dict.fromkeys(names.request_topics()), **dict.fromkeys(names.request_topics("a.b"), "a.b")}


# -- from records


@pytest.fixture
async def pooled(monkeypatch: pytest.MonkeyPatch) -> KnownTopics:
    found = await KnownTopics(monkeypatch).start(model_info(pool="big", updated_at=SENT_MS))
    found.known.look_again()
    await found.known.up_to_date()
    return found


async def test_a_request_that_a_bridge_sent_is_found_with_its_content_and_pool(pooled: KnownTopics) -> None:
    pooled.read(made("r2"), by_bridge=False)
    assert len(pooled.known.sent) == 0
    pooled.read(made(pool="big"))
    assert pooled.known.sent.find(KEY) == Sent(content=content_of(made()), pool="big", at_ms=77)
    assert content_of(made()) == content_of(made(pool="big")) != content_of(made(payload={"prompt": "another"}))


async def test_an_undecodable_record_does_not_end_the_reading(pooled: KnownTopics) -> None:
    headers = (("ce_id", b"\xff"), ("penstock-content", b"\xff"))
    for topic in (NAMES.request("text_generation", 8), NAMES.model):
        pooled.reader.read([RawMessage(topic, 0, 0, 1, b"k", b"\x00odd", headers)])
    assert pooled.known.routed(made(model="m")).pool == "big"


@pytest.mark.parametrize(
    ("fields", "pool"), [({"model": "m"}, "big"), ({"model": "m", "pool": "other"}, "other"), ({"model": "none"}, None)]
)
async def test_a_request_goes_to_the_pool_of_its_model(pooled: KnownTopics, fields: Any, pool: str | None) -> None:
    assert pooled.known.routed(made(**fields)).pool == pool


async def test_a_turn_goes_to_the_pool_of_its_conversation_and_to_no_other(pooled: KnownTopics) -> None:
    turn = {"conversation_id": "c", "payload": {"messages": [{"role": "user", "content": "p"}]}}
    pooled.read(made(**turn, pool="big"), by_bridge=False)
    assert pooled.known.routed(made(**turn)).pool == "big"
    with pytest.raises(InvalidRequest, match="the conversation c is in the pool big"):
        pooled.known.routed(made(**turn, pool="small"))


# -- messages that another bridge had before


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


class Bridges:
    """`bridge()` is one life of a bridge. What was sent stands on the topics, so that the next one knows it."""

    def __init__(self, topics: KnownTopics, monkeypatch: pytest.MonkeyPatch) -> None:
        self.client, self.transport, self.now_s, self.known = FakeClient(), AsyncMock(), 0, topics.known
        monkeypatch.setattr(message_handler, "now_ms", lambda: self.now_s * 1000)
        monkeypatch.setattr(message_handler, "time", SimpleNamespace(time=lambda: self.now_s))

    def bridge(self, **limits: Any) -> MessageHandler:
        allowances = Allowances(by_tenant={"team": Limits(**limits)})
        requests = requests_of(self.client, self.known, allowances)
        return MessageHandler(requests, self.transport, cast("StoreReads", None), KafkaSettings(), CODEC)

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
        given = [json.loads(one.args[1]) for one in self.transport.produce.call_args_list]
        return [one.get("error") or one["payload"]["choices"][0]["message"]["content"] for one in given]


def message(**fields: Any) -> Read:
    body = {"messages": [{"role": "user", "content": "the capital of France?"}], **fields}
    return read({"id": "one", "deadline": str(DEADLINE_S), "payload": body})


def own(**fields: Any) -> Read:
    return read({"request_id": "one", "task": "text_generation", "payload": {"prompt": "p"}, **fields})


def read(value: dict[str, Any]) -> Read:
    return Read(("jobs", 0), 7, None, json.dumps(value).encode(), 1)


@pytest.fixture
async def bridges(monkeypatch: pytest.MonkeyPatch) -> Bridges:
    return Bridges(await KnownTopics(monkeypatch).start(MODEL), monkeypatch)


@pytest.mark.parametrize(
    ("outcomes", "lives"),
    [(ended(0), [[-1], [1]]), ({**ended(0, FAILED), **ended(1)}, [[-9, -1], [1, 9]])],
    ids=["the first try", "a later try"],
)
async def test_an_answer_in_time_is_repeated_after_the_deadline(bridges: Bridges, outcomes: Any, lives: Any) -> None:
    bridges.client.outcomes = outcomes
    for times_s in lives:
        assert await bridges.live([DEADLINE_S + one for one in times_s]) == "completed"
    assert bridges.texts == ["Paris", "Paris"]
    assert bridges.client.sent == list(outcomes)


async def test_a_message_that_was_not_sent_before_its_deadline_is_not_sent_after_it(bridges: Bridges) -> None:
    assert await bridges.live([DEADLINE_S + 1]) == "refused"
    bridges.client.outcomes = ended(0, FAILED)
    assert await bridges.live([DEADLINE_S - 1, DEADLINE_S + 1]) == "refused"
    assert bridges.client.sent == [request_id(0)]
    assert bridges.texts == ["deadline exceeded", "deadline exceeded"]


@pytest.mark.parametrize(
    ("form", "read", "refused"),
    [
        ("llm-d", message(), False),
        ("llm-d", message(service_tier="auto"), False),
        ("llm-d", message(service_tier="default"), True),
        ("llm-d", message(penstock={"priority": 8}), True),
        ("llm-d", message(penstock={"priority": 9}), False),
        ("llm-d", message(penstock={"odd": 1}), True),
        ("llm-d", read({"id": "one"}), True),
        ("penstock", own(), False),
        ("penstock", own(priority=8), True),
    ],
)
async def test_what_is_refused_before_it_is_sent_is_logged_if_nobody_gets_an_answer(
    bridges: Bridges, form: Any, read: Read, refused: bool, caplog: pytest.LogCaptureFixture
) -> None:
    bridges.client.outcomes = ended(0)
    queue = QueueSection(topic="jobs", tenant="team", format=form)
    outcome = await bridges.bridge(max_priority=9).run(queue, read, 0)
    logged = [line for line in caplog.messages if line.startswith("queues.refused topic=jobs id=one code=")]
    assert (outcome, len(logged)) == (("refused", 1) if refused else ("completed", 0))
    assert len(bridges.client.sent) == (not refused)
    assert bridges.texts == []


async def test_limits_that_do_not_arrive_are_said_and_keep_a_bridge_from_nothing(topics: KnownTopics) -> None:
    """The broker of these tests has no topic of them."""
    reason = await wait_until_async(lambda: topics.known.lacks, 5)
    assert reason is not None
    assert "do not arrive" in reason
    assert NAMES.key in reason
    assert side_process.Status().by(reason) == "degraded"
    port = free_port()
    health = HealthServer("127.0.0.1", port, lambda: reason, CollectorRegistry())
    health.start()
    async with httpx.AsyncClient() as http:
        answer = await http.get(f"http://127.0.0.1:{port}/readyz")
    assert (answer.status_code, answer.json()) == (200, {"status": "degraded", "reason": reason})
    await health.stop()
    await topics.known.stop()
