"""The requests of messages: each is sent at most once, by whichever bridge, and followed to its outcome."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace

from penstock.common.clock import now_ms
from penstock.common.kafka_errors import unavailable
from penstock.common.outgoing import valid_traceparent
from penstock.gateway.bridge.known import Known, Sent, content_header, content_of
from penstock.gateway.limits.allowances import Allowances
from penstock.gateway.limits.callers import Caller
from penstock.gateway.service.models import check_abilities, model_or_refusal
from penstock.gateway.traces import TAKEN, Sending, watched
from penstock.producers import AsyncClient, Result, Status, Submitted
from penstock.schemas.errors import (
    BrokerUnavailable,
    Forbidden,
    IdempotencyKeyReused,
    InternalError,
    InvalidRequest,
    NotFound,
)
from penstock.schemas.records import InferenceRequest, Place, ResultEvent
from penstock.schemas.requests import validate_request
from penstock.schemas.topics import TopicNames

CLOCKS_MS = 600_000
"""So far the clocks of workers, whose times results have, may be behind that of the broker."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Accepted:
    """A request that stands on its topic, with its pool. `submitted` where it was sent by this process just now."""

    request: InferenceRequest
    at_ms: int
    submitted: Submitted | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a request ended, and its last status before that."""

    event: ResultEvent
    status: Status | None


@dataclass(eq=False)
class Requests:
    """`_clients` by tenant. `_check_place` refuses an `output {store, prefix}` that no process could follow."""

    _clients: Mapping[str, AsyncClient]
    _known: Known
    _allowances: Allowances
    _check_place: Callable[[str | None, str | None], None]
    _names: TopicNames

    async def up_to_date(self) -> None:
        """Wait until it is known what others have sent. Raises BrokerUnavailable."""
        await self._known.up_to_date()

    def knows(self, tenant: str, request_id: str) -> bool:
        """Whether it was sent, by any process that had its message, as far as is known since `up_to_date`."""
        return self._known.sent.find((tenant, request_id)) is not None

    async def accepted(
        self, request: InferenceRequest, extra: Mapping[str, str] | None = None, *, names_priority: bool = True
    ) -> Accepted:
        """The request as it stands on its topic: sent now, or before by the process that had the message.

        `extra`: of its queue, for what the request's own does not have. No part of what identifies its content, so that
        a queue's setting may change between two tries. Nor is the priority that its tenant's limits leave to a request
        that names none, as gateways give it.

        Raises IdempotencyKeyReused when its id was sent with another content, ModelNotFound, InvalidRequest, Forbidden,
        TenantLimit, TooLarge, and Overloaded or BrokerUnavailable when it can be tried again.
        """
        await self.up_to_date()
        if request.conversation_id is not None:
            listed, tenants = await self._known.conversations(request.tenant), self._allowances.tenants
            if tenants.of(request.tenant).conversations is not listed:
                tenants.on_conversations(request.tenant, listed, time.time())
        # From here to the claim nothing waits, so that of two messages with one id the second follows the first.
        key, content = (request.tenant, request.request_id), content_of(request)
        if not names_priority:
            most = self._allowances.with_priority(Caller(tenant=request.tenant)).max_priority
            request = replace(request, priority=max(request.priority, most))
        found = self._known.sent.find(key)
        if found is not None:
            if found.content != content:
                raise IdempotencyKeyReused("this id was used with another payload", param="id")
            return Accepted(request=replace(request, pool=found.pool), at_ms=found.at_ms)
        request = self._checked(_with_extra(request, extra or {}))
        with self._allowances.outstanding(Caller(tenant=request.tenant)):
            claim = Sent(content=content, pool=request.pool, at_ms=now_ms(), on_topic=False)
            self._known.sent.claim(key, claim)
            try:
                submitted = await self._send(request, content)
            except BrokerUnavailable:
                self._known.look_again()  # it may stand on its topic all the same
                raise
            finally:
                self._known.sent.release(key, claim)
            self._known.sent.on_record(key, replace(claim, at_ms=submitted.append_time_ms, on_topic=True))
        self._allowances.tenants.on_request(request.tenant, request.conversation_id, submitted.append_time_ms)
        return Accepted(request=request, at_ms=submitted.append_time_ms, submitted=submitted)

    async def outcome(self, accepted: Accepted) -> Outcome:
        """Wait for it. Raises PenstockError when it cannot be followed now: it goes on all the same."""
        tenant, status = accepted.request.tenant, None
        tenants = self._allowances.tenants
        tenants.began(tenant)
        try:
            follow = self._clients[tenant].follow(
                accepted.submitted or accepted.request.request_id,
                since_ms=None if accepted.submitted is not None else accepted.at_ms - CLOCKS_MS,
            )
            async with aclosing(follow) as events:
                async for event in events:
                    if isinstance(event, Status):
                        status = event
                    elif isinstance(event, Result):
                        self._count(event.event)
                        return Outcome(event=event.event, status=status)
        finally:
            tenants.ended(tenant)
        raise InternalError("a follow ended without a result")

    async def flush(self) -> None:
        """Wait until all that was sent is acknowledged, or not as far as is known."""
        await asyncio.gather(*(client.flush() for client in self._clients.values()))

    def _checked(self, request: InferenceRequest) -> InferenceRequest:
        """The request with its pool. Refuses what cannot be done or its tenant may not ask for."""
        if request.output is not None:
            self._check_place(request.output.store, request.output.prefix)
        request = self._known.routed(request)
        known = self._known.models()
        model, missing = model_or_refusal(known.models, request)
        self._allowances.check(Caller(tenant=request.tenant), request, model)
        if missing is not None:
            raise missing
        check_abilities(known, request)
        return request

    async def _send(self, request: InferenceRequest, content: str) -> Submitted:
        headers = [content_header(request.tenant, content)]
        sending = Sending.of(request, self._names, TAKEN.get())
        traceparent = valid_traceparent(None) if sending is None else sending.traceparent
        try:
            with watched(sending):
                submitted = await self._clients[request.tenant].send(request, traceparent=traceparent, headers=headers)
            if sending is not None:
                place = Place(topic=submitted.topic, partition=submitted.partition, offset=submitted.offset)
                sending.ended(place)
            return submitted
        except Forbidden as error:  # of Kafka
            raise unavailable(error) from error
        except NotFound as error:
            if request.pool is None:
                raise unavailable(error) from error
            raise InvalidRequest(f"there is no pool {request.pool}", param="pool") from error

    def _count(self, event: ResultEvent) -> None:
        used = 0 if event.usage is None else event.usage.prompt_tokens + event.usage.completion_tokens
        tenants, read_ms = self._allowances.tenants, now_ms()
        tenants.on_outcome(event.tenant, event.status or "unknown", read_ms)
        tenants.on_tokens(event.tenant, used, read_ms)


def _with_extra(request: InferenceRequest, extra: Mapping[str, str]) -> InferenceRequest:
    """Raises TooLarge, and others for entries that no request may have."""
    own = {name.lower() for name in request.extra}
    more = {name: value for name, value in extra.items() if name.lower() not in own}
    if not more:
        return request
    request = replace(request, extra={**more, **request.extra})
    validate_request(request)
    return request
