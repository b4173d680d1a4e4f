"""Putting a request on its topic: whether it may, where it belongs, and a repeat of an Idempotency-Key found again."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeAlias

from penstock.common.clock import now_ms
from penstock.common.kafka_errors import may_be_written, unavailable
from penstock.common.outgoing import Outgoing, claim_record, request_record, valid_traceparent
from penstock.common.transport import AsyncTransport, Delivery, record_bytes, too_large
from penstock.gateway.callbacks import Callbacks
from penstock.gateway.limits.allowances import Allowances
from penstock.gateway.limits.callers import Caller
from penstock.gateway.service.models import check_abilities, model_or_refusal
from penstock.gateway.service.unconfirmed import Unconfirmed
from penstock.gateway.settings import GatewaySettings
from penstock.gateway.traces import Sending, batch_link, watched
from penstock.gateway.view.fleet import KnownModels
from penstock.gateway.view.follower import CATCH_UP_S, Follower
from penstock.gateway.view.view import View
from penstock.schemas.codec import Codec
from penstock.schemas.errors import (
    BrokerUnavailable,
    IdempotencyKeyReused,
    InvalidRequest,
    NotFound,
    Overloaded,
    PenstockError,
)
from penstock.schemas.errors import Gone as GoneError
from penstock.schemas.ids import idempotent_request_id
from penstock.schemas.lifetimes import deadline_of
from penstock.schemas.records import InferenceRequest, KeyClaim, Origin, Place
from penstock.schemas.requests import content_hash
from penstock.schemas.topics import TopicNames, priority_class

KEPT_FOR_A_CLASS, KEPT_FOR_A_TENANT = 1 / 8, 1 / 16
"""Parts of `gateway.max_live` that each class, and each tenant in it, may fill when others have filled all of it."""
SOURCE = "penstock-gateway"
"""`ce_source` of what a gateway writes."""

MAX_KEY_CHARS = 255


@dataclass(frozen=True, slots=True)
class Checked:
    """A request that a caller may submit, with its pool. `model`: the id of its model, if that is known."""

    caller: Caller
    request: InferenceRequest
    model: str | None


@dataclass(frozen=True, slots=True)
class Accepted:
    """A request that stands on its topic; `replayed` when it is an earlier one, sent again."""

    request_id: str
    replayed: bool = False


Keep: TypeAlias = Callable[[str], Awaitable[None]]
"""Stores what came with the request that has this id."""


class Models(Protocol):
    """What is asked of `Facts`."""

    def routed(self, request: InferenceRequest) -> InferenceRequest: ...
    def known_models(self) -> KnownModels: ...


class Submitter:
    """Accepts requests: what it returns from `submit` stands on its topic, acknowledged."""

    def __init__(
        self,
        settings: GatewaySettings,
        transport: AsyncTransport,
        view: View,
        follower: Follower,
        codec: Codec,
        allowances: Allowances,
        facts: Models,
        check_place: Callable[[str | None, str | None], None],
    ) -> None:
        """`check_place` refuses an `output {store, prefix}` that no process could follow."""
        self._limits = settings.gateway
        kafka = settings.kafka_settings()
        self._names: TopicNames = kafka.names
        self._max_record_bytes = kafka.max_record_bytes
        self._transport = transport
        self._view = view
        self._follower = follower
        self._codec = codec
        self._allowances = allowances
        self._facts = facts
        self._check_place = check_place
        self._callbacks = Callbacks(settings.webhooks)
        self._pending = 0
        self._same_key: dict[str, asyncio.Future[str]] = {}
        self._unconfirmed = Unconfirmed()

    async def check(self, caller: Caller, request: InferenceRequest) -> Checked:
        """Refuse what cannot be done or this caller may not ask for. Nothing is counted.

        Raises ModelNotFound, InvalidRequest (an unknown pool, another's conversation, a callback), Forbidden,
        TenantLimit, BrokerUnavailable, and what `check_abilities` raises.
        """
        caller.check_new(request)
        if request.output is not None:
            self._check_place(request.output.store, request.output.prefix)
        if request.callback_url is not None:
            self._callbacks.check(caller.tenant, request.callback_url)
        request = self._facts.routed(request)
        known = self._facts.known_models()
        model, missing = model_or_refusal(known.models, request)
        self._allowances.check(caller, request, model)
        await self._check_pool(request)
        if missing is not None:
            raise missing
        check_abilities(known, request)
        return Checked(caller, request, model)

    def check_room(self, checked: Checked) -> None:
        """Refuse what `submit` would refuse now for its size or for want of room.

        Raises TenantLimit, Overloaded, TooLarge.
        """
        with self._outstanding(checked):
            self._check_room(checked.request)
        self._check_size(self._record(checked, None))

    def _check_size(self, record: Outgoing) -> None:
        size_bytes = record_bytes(record.value, record.key, record.headers)
        if size_bytes > self._max_record_bytes:
            raise too_large(record.topic, size_bytes, self._max_record_bytes)

    async def submit(
        self,
        checked: Checked,
        *,
        idempotency_key: str | None = None,
        traceparent: str | None = None,
        on_id: Callable[[str], None] = lambda _: None,
        keep: Keep | None = None,
    ) -> Accepted:
        """Put a request on its topic and wait for the broker's word.

        `traceparent` is the caller's; one that is not well-formed, or none, begins a new trace. `on_id` gets the id
        before the record is sent. `keep` stores what came with the request, before the record is sent and only if it
        is sent; what it raises refuses the request.
        Raises Unauthenticated when the key was revoked meanwhile, TenantLimit, Overloaded, BrokerUnavailable, TooLarge,
        IdempotencyKeyReused.
        """
        with self._outstanding(checked):
            return await self._submit(checked, idempotency_key, traceparent, on_id, keep)

    async def _submit(
        self,
        checked: Checked,
        idempotency_key: str | None,
        traceparent: str | None,
        on_id: Callable[[str], None] = lambda _: None,
        keep: Keep | None = None,
    ) -> Accepted:
        if idempotency_key is not None:
            return await self._submit_once(checked, idempotency_key, traceparent, keep)
        return await self._submit_new(checked, traceparent, on_id, keep)

    async def has_key(self, tenant: str, idempotency_key: str) -> bool:
        """Whether a request with this key stands on its topic. Raises as `Follower.catch_up`."""
        key = (tenant, idempotent_request_id(tenant, idempotency_key))
        if self._view.find(key) is None:
            await self._follower.catch_up()
        return self._view.find(key) is not None

    async def submit_parts(
        self,
        parts: Sequence[tuple[Checked, Keep | None]],
        *,
        idempotency_key: str | None,
        traceparent: str | None,
    ) -> list[Accepted | BaseException]:
        """Submit the requests that one call consists of, each with what stores its inputs.

        Gives of each what `submit` gives or raises.

        None is sent where one of them has no room. Raises TenantLimit, Overloaded, TooLarge; with a key also what the
        first one raises.
        """
        with ExitStack() as outstanding:
            for checked, _ in parts:
                outstanding.enter_context(self._outstanding(checked))
                self._check_room(checked.request)
                self._check_size(self._record(checked, None))
            key = idempotency_key
            if key is not None:
                tenant, contents = parts[0][0].request.tenant, [content_hash(checked.request) for checked, _ in parts]
                await self.claim_key(tenant, "parts", key, contents)

            async def submitted(at: int) -> Accepted:
                checked, keep = parts[at]
                part_key = f"{key}#{at}" if key is not None and at else key
                return await self._submit(checked, part_key, traceparent, keep=keep)

            made: list[Accepted | BaseException] = []
            if key is not None:  # the first part decides whether the others are sent
                made = [await submitted(0)]
            rest = (submitted(at) for at in range(len(made), len(parts)))
            return made + await asyncio.gather(*rest, return_exceptions=True)

    async def submit_once(self, checked: Checked, traceparent: str | None) -> Accepted:
        """Put a request on its topic, unless one of its id stands there: the id follows from what it is made of.

        Raises as `submit`, and Gone when that one was erased.
        """
        with self._outstanding(checked):
            return await self._submit_as(checked, traceparent, None)

    async def submit_together(self, many: Sequence[Checked], batch_id: str | None = None) -> list[PenstockError | None]:
        """Submit requests that nobody has submitted, under the ids that they have; why each is refused, if it is.

        `batch_id` is the batch that they are lines of.

        Nothing is looked up. The record of one that is refused with BrokerUnavailable may stand on its topic.
        """
        refusals: list[PenstockError | None] = [None] * len(many)
        records: dict[int, Outgoing] = {}
        sendings: dict[int, Sending | None] = {}
        with ExitStack() as outstanding:
            deliveries: list[Delivery] = []
            try:
                for at, checked in enumerate(many):
                    try:
                        outstanding.enter_context(self._outstanding(checked))
                        self._check_room(checked.request)
                    except PenstockError as error:
                        refusals[at] = error
                        continue
                    links = () if batch_id is None else batch_link(checked.request.tenant, batch_id)
                    sending = sendings[at] = Sending.of(checked.request, self._names, None, links)
                    records[at] = self._record(checked, None if sending is None else sending.traceparent)
                    self._pending += 1
                with watched(*sendings.values()):  # a refused one does not hold back the others
                    while unsent := [*records.values()][len(deliveries) :]:
                        deliveries += await self._transport.produce_all(unsent)
            finally:
                self._pending -= len(records)
            for at, delivery in zip(records, deliveries, strict=True):
                refusals[at] = error = delivery.error
                if (sending := sendings[at]) is not None:
                    sending.ended(_place_of(delivery), error)
                if error is None:
                    self._view.accepted(many[at].request, _origin_of(delivery))
                elif isinstance(error, NotFound):
                    refusals[at] = unavailable(error)
        return refusals

    async def _submit_new(
        self, checked: Checked, traceparent: str | None, on_id: Callable[[str], None], keep: Keep | None
    ) -> Accepted:
        """Under a new id, or under that of the same request whose record was not acknowledged."""
        request, by = checked.request, (checked.request.tenant, checked.caller.key_id)
        former = self._unconfirmed.take(by, content_hash(request)) if self._unconfirmed else None
        found = None if former is None else self._view.find((request.tenant, former))
        if found is not None and (found.erased or (found.done and found.status_name != "completed")):
            former = found = None  # it ended otherwise than a repeat wants
        if former is not None:
            request = dataclasses.replace(request, request_id=former)
        on_id(request.request_id)
        if found is not None:
            return Accepted(request.request_id, replayed=True)
        try:
            await self._produce(dataclasses.replace(checked, request=request), traceparent, keep)
        except BaseException as error:
            unanswered = may_be_written(error)
            if unanswered or former is not None or isinstance(error, asyncio.CancelledError):
                kept_s = (deadline_of(request, request.created_at) - request.created_at) / 1000
                self._unconfirmed.add(by, content_hash(request), request.request_id, kept_s)
            if not (unanswered and isinstance(error, BrokerUnavailable)):
                raise
            raise BrokerUnavailable(
                f"{error.message}; the request may be accepted all the same: sent again here, it stays one request",
                retry_after_s=error.retry_after_s,
                details={"request_id": request.request_id},
            ) from error
        return Accepted(request.request_id, replayed=former is not None)

    def _outstanding(self, checked: Checked) -> AbstractContextManager[None]:
        return self._allowances.outstanding(checked.caller, in_kept_share=self._in_kept_share(checked.request))

    def _in_kept_share(self, request: InferenceRequest) -> bool:
        """Whether the request's class, and its tenant in it, have so little under way that room is kept for it."""
        klass, census, most = priority_class(request.priority), self._view.census, self._limits.max_live
        return (
            census.live(klass) < most * KEPT_FOR_A_CLASS
            and census.live(klass, request.tenant) < most * KEPT_FOR_A_TENANT
        )

    def _check_room(self, request: InferenceRequest) -> None:
        if (reason := self._follower.cannot_keep()) is not None:
            raise Overloaded(f"this gateway takes no requests now: {reason}", retry_after_s=5)
        conf = self._limits
        if self._pending >= conf.max_pending_submits:
            message = f"too many submissions wait for the broker (limit {conf.max_pending_submits}); try again"
            raise Overloaded(message, retry_after_s=1)
        if self._view.known.held_live_count >= conf.max_live and not self._in_kept_share(request):
            klass = priority_class(request.priority)
            raise Overloaded(f"the gateway holds as many {klass} requests as it may; try again", retry_after_s=1)

    async def _submit_once(self, checked: Checked, key: str, traceparent: str | None, keep: Keep | None) -> Accepted:
        """A repeat of a key is the same request, at every gateway, while the horizon lasts."""
        check_idempotency_key(key)
        request_id = idempotent_request_id(checked.request.tenant, key)
        request = dataclasses.replace(checked.request, request_id=request_id)
        return await self._submit_as(dataclasses.replace(checked, request=request), traceparent, keep, claims=True)

    async def _submit_as(
        self, checked: Checked, traceparent: str | None, keep: Keep | None, *, claims: bool = False
    ) -> Accepted:
        """`claims`: the id says nothing of the content, so the content claims it before it is sent."""
        request = checked.request
        request_id = request.request_id
        while (running := self._same_key.get(request_id)) is not None:
            try:
                content = await asyncio.shield(running)
            except IdempotencyKeyReused:
                continue  # of another body: this one may be that of the first claim
            self._check_same(content, content_hash(request))
            return Accepted(request_id, replayed=True)
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._same_key[request_id] = future
        try:
            content = self._content_known(request)
            if content is None:
                await self._follower.catch_up()
                content = self._content_known(request)
            if content is None:
                content = await self._produce(checked, traceparent, keep, claims=claims)
            future.set_result(content_hash(request) if content is None else content)
            if content is not None:
                self._check_same(content, content_hash(request))
            return Accepted(request_id, replayed=content is not None)
        except BaseException as error:
            if not future.done():
                given_up = BrokerUnavailable("the first request with this Idempotency-Key was given up; try again")
                future.set_exception(given_up if isinstance(error, asyncio.CancelledError) else error)
                future.exception()  # nobody else may be waiting: it was raised
            raise
        finally:
            del self._same_key[request_id]

    def _content_known(self, request: InferenceRequest) -> str | None:
        """The content of the request that has this id; None if there is none. Raises Gone."""
        found = self._view.find((request.tenant, request.request_id))
        if found is not None and found.erased:
            raise GoneError("the request of this Idempotency-Key was erased")
        return None if found is None else found.content

    async def claim_key(self, tenant: str, kind: str, idempotency_key: str, content: Any) -> None:
        """Claim a key for something that is not one request. `content`, as JSON, is the same for a repeat.

        Raises IdempotencyKeyReused where another content came first, InvalidRequest, BrokerUnavailable.
        """
        digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
        await self._claim(tenant, keyed_id(tenant, kind, idempotency_key), digest, lambda: None)

    async def _claim(self, tenant: str, claimed_id: str, content: str, known: Callable[[], str | None]) -> str | None:
        """Claim an id for a content. Returns the content of what has the id meanwhile, if `known` finds it.

        Of several gateways that claim an id for different contents, only the first goes on.
        Raises IdempotencyKeyReused at the others.
        """
        topic = self._names.idempotency
        if not self._follower.known_topic(topic):  # an older installation
            return None
        claim = KeyClaim(request_id=claimed_id, tenant=tenant, content=content, created_at=now_ms())
        made = await self._send(claim_record(claim, self._names, self._codec, source=SOURCE))
        read = made.offset >= 0 and await self._follower.reached({(topic, made.partition): made.offset + 1}, CATCH_UP_S)
        if (standing := known()) is not None:
            return standing
        first = self._view.claims.content((tenant, claimed_id))
        if not read or first is None:
            raise BrokerUnavailable("the gateway is behind the topics; try again", retry_after_s=1)
        self._check_same(first, content)
        return None

    @staticmethod
    def _check_same(content: str, other: str) -> None:
        if content and content != other:
            raise key_reused()

    async def _check_pool(self, request: InferenceRequest) -> None:
        if request.pool is None:
            return
        topic = self._names.request(request.task, request.priority, request.pool)
        if not self._follower.known_topic(topic) and not await self._follower.add_topic_now(topic):
            raise InvalidRequest(f"there is no pool {request.pool}", param="pool")

    def _record(self, checked: Checked, traceparent: str | None) -> Outgoing:
        return request_record(
            checked.request,
            self._names,
            self._codec,
            source=SOURCE,
            traceparent=valid_traceparent(traceparent),
            key_id=checked.caller.used_key_id,
        )

    async def _sent(self, record: Outgoing, sending: Sending | None) -> Delivery:
        with watched(sending):
            delivery = await self._send(record)
        if sending is not None:
            sending.ended(_place_of(delivery))
        return delivery

    async def _produce(
        self, checked: Checked, traceparent: str | None, keep: Keep | None, *, claims: bool = False
    ) -> str | None:
        """Send the record. Returns what `_claim` does: then nothing was sent."""
        request = checked.request
        self._check_room(request)
        sending = Sending.of(request, self._names, traceparent)
        record = self._record(checked, traceparent if sending is None else sending.traceparent)
        if keep is not None:
            self._check_size(record)
            await keep(request.request_id)  # not yet on its way to the broker: a slow store holds up its own tenant
            self._check_room(request)
        self._pending += 1
        try:
            if claims:
                content, known = content_hash(request), partial(self._content_known, request)
                standing = await self._claim(request.tenant, request.request_id, content, known)
                if standing is not None:
                    return standing
            self._allowances.current(checked.caller)  # the key may have been revoked during a wait
            key = (request.tenant, request.request_id)
            if request.stream:  # before its first piece can come: its sender comes here for it, as a rule
                self._view.streams.expect(key)
            try:
                delivery = await self._sent(record, sending)
            except BaseException:
                self._view.streams.forget(key)
                raise
        finally:
            self._pending -= 1
        self._view.accepted(request, _origin_of(delivery))
        return None

    async def _send(self, record: Outgoing) -> Delivery:
        try:
            return await self._transport.produce(record.topic, record.value, key=record.key, headers=record.headers)
        except NotFound as error:
            raise unavailable(error) from error


def check_idempotency_key(key: str) -> None:
    """Raises InvalidRequest."""
    if not 0 < len(key) <= MAX_KEY_CHARS:
        raise InvalidRequest(f"Idempotency-Key must have 1 to {MAX_KEY_CHARS} characters", param="Idempotency-Key")


def keyed_id(tenant: str, kind: str, idempotency_key: str) -> str:
    """What a key stands for among things of a kind, as `batch`; requests have no kind. Raises InvalidRequest."""
    check_idempotency_key(idempotency_key)
    return idempotent_request_id(tenant, f"{kind}\n{idempotency_key}")


def key_reused() -> IdempotencyKeyReused:
    return IdempotencyKeyReused("this Idempotency-Key was used with another body", param="Idempotency-Key")


def _place_of(delivery: Delivery) -> Place:
    return Place(topic=delivery.topic, partition=delivery.partition, offset=delivery.offset)


def _origin_of(delivery: Delivery) -> Origin | None:
    """Where the record stands; None if the broker did not say, as for a repeat that it had already."""
    if delivery.offset < 0 or delivery.timestamp_ms <= 0:
        return None
    return Origin(
        topic=delivery.topic,
        partition=delivery.partition,
        offset=delivery.offset,
        append_time_ms=delivery.timestamp_ms,
    )
