"""Submissions: checked once for whoever asks, and one request however often it is sent while nobody acknowledges it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.common.outgoing import Outgoing
from penstock.common.transport import Delivery
from penstock.gateway.limits.allowances import Allowances, Totals
from penstock.gateway.limits.callers import ANYBODY, Caller
from penstock.gateway.limits.limits import Limits
from penstock.gateway.service import unconfirmed
from penstock.gateway.service.submitting import Accepted, Submitter
from penstock.gateway.service.unconfirmed import Unconfirmed
from penstock.gateway.settings import GatewaySettings
from penstock.gateway.view.hub import Hub
from penstock.gateway.view.streams import Streams
from penstock.schemas.codec import default_codec
from penstock.schemas.errors import (
    BrokerUnavailable,
    Forbidden,
    ModelNotFound,
    NotFound,
    Overloaded,
    PenstockError,
    StoreUnavailable,
    TenantLimit,
)
from penstock.schemas.ids import idempotent_request_id
from penstock.schemas.records import InferenceRequest, ModelInfo
from penstock.schemas.requests import parse_request
from penstock.schemas.topics import CLASSES

POOLED = ModelInfo(
    model="large",
    tasks=["text_generation"],
    engine="noop",
    state="ready",
    updated_at=1,
    worker_id="w",
    pool="b",
    aliases=["big"],
)


def asked(prompt: str = "hi", **fields: Any) -> InferenceRequest:
    body = {"task": "text_generation", "payload": {"prompt": prompt}, **fields}
    return parse_request(body, now_ms=1)


MANY = GatewaySettings().gateway.max_pending_submits + 1
LIVE = SimpleNamespace(erased=False, done=False, status_name="queued", content="")


class Gateway:
    """All that a submitter asks: a broker that may be away, and a model in the pool b."""

    def __init__(self, allowances: Allowances | None = None) -> None:
        self.away = self.missing = False
        self.full: str | None = None
        self.written: list[str] = []
        self.requests: set[str] = set()
        self.ended: dict[str, Any] = {}
        self.held_live_count = 0
        self.known = self
        self.waits: Counter[tuple[str, str]] = Counter()
        self.census = self
        self.streams = Streams(Hub())
        self.expected: list[bool] = []
        """Of each record that was sent: whether its pieces would have been told."""
        this: Any = self
        self.submitter = Submitter(
            GatewaySettings(),
            this,
            this,
            this,
            default_codec(),
            allowances or Allowances(),
            self,
            lambda store, prefix: None,
        )

    async def produce(self, topic: str, value: bytes, **options: Any) -> Delivery:
        request = default_codec().decode(value, InferenceRequest)
        if self.missing:
            raise NotFound(f"the topic {topic} does not exist")
        self.written.append(request.request_id)
        self.expected.append(request.request_id.encode() in self.streams.followed)
        if self.away:
            raise BrokerUnavailable("no acknowledgement came")
        return Delivery(topic=topic, partition=0, offset=len(self.written), timestamp_ms=5)

    async def produce_all(self, records: Sequence[Outgoing]) -> list[Delivery]:
        told: list[Delivery] = []
        for one in records:
            try:
                told.append(await self.produce(one.topic, one.value))
            except PenstockError as error:
                told.append(Delivery(topic=one.topic, partition=-1, offset=-1, timestamp_ms=-1, error=error))
        return told

    def accepted(self, request: InferenceRequest, origin: Any) -> None:
        self.requests.add(request.request_id)

    def find(self, key: tuple[str, str]) -> Any:
        return self.ended.get(key[1], LIVE) if key[1] in self.requests else None

    async def catch_up(self) -> None:
        pass

    def cannot_keep(self) -> str | None:
        return self.full

    def live(self, klass: str, tenant: str | None = None) -> int:
        return sum(count for (one, of), count in self.waits.items() if one == klass and tenant in (None, of))

    def known_topic(self, topic: str) -> bool:
        return "b" in topic.split(".")

    async def add_topic_now(self, topic: str) -> bool:
        return False

    def routed(self, request: InferenceRequest) -> InferenceRequest:
        return replace(request, pool="b") if request.pool is None and request.model in ("large", "big") else request

    def models(self) -> list[ModelInfo]:
        return [POOLED]

    async def unacknowledged(self) -> InferenceRequest:
        """One that was submitted while the broker was away, as it is still."""
        self.away, request = True, asked()
        with pytest.raises(BrokerUnavailable):
            await self.submit(request)
        return request

    async def submit(self, request: InferenceRequest, caller: Caller = ANYBODY, **options: Any) -> Any:
        return await self.submitter.submit(await self.submitter.check(caller, request), **options)


async def test_what_is_checked_is_what_is_submitted() -> None:
    """A dry run, and a request that brought images, refused a model of a pool that the submission accepts."""
    gateway = Gateway()
    checked = await gateway.submitter.check(ANYBODY, asked(model="big"))
    assert (checked.request.pool, checked.model) == ("b", "large")
    gateway.submitter.check_room(checked)
    assert gateway.written == []
    accepted = await gateway.submitter.submit(checked)
    assert gateway.written == [accepted.request_id]
    with pytest.raises(ModelNotFound):
        await gateway.submitter.check(ANYBODY, asked(model="none", pool="b"))


async def test_a_key_names_a_model_by_any_of_its_names() -> None:
    gateway = Gateway()
    await gateway.submitter.check(Caller(limits=Limits(models=("large",)), key_id="k"), asked(model="big"))
    with pytest.raises(Forbidden):
        await gateway.submitter.check(Caller(limits=Limits(models=("small",)), key_id="k"), asked(model="big"))


async def test_a_repeat_of_what_was_not_acknowledged_is_the_same_request() -> None:
    """A stock client tries a 503 again without any key: the first run had no reader, and the model worked twice."""
    gateway = Gateway()
    gateway.away = True
    first = asked()
    with pytest.raises(BrokerUnavailable, match="stays one request") as refused:
        await gateway.submit(first)
    assert refused.value.details == {"request_id": first.request_id}
    for _ in range(2):
        with pytest.raises(BrokerUnavailable):
            await gateway.submit(asked())
    gateway.away = False
    accepted = await gateway.submit(asked())
    assert (accepted.request_id, accepted.replayed) == (first.request_id, True)
    assert set(gateway.written) == {first.request_id}
    assert (await gateway.submit(asked())).request_id != first.request_id, "that one is another"


async def test_what_is_submitted_together_is_refused_one_by_one() -> None:
    gateway = Gateway(Allowances(defaults=Limits(outstanding=2)))
    checked = [await gateway.submitter.check(ANYBODY, asked()) for _ in range(3)]
    refusals = await gateway.submitter.submit_together(checked)
    assert [type(error) for error in refusals] == [type(None), type(None), TenantLimit]
    assert gateway.written == [one.request.request_id for one in checked[:2]]
    assert gateway.requests == set(gateway.written)
    assert await gateway.submitter.submit_together(checked[2:]) == [None], "the log counts what stands there"
    gateway.full = "the view cannot be written"
    assert [type(error) for error in await gateway.submitter.submit_together(checked[:1])] == [Overloaded]
    gateway.full, gateway.away = None, True
    (error,) = await gateway.submitter.submit_together(checked[:1])
    assert isinstance(error, BrokerUnavailable)
    gateway.away, gateway.missing = False, True
    (error,) = await gateway.submitter.submit_together(checked[:1])
    assert isinstance(error, BrokerUnavailable), "its topic will be there"
    assert len(gateway.requests) == 3


async def test_the_parts_of_a_call_are_sent_together_or_not_at_all() -> None:
    gateway = Gateway(Allowances(defaults=Limits(outstanding=2)))
    parts = [(await gateway.submitter.check(ANYBODY, asked(f"{number}")), None) for number in range(3)]
    with pytest.raises(TenantLimit):
        await gateway.submitter.submit_parts(parts, idempotency_key=None, traceparent=None)
    assert gateway.written == []
    for _ in range(2):  # sent again under the same key, each part is the same request
        accepted = await gateway.submitter.submit_parts(parts[:2], idempotency_key="k", traceparent=None)
    assert [one.replayed for one in accepted if isinstance(one, Accepted)] == [True, True]
    assert gateway.written == [idempotent_request_id("default", key) for key in ("k", "k#1")]
    gateway.away = True
    failed = await gateway.submitter.submit_parts(parts[2:], idempotency_key=None, traceparent=None)
    assert isinstance(failed[0], BrokerUnavailable)


async def test_pieces_of_a_stream_are_told_from_the_first_one_on() -> None:
    gateway = Gateway()
    accepted = await gateway.submit(asked(stream=True))
    await gateway.submit(asked())
    assert gateway.expected == [True, False]
    assert set(gateway.streams.followed) == {accepted.request_id.encode()}
    gateway.away = True
    with pytest.raises(BrokerUnavailable):
        await gateway.submit(asked(stream=True))
    assert set(gateway.streams.followed) == {accepted.request_id.encode()}, "nothing comes of the other"


async def test_a_repeat_of_what_arrived_all_the_same_is_not_written_again() -> None:
    gateway = Gateway()
    first = await gateway.unacknowledged()
    gateway.requests.add(first.request_id)  # its record came back on the topic
    assert (await gateway.submit(asked())).request_id == first.request_id
    assert len(gateway.written) == 1


async def test_a_repeat_that_is_refused_can_be_sent_again() -> None:
    """What was refused for want of room, as during an outage, lost the id: two requests once the broker was back."""
    gateway = Gateway()
    first = await gateway.unacknowledged()
    gateway.full = "the view cannot be written"
    with pytest.raises(Overloaded):
        await gateway.submit(asked())
    gateway.full, gateway.away = None, False
    assert (await gateway.submit(asked())).request_id == first.request_id


@pytest.mark.parametrize(
    ("ended", "taken"),
    [
        ({"done": True, "status_name": "completed"}, True),
        ({"done": True, "status_name": "cancelled"}, False),
        ({"done": True, "status_name": "expired"}, False),
        ({"done": True, "status_name": "completed", "erased": True}, False),
    ],
)
async def test_nobody_gets_an_end_that_was_not_meant_for_them(ended: dict[str, Any], taken: bool) -> None:
    """The error names the request: its caller cancelled it, and the same prompt ten minutes later was cancelled too."""
    gateway = Gateway()
    first = await gateway.unacknowledged()
    gateway.away = False
    gateway.requests.add(first.request_id)
    gateway.ended[first.request_id] = SimpleNamespace(**{"erased": False, **ended})
    assert ((await gateway.submit(asked())).request_id == first.request_id) is taken


async def test_the_id_is_told_before_the_record_is_sent() -> None:
    gateway = Gateway()
    told: list[tuple[str, int]] = []
    gateway.away = True
    first = asked()
    with pytest.raises(BrokerUnavailable):
        await gateway.submit(first, on_id=lambda one: told.append((one, len(gateway.written))))
    gateway.away = False
    await gateway.submit(asked(), on_id=lambda one: told.append((one, len(gateway.written))))
    assert told == [(first.request_id, 0), (first.request_id, 1)]


async def test_who_may_not_ask_learns_nothing_of_what_there_is() -> None:
    gateway = Gateway()
    narrow = Caller(limits=Limits(pools=("a",)), key_id="k")
    for pool in ("b", "none"):
        with pytest.raises(Forbidden):
            await gateway.submitter.check(narrow, asked(pool=pool))


async def test_nothing_begins_where_nothing_can_be_kept() -> None:
    """On a full disk a chat was accepted, and its stream hung; /readyz said 503 all the while."""
    gateway = Gateway()
    gateway.full = "the view cannot be written (database or disk is full)"
    with pytest.raises(Overloaded, match="disk is full") as refused:
        await gateway.submit(asked())
    assert refused.value.retry_after_s
    with pytest.raises(Overloaded):
        gateway.submitter.check_room(await gateway.submitter.check(ANYBODY, asked()))
    assert gateway.written == []


@pytest.mark.parametrize("klass", CLASSES)
async def test_each_class_and_tenant_keeps_room_when_others_fill_the_gateway(klass: str) -> None:
    """200,000 low requests, from Kafka directly too, kept every urgent chat out, of all tenants."""
    gateway = Gateway(Allowances(totals=Totals(max_live=200_000, reserve=0.25)))
    gateway.held_live_count = 300_000
    gateway.submitter._allowances.tenants.of("default").outstanding = 300_000  # pyright: ignore[reportPrivateUsage]
    own = asked(priority={"high": 0, "medium": 5, "low": 9}[klass])
    await gateway.submit(own)
    gateway.waits[klass, "default"] = 12_499
    await gateway.submit(own)
    gateway.waits[klass, "default"] = 12_500
    with pytest.raises((TenantLimit, Overloaded)):
        await gateway.submit(own)
    await gateway.submit(replace(own, tenant="other"), Caller(tenant="other"))
    gateway.waits[klass, "third"] = 12_500
    with pytest.raises(Overloaded, match=klass):
        await gateway.submit(replace(own, tenant="other"), Caller(tenant="other"))
    gateway.held_live_count = 199_999
    await gateway.submit(replace(own, tenant="other"), Caller(tenant="other"))


async def test_what_was_surely_not_sent_is_not_called_accepted_perhaps() -> None:
    gateway = Gateway()
    gateway.missing = True
    with pytest.raises(BrokerUnavailable) as refused:
        await gateway.submit(asked())
    assert "may be accepted" not in refused.value.message
    assert refused.value.details is None
    gateway.missing = False
    again = asked()
    assert (await gateway.submit(again)).request_id == again.request_id


async def test_only_the_same_request_of_the_same_tenant_is_a_repeat() -> None:
    gateway = Gateway()
    first = await gateway.unacknowledged()
    gateway.away = False
    others = [asked("ho"), asked(priority=0), replace(asked(), tenant="other")]
    for other in others:
        assert (await gateway.submit(other, Caller(tenant=other.tenant))).request_id == other.request_id
    assert (await gateway.submit(asked())).request_id == first.request_id


STEPS = st.tuples(st.sampled_from("ab"), st.sampled_from("xy"), st.booleans(), st.integers(0, 400))


@given(steps=st.lists(STEPS, max_size=60))
def test_each_id_is_given_once_the_oldest_first(steps: list[tuple[str, str, bool, int]]) -> None:
    now = [0.0]
    kept, model = Unconfirmed(lambda: now[0]), list[tuple[str, str, str, float]]()
    for number, (caller, content, adds, later_s) in enumerate(steps):
        now[0] += later_s
        if adds:
            kept_s = (100.0, 5_000.0)[number % 2]
            kept.add(caller, content, str(number), kept_s)
            model.append((caller, content, str(number), now[0] + min(kept_s, unconfirmed.KEPT_S)))
            continue
        found = next((one for one in model if one[:2] == (caller, content) and one[3] >= now[0]), None)
        assert kept.take(caller, content) == (None if found is None else found[2])
        if found is not None:
            model.remove(found)
    now[0] += unconfirmed.KEPT_S + 1
    assert not kept


def test_they_are_bounded_by_caller() -> None:
    """One caller that submits and leaves slowed every submission, and pushed out the ids of all others."""
    kept = Unconfirmed()
    kept.add("other", "0", "mine")
    for number in range(unconfirmed.MOST + 1):
        kept.add("flood", str(number), str(number))
    assert kept.take("flood", "0") is None
    assert kept.take("flood", "1") == "1"
    assert kept.take("other", "0") == "mine"


def test_what_failed_again_is_kept_anew() -> None:
    kept = Unconfirmed()
    kept.add("c", "x", "1")
    kept.add("c", "x", "2")
    kept.add("c", "x", "1")
    assert [kept.take("c", "x") for _ in range(3)] == ["2", "1", None]


@pytest.mark.parametrize("key", [None, "k"])
async def test_what_came_with_a_request_is_kept_under_the_id_of_its_record(key: str | None) -> None:
    gateway, kept = Gateway(), list[tuple[str, list[str]]]()

    async def keep(request_id: str) -> None:
        kept.append((request_id, [*gateway.written]))

    gateway.away = True
    with pytest.raises(BrokerUnavailable):
        await gateway.submit(asked(), idempotency_key=key, keep=keep)
    gateway.away = False
    for _ in range(2 if key else 1):
        accepted = await gateway.submit(asked(), idempotency_key=key, keep=keep)
    assert kept == [(accepted.request_id, []), (accepted.request_id, [accepted.request_id])], "a repeat brings nothing"


async def test_a_store_that_hangs_holds_up_nobody_who_brings_nothing() -> None:
    gateway = Gateway()
    slow = [asyncio.create_task(gateway.submit(asked(), keep=_never)) for _ in range(MANY)]
    await asyncio.sleep(0)
    assert (await gateway.submit(asked())).request_id in gateway.requests
    for one in slow:
        one.cancel()
    await asyncio.gather(*slow, return_exceptions=True)
    assert len(gateway.written) == 1


async def _never(request_id: str) -> None:
    await asyncio.Event().wait()


async def test_a_request_whose_images_cannot_be_kept_is_not_sent() -> None:
    gateway = Gateway()

    async def keep(request_id: str) -> None:
        raise StoreUnavailable("the store is away")

    with pytest.raises(StoreUnavailable):
        await gateway.submit(asked(), keep=keep)
    gateway.full = "the disk is full"
    with pytest.raises(Overloaded):
        await gateway.submit(asked(), keep=_never)
    assert gateway.written == []
