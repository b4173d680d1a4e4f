"""Submissions: checked once, and one request however often it is sent while no acknowledgement arrives."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway_parts import service_with
from kit.gateway_http import call
from kit.records import model_info, request
from kit.refusals import refused
from kit.submitting import SubmitterParts
from penstock.common.artifacts import ArtifactStore, StorePlace
from penstock.common.configuration import ArtifactsSection, StoreSection
from penstock.common.outgoing import Outgoing
from penstock.common.transport import Delivery
from penstock.gateway.app import create_app
from penstock.gateway.context import context_of_app
from penstock.gateway.limits.allowances import Allowances, Totals
from penstock.gateway.limits.callers import ANYBODY, Caller
from penstock.gateway.limits.limits import Limits
from penstock.gateway.producing import ServiceTransport
from penstock.gateway.service import unconfirmed
from penstock.gateway.service.submitting import Accepted, Checked, Submitter
from penstock.gateway.service.subscriptions import Stopping
from penstock.gateway.service.unconfirmed import Unconfirmed
from penstock.gateway.settings import GatewaySettings
from penstock.gateway.view.claims import CLAIM_MS, Claims
from penstock.gateway.view.fleet import KnownModels
from penstock.processors.outputs import Outputs
from penstock.schemas.codec import default_codec
from penstock.schemas.errors import (
    BadAvro,
    BrokerUnavailable,
    Forbidden,
    Gone,
    IdempotencyKeyReused,
    InvalidRequest,
    ModelNotFound,
    NotFound,
    Overloaded,
    PenstockError,
    StoreUnavailable,
    TenantLimit,
    TooLarge,
    Unauthenticated,
)
from penstock.schemas.ids import idempotent_request_id
from penstock.schemas.records import InferenceRequest, KeyClaim, OutputSpec
from penstock.schemas.requests import content_hash, parse_request
from penstock.schemas.topics import CLASSES, TopicNames

FULL = "the view cannot be written (database or disk is full)"
OTHER = Caller(tenant="other")


def key_with(**limits: Any) -> Caller:
    return Caller(limits=Limits(**limits), key_id="k")


def asked(prompt: str = "hi", **fields: Any) -> InferenceRequest:
    body = {"task": "text_generation", "payload": {"prompt": prompt}, **fields}
    return parse_request(body, now_ms=1)


async def never(*_: Any, **__: Any) -> Any:
    await asyncio.Event().wait()


class Gateway(SubmitterParts):
    """A broker that may be away, and the model "large" in the pool b."""

    def __init__(self, allowances: Allowances | None = None) -> None:
        super().__init__(allowances)
        self.away = self.missing = False
        self.full: str | None = None
        self.refused: set[str] = set()
        self.written: list[str] = []
        self.waits: Counter[tuple[str, str]] = Counter()
        self.expected: list[bool] = []
        """For each record that was sent: whether its stream was followed."""

    async def produce(self, topic: str, value: bytes, **options: Any) -> Delivery:
        request = default_codec().decode(value, InferenceRequest)
        if request.request_id in self.refused:
            raise TooLarge("the record is too large")
        if self.missing:
            raise NotFound(f"the topic {topic} does not exist")
        self.written.append(request.request_id)
        self.expected.append(request.request_id.encode() in self.streams.followed)
        if self.away:
            raise BrokerUnavailable("no acknowledgement came")
        return Delivery(topic=topic, partition=0, offset=len(self.written), timestamp_ms=5)

    async def produce_all(self, records: Sequence[Outgoing]) -> list[Delivery]:
        deliveries: list[Delivery] = []
        for one in records:
            try:
                deliveries.append(await self.produce(one.topic, one.value))
            except PenstockError as error:
                deliveries.append(Delivery(topic=one.topic, partition=-1, offset=-1, timestamp_ms=-1, error=error))
                break
        return deliveries

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

    def known_models(self) -> KnownModels:
        return KnownModels([model_info("large", engine="noop", pool="b", aliases=["big"])])

    async def unacknowledged(self, **options: Any) -> InferenceRequest:
        """One that was submitted while the broker was away. It is back now."""
        self.away, request = True, asked()
        with pytest.raises(BrokerUnavailable) as refused:
            await self.submit(request, **options)
        self.away, self.refusal = False, refused.value
        return request

    async def submit(self, request: InferenceRequest, caller: Caller = ANYBODY, **options: Any) -> Any:
        return await self.submitter.submit(await self.check(request, caller), **options)

    async def check(self, request: InferenceRequest, caller: Caller = ANYBODY) -> Any:
        return await self.submitter.check(caller, request)


@pytest.fixture
def gateway() -> Gateway:
    return Gateway()


@pytest.fixture
def small() -> Gateway:
    """A tenant may have two requests."""
    return Gateway(Allowances(defaults=Limits(outstanding=2)))


async def test_the_request_that_was_checked_is_submitted(gateway: Gateway) -> None:
    checked = await gateway.check(asked(model="big"))
    assert (checked.request.pool, checked.model) == ("b", "large")
    gateway.submitter.check_room(checked)
    assert gateway.written == []
    accepted = await gateway.submitter.submit(checked)
    assert gateway.written == [accepted.request_id]


@pytest.mark.parametrize(
    ("caller", "fields", "error"),
    [
        (ANYBODY, {"model": "none", "pool": "b"}, ModelNotFound),
        (key_with(models=("large",)), {"model": "big"}, None),
        (key_with(models=("small",)), {"model": "big"}, Forbidden),
        (key_with(pools=("a",)), {"pool": "b"}, Forbidden),
        (key_with(pools=("a",)), {"pool": "none"}, Forbidden),
    ],
    ids=["no such model", "an alias of the key's model", "another model", "another pool", "no such pool"],
)
async def test_what_a_key_may_ask_for(gateway: Gateway, caller: Caller, fields: Any, error: Any) -> None:
    with refused(error):
        await gateway.check(asked(**fields), caller)


async def test_a_repeat_of_an_unacknowledged_request_is_the_same_request(gateway: Gateway) -> None:
    first = await gateway.unacknowledged()
    assert gateway.refusal.details == {"request_id": first.request_id}
    assert "stays one request" in gateway.refusal.message
    for _ in range(2):
        await gateway.unacknowledged()
    for other in (asked("ho"), asked(priority=0), replace(asked(), tenant="other")):
        assert (await gateway.submit(other, Caller(tenant=other.tenant))).request_id == other.request_id
    gateway.full = FULL
    with pytest.raises(Overloaded):
        await gateway.submit(asked())
    gateway.full = None
    accepted = await gateway.submit(asked())
    assert (accepted.request_id, accepted.replayed) == (first.request_id, True)
    assert gateway.written.count(first.request_id) == len(gateway.written) - 3
    assert (await gateway.submit(asked())).request_id != first.request_id, "that one is another"


@pytest.mark.parametrize(
    ("status_name", "done", "erased", "same"),
    [
        ("queued", False, False, True),
        ("completed", True, False, True),
        ("cancelled", True, False, False),
        ("expired", True, False, False),
        ("completed", True, True, False),
    ],
)
async def test_a_repeat_of_a_request_that_arrived(
    gateway: Gateway, status_name: str, done: bool, erased: bool, same: bool
) -> None:
    """It is not written again. A cancelled or erased one is another: the error names the request, so its caller may
    have cancelled it."""
    first = await gateway.unacknowledged()
    gateway.accepted(first, None)  # its record came back on the topic
    vars(gateway.find(("default", first.request_id))).update(done=done, status_name=status_name, erased=erased)
    gateway.away = same
    assert ((await gateway.submit(asked())).request_id == first.request_id) is same
    assert len(gateway.written) == (1 if same else 2)


async def test_requests_that_are_submitted_together_are_refused_one_by_one(small: Gateway) -> None:
    checked = [await small.check(asked()) for _ in range(3)]
    refusals = await small.submitter.submit_together(checked)
    assert [type(error) for error in refusals] == [type(None), type(None), TenantLimit]
    assert small.written == [one.request.request_id for one in checked[:2]]
    assert {one for _, one in small.requests} == set(small.written)
    assert await small.submitter.submit_together(checked[2:]) == [None], "requests count when they are in the log"
    # A missing topic will be created.
    for fault, value, error in (("full", FULL, Overloaded), ("away", True, BrokerUnavailable),
                                ("missing", True, BrokerUnavailable)):  # fmt: skip
        setattr(small, fault, value)
        assert [type(one) for one in await small.submitter.submit_together(checked[:1])] == [error]
        setattr(small, fault, None)
    assert len(small.requests) == 3


async def test_a_record_that_cannot_be_made_takes_no_room_from_later_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_GATEWAY__MAX_PENDING_SUBMITS", "3")
    gateway = Gateway()
    good, *others = [await gateway.check(asked(f"{number}")) for number in range(5)]
    bad = replace(good, request=replace(good.request, metadata={"note": "\ud800"}))
    for _ in range(3):
        with pytest.raises(BadAvro):
            await gateway.submitter.submit_together([good, bad])
    monkeypatch.setattr(gateway, "produce", never)
    waiting: list[asyncio.Task[Any]] = []
    for one in others[:3]:
        gateway.submitter.check_room(one)
        waiting.append(asyncio.create_task(gateway.submitter.submit(one)))
        await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="limit 3"):
        gateway.submitter.check_room(others[3])
    for task in waiting:
        task.cancel()


@pytest.mark.parametrize("refused", [{0}, {1}, {0, 1}, {0, 2}, {3}, {0, 1, 2, 3}])
async def test_a_record_that_is_refused_does_not_hold_back_the_others(gateway: Gateway, refused: set[int]) -> None:
    checked = [await gateway.check(asked()) for _ in range(4)]
    ids = [one.request.request_id for one in checked]
    gateway.refused = {ids[at] for at in refused}
    found = await gateway.submitter.submit_together(checked)
    assert [at for at, error in enumerate(found) if isinstance(error, TooLarge)] == sorted(refused)
    assert gateway.written == [one for at, one in enumerate(ids) if at not in refused]


async def test_the_parts_of_a_call_are_sent_together_or_not_at_all(small: Gateway) -> None:
    parts = [(await small.check(asked(f"{number}")), None) for number in range(3)]
    with pytest.raises(TenantLimit):
        await small.submitter.submit_parts(parts, idempotency_key=None, traceparent=None)
    assert small.written == []
    for _ in range(2):  # sent again under the same key, each part is the same request
        accepted = await small.submitter.submit_parts(parts[:2], idempotency_key="k", traceparent=None)
    assert [one.replayed for one in accepted if isinstance(one, Accepted)] == [True, True]
    assert small.written == [idempotent_request_id("default", key) for key in ("k", "k#1")]
    small.away = True
    failed = await small.submitter.submit_parts(parts[2:], idempotency_key=None, traceparent=None)
    assert isinstance(failed[0], BrokerUnavailable)


async def test_a_stream_is_followed_before_its_request_is_sent(gateway: Gateway) -> None:
    accepted = await gateway.submit(asked(stream=True))
    await gateway.submit(asked())
    assert gateway.expected == [True, False]
    assert set(gateway.streams.followed) == {accepted.request_id.encode()}
    gateway.away = True
    with pytest.raises(BrokerUnavailable):
        await gateway.submit(asked(stream=True))
    assert set(gateway.streams.followed) == {accepted.request_id.encode()}, "the other has no reader"


async def test_the_id_is_reported_before_the_record_is_sent(gateway: Gateway) -> None:
    reported: list[tuple[str, int]] = []

    def on_id(request_id: str) -> None:
        reported.append((request_id, len(gateway.written)))

    first = await gateway.unacknowledged(on_id=on_id)
    await gateway.submit(asked(), on_id=on_id)
    assert reported == [(first.request_id, 0), (first.request_id, 1)]


async def test_a_gateway_that_cannot_keep_requests_accepts_none(gateway: Gateway) -> None:
    gateway.full = FULL
    with pytest.raises(Overloaded, match="disk is full") as refused:
        await gateway.submit(asked(), keep=never)
    assert refused.value.retry_after_s
    with pytest.raises(Overloaded):
        gateway.submitter.check_room(await gateway.check(asked()))
    assert gateway.written == []


@pytest.mark.parametrize("klass", CLASSES)
async def test_each_class_and_tenant_keeps_room_when_others_fill_the_gateway(klass: str) -> None:
    gateway = Gateway(Allowances(totals=Totals(max_live=200_000, reserve=0.25)))
    gateway.held_live_count = gateway.allowances.tenants.of("default").outstanding = 300_000
    own = asked(priority={"high": 0, "medium": 5, "low": 9}[klass])
    theirs = replace(own, tenant="other")
    await gateway.submit(own)
    gateway.waits[klass, "default"] = 12_499
    await gateway.submit(own)
    gateway.waits[klass, "default"] = 12_500
    with pytest.raises((TenantLimit, Overloaded)):
        await gateway.submit(own)
    await gateway.submit(theirs, OTHER)
    gateway.waits[klass, "third"] = 12_500
    with pytest.raises(Overloaded, match=klass):
        await gateway.submit(theirs, OTHER)
    gateway.held_live_count = 199_999
    await gateway.submit(theirs, OTHER)


@pytest.mark.parametrize("at_once", [True, False], ids=["by the client", "by the broker"])
@pytest.mark.parametrize(
    "error", [NotFound("the topic does not exist"), Forbidden("needs WRITE")], ids=lambda e: e.code
)
async def test_a_request_that_was_certainly_not_sent_is_refused_without_its_id(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, error: PenstockError, at_once: bool
) -> None:
    said = Delivery(topic="t", partition=-1, offset=-1, timestamp_ms=-1, error=error)
    refusing = Mock(**{"send.side_effect": error if at_once else lambda *_, on_delivery, **__: on_delivery(said)})
    monkeypatch.setattr(gateway, "produce", ServiceTransport(refusing, asyncio.get_running_loop()).produce)
    with pytest.raises(BrokerUnavailable) as refused:
        await gateway.submit(asked())
    assert "may be accepted" not in refused.value.message
    assert refused.value.details is None
    monkeypatch.undo()
    again = asked()
    assert (await gateway.submit(again)).request_id == again.request_id


STEPS = st.tuples(
    st.sampled_from("ab"), st.sampled_from("xy"), st.sampled_from([None, "1", "2", "3"]), st.integers(0, 400)
)


@given(steps=st.lists(STEPS, max_size=60))
def test_each_id_is_given_once_the_oldest_first(steps: list[tuple[str, str, str | None, int]]) -> None:
    now = [0.0]
    kept, model = Unconfirmed(lambda: now[0]), list[tuple[str, str, str, float]]()
    for number, (caller, content, added, later_s) in enumerate(steps):
        now[0] += later_s
        if added is not None:
            kept_s = (100.0, 5_000.0)[number % 2]
            kept.add(caller, content, added, kept_s)
            model = [one for one in model if (one[0], one[2]) != (caller, added)]
            model.append((caller, content, added, now[0] + min(kept_s, unconfirmed.KEPT_S)))
            continue
        found = next((one for one in model if one[:2] == (caller, content) and one[3] >= now[0]), None)
        assert kept.take(caller, content) == (None if found is None else found[2])
        if found is not None:
            model.remove(found)
    now[0] += unconfirmed.KEPT_S + 1
    assert not kept


def test_unconfirmed_ids_are_bounded_by_caller() -> None:
    kept = Unconfirmed()
    kept.add("other", "0", "mine")
    for number in range(unconfirmed.MOST + 1):
        kept.add("flood", str(number), str(number))
    assert kept.take("flood", "0") is None
    assert kept.take("flood", "1") == "1"
    assert kept.take("other", "0") == "mine"


@pytest.mark.parametrize("key", [None, "k"])
async def test_images_are_kept_under_the_id_of_the_record(gateway: Gateway, key: str | None) -> None:
    kept: list[tuple[str, list[str]]] = []

    async def keep(request_id: str) -> None:
        kept.append((request_id, [*gateway.written]))

    await gateway.unacknowledged(idempotency_key=key, keep=keep)
    for _ in range(2 if key else 1):
        accepted = await gateway.submit(asked(), idempotency_key=key, keep=keep)
    assert kept == [(accepted.request_id, []), (accepted.request_id, [accepted.request_id])], "a repeat keeps nothing"


async def test_a_store_that_hangs_delays_only_requests_with_images(gateway: Gateway) -> None:
    many = GatewaySettings().gateway.max_pending_submits + 1
    slow = [asyncio.create_task(gateway.submit(asked(), keep=never)) for _ in range(many)]
    await asyncio.sleep(0)
    assert gateway.find(("default", (await gateway.submit(asked())).request_id))
    for one in slow:
        one.cancel()
    await asyncio.gather(*slow, return_exceptions=True)
    assert len(gateway.written) == 1


@pytest.mark.parametrize("key", [None, "k"])
@pytest.mark.parametrize("failure", [StoreUnavailable("it is away"), None], ids=["store away", "key revoked meanwhile"])
async def test_a_request_whose_images_cannot_be_kept_is_not_sent(failure: StoreUnavailable | None, key: Any) -> None:
    revoked: list[bool] = []

    def renew(caller: Caller) -> Caller:
        if revoked:
            raise Unauthenticated("this key was revoked")
        return caller

    async def keep(request_id: str) -> None:
        revoked.append(True)
        if failure is not None:
            raise failure

    gateway = Gateway(Allowances(renew=renew))
    with pytest.raises(Unauthenticated if failure is None else StoreUnavailable):
        await gateway.submit(asked(), idempotency_key=key, keep=keep)
    assert gateway.written == []


class TwoBodies(Gateway):
    """Another gateway's claim of the key `claimed` comes first, with `first` as what it asks for."""

    def __init__(self, first: InferenceRequest, claimed: str = "k", *, reads: bool = True) -> None:
        super().__init__()
        self._first, self._reads = first, reads
        self._claimed = idempotent_request_id("default", claimed)

    def known_topic(self, topic: str) -> bool:
        return True

    async def produce(self, topic: str, value: bytes, **options: Any) -> Delivery:
        if topic != TopicNames().idempotency:
            return await super().produce(topic, value, **options)
        claim = default_codec().decode(value, KeyClaim)
        if claim.request_id == self._claimed:
            self.claims.take(replace(claim, content=content_hash(self._first)), 1)
        self.claims.take(claim, 2)
        return Delivery(topic=topic, partition=0, offset=1, timestamp_ms=2)

    async def reached(self, ends: Any, deadline_s: float) -> bool:
        return self._reads


