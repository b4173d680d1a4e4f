"""Submissions: checked once for whoever asks, and one request however often it is sent while nobody acknowledges it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.common.transport import Delivery
from penstock.gateway.limits.allowances import Allowances, Totals
from penstock.gateway.limits.callers import ANYBODY, Caller
from penstock.gateway.limits.limits import Limits
from penstock.gateway.service import unconfirmed
from penstock.gateway.service.submitting import Submitter
from penstock.gateway.service.unconfirmed import Unconfirmed
from penstock.gateway.settings import GatewaySettings
from penstock.schemas.codec import default_codec
from penstock.schemas.errors import BrokerUnavailable, Forbidden, ModelNotFound, Overloaded, TenantLimit
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


class Gateway:
    """All that a submitter asks: a broker that may be away, and a model in the pool b."""

    def __init__(self, allowances: Allowances | None = None) -> None:
        self.away = False
        self.full: str | None = None
        self.written: list[str] = []
        self.known: set[str] = set()
        self.live_count = 0
        self.waits: Counter[tuple[str, str]] = Counter()
        self.census = self
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
        self.written.append(request.request_id)
        if self.away:
            raise BrokerUnavailable("no acknowledgement came")
        return Delivery(topic=topic, partition=0, offset=len(self.written), timestamp_ms=5)

    def accepted(self, request: InferenceRequest, origin: Any) -> None:
        self.known.add(request.request_id)

    def find(self, key: tuple[str, str]) -> Any:
        return SimpleNamespace() if key[1] in self.known else None

    def cannot_keep(self) -> str | None:
        return self.full

    def waiting(self, klass: str, tenant: str | None = None) -> int:
        return sum(count for (one, of), count in self.waits.items() if one == klass and tenant in (None, of))

    def known_topic(self, topic: str) -> bool:
        return "b" in topic.split(".")

    async def add_topic_now(self, topic: str) -> bool:
        return False

    def routed(self, request: InferenceRequest) -> InferenceRequest:
        return replace(request, pool="b") if request.pool is None and request.model in ("large", "big") else request

    def models(self) -> list[ModelInfo]:
        return [POOLED]

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


async def test_a_repeat_of_what_arrived_all_the_same_is_not_written_again() -> None:
    gateway = Gateway()
    gateway.away = True
    first = asked()
    with pytest.raises(BrokerUnavailable):
        await gateway.submit(first)
    gateway.known.add(first.request_id)  # its record came back on the topic
    assert (await gateway.submit(asked())).request_id == first.request_id
    assert len(gateway.written) == 1


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
    gateway.live_count = 300_000
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
    gateway.live_count = 199_999
    await gateway.submit(replace(own, tenant="other"), Caller(tenant="other"))


async def test_only_the_same_request_of_the_same_tenant_is_a_repeat() -> None:
    gateway = Gateway()
    gateway.away = True
    first = asked()
    with pytest.raises(BrokerUnavailable):
        await gateway.submit(first)
    gateway.away = False
    others = [asked("ho"), asked(priority=0), replace(asked(), tenant="other")]
    for other in others:
        assert (await gateway.submit(other, Caller(tenant=other.tenant))).request_id == other.request_id
    own = asked()
    assert (await gateway.submit(own, own_id=True)).request_id == own.request_id
    assert (await gateway.submit(asked())).request_id == first.request_id


@given(steps=st.lists(st.tuples(st.sampled_from("ab"), st.booleans(), st.integers(0, 400)), max_size=40))
def test_each_id_is_given_once_the_oldest_first(steps: list[tuple[str, bool, int]]) -> None:
    now = [0.0]
    kept, model = Unconfirmed(lambda: now[0]), list[tuple[str, str, float]]()
    for number, (content, adds, later_s) in enumerate(steps):
        now[0] += later_s
        model = [one for one in model if now[0] - one[2] <= unconfirmed.KEPT_S]
        if adds:
            kept.add("t", content, str(number))
            model.append((content, str(number), now[0]))
            continue
        found = next((one for one in model if one[0] == content), None)
        assert kept.take("t", content) == (None if found is None else found[1])
        if found is not None:
            model.remove(found)
        assert len(kept) == len(model)


def test_they_are_bounded() -> None:
    kept = Unconfirmed()
    for number in range(unconfirmed.MOST + 1):
        kept.add("t", str(number), str(number))
    assert len(kept) == unconfirmed.MOST
    assert kept.take("t", "0") is None
    assert kept.take("t", "1") == "1"