async def test_a_claim_that_was_not_read_sends_nothing() -> None:
    gateway = TwoBodies(asked(), reads=False)
    with pytest.raises(BrokerUnavailable):
        await gateway.submit(asked(), idempotency_key="k")
    assert gateway.written == []


@pytest.mark.parametrize("claimed", ["k", "parts\nk"])
async def test_a_call_of_several_requests_is_refused_as_a_whole(claimed: str) -> None:
    gateway = TwoBodies(asked("first"), claimed)
    parts = [(await gateway.check(asked(text)), None) for text in ("second", "first", "first")]
    with pytest.raises(IdempotencyKeyReused):
        await gateway.submitter.submit_parts(parts, idempotency_key="k", traceparent=None)
    assert gateway.written == []


# -- claims of Idempotency-Keys


KEY = ("t", "r")


def claim(content: str, request_id: str = "r") -> KeyClaim:
    return KeyClaim(request_id=request_id, tenant="t", content=content, created_at=1)


def test_the_first_claim_counts_for_an_hour() -> None:
    claims = Claims()
    assert claims.content(KEY) is None
    claims.take(claim("a"), 10)
    claims.take(claim("b"), 11)
    claims.take(claim("b"), 10 + CLAIM_MS - 1)
    assert claims.content(KEY) == "a"
    claims.take(claim("c"), 10 + CLAIM_MS)
    claims.take(claim("b"), 11 + CLAIM_MS)
    assert claims.content(KEY) == "c", "its age is that of the first in the log"


def test_a_claim_is_forgotten_with_its_request_its_age_and_for_want_of_room() -> None:
    claims = Claims(most=2)
    claims.take(claim("a"), 1)
    claims.settle(KEY)
    claims.settle(KEY)
    assert claims.content(KEY) is None
    for number in range(3):
        claims.take(claim("a", f"{number}"), 1)
    assert [claims.content(("t", f"{number}")) for number in range(3)] == [None, "a", "a"]
    claims.take(claim("a"), 2 * CLAIM_MS + 1)
    assert claims.content(("t", "2")) is None
    assert claims.content(KEY) == "a"


# -- `output {store, prefix}` of a request


WRONG = [
    (OutputSpec(store="warm"), "output.store"),
    (OutputSpec(store="cold", prefix="../globex"), "output.prefix"),
    (OutputSpec(prefix="/etc"), "output.prefix"),
]


@pytest.mark.parametrize(("output", "param"), WRONG)
async def test_the_gateway_refuses_it_before_anything_else(output: OutputSpec, param: str, tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path, stores={"cold": StorePlace(location=str(tmp_path / "cold"), options={})})
    nothing: Any = None
    submitter = Submitter(GatewaySettings(), nothing, nothing, nothing, nothing, nothing, nothing, store.check_place)
    with refused(InvalidRequest, param=param):
        await submitter.check(ANYBODY, request(task="image_generation", output=output))


@pytest.mark.parametrize(("output", "param"), WRONG)
def test_a_worker_refuses_it_without_opening_a_store(output: OutputSpec, param: str, tmp_path: Path) -> None:
    section = ArtifactsSection(stores={"cold": StoreSection(location=str(tmp_path / "cold"))})
    outputs = Outputs(tmp_path / "artifacts", section)
    with refused(InvalidRequest, param=param):
        outputs.check(output)
    outputs.check(OutputSpec(store="cold", prefix="renders/2026"))
    outputs.check(None)
    assert not list(tmp_path.iterdir())


# -- `POST /v1/requests?wait=…`: an accepted request is never an error


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

    def beside(self, entry: Any) -> dict[str, Any]:
        return {}

    async def public(self, entry: Any, beside: Any) -> bytes:
        return b'{"request_id":"r1","done":%s}' % (b"true" if entry.done else b"false")


async def submitted(parts: Parts, query: str) -> httpx.Response:
    app = create_app(GatewaySettings())
    context_of_app(app).connected = service_with(parts)
    return await call(app, "POST", f"/v1/requests{query}", json=BODY)


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
