"""The requests of one call: all of them are answered, or the call fails and those that still run end."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from fastapi import Request
from starlette.responses import Response

from penstock.common.clock import now_ms
from penstock.gateway.context import context_of, service_of
from penstock.gateway.limits.callers import caller_of
from penstock.gateway.openai.chat_answers import ChunkWriter, Json
from penstock.gateway.openai.chat_bodies import CompletionBody
from penstock.gateway.openai.completion_answers import CompletionWriter, Shape
from penstock.gateway.openai.endpoints import Endpoint, Made
from penstock.gateway.openai.exchange import AnswerStream, unless_gone
from penstock.gateway.openai.routes import Exchange
from penstock.gateway.openai.several import (
    PartWriter,
    TextBody,
    UsageSum,
    all_or_nothing,
    at_prompt,
    merged,
    merged_events,
)
from penstock.gateway.service.brought_images import with_inputs
from penstock.gateway.service.submitting import Accepted, Checked, Keep
from penstock.gateway.service.subscriptions import Subscription
from penstock.schemas.errors import PenstockError


def writer_of(made: Made, body: TextBody, first_index: int = 0) -> ChunkWriter:
    """What makes the chunks of one request's stream."""
    about = (made.request_id, made.created, made.model)
    includes_usage, tier = body.includes_usage, body.service_tier
    if isinstance(body, CompletionBody):
        shape = Shape.of(body)
        return CompletionWriter(*about, shape=shape, includes_usage=includes_usage, tier=tier, first_index=first_index)
    return ChunkWriter(*about, chat=True, includes_usage=includes_usage, tier=tier, first_index=first_index)


def _copies(body: TextBody, bodies: Sequence[TextBody]) -> int:
    """How many requests one prompt has."""
    return (body.n or 1) // (bodies[0].n or 1)


class Group:
    """Several requests as one answer. `bodies` has the part of `body` that each request is."""

    def __init__(
        self, request: Request, body: TextBody, bodies: Sequence[TextBody], exchanges: Sequence[Exchange]
    ) -> None:
        self._request = request
        self._body = body
        self._bodies = bodies
        self._exchanges = exchanges
        self._first = exchanges[0]
        self._ended = [False] * len(exchanges)
        self._followed: list[Subscription] = []

    @classmethod
    async def of(
        cls,
        request: Request,
        body: TextBody,
        bodies: Sequence[TextBody],
        endpoint: Endpoint,
        ignored: Sequence[str] = (),
    ) -> Group:
        """Submit all. Raises as `Exchange.of`. `ignored`: fields of the body that have no effect."""
        service, allowances = service_of(request), context_of(request).allowances
        parts: list[tuple[Checked, Keep | None]] = []
        for place, each in enumerate(bodies):
            try:
                asked = endpoint.ask(each, caller_of(request), now_ms())
                checked = await Exchange.check(request, asked, endpoint)
                parts.append(with_inputs(checked, (), allowances, service))
            except PenstockError as error:
                raise at_prompt(error, place // _copies(body, bodies)) from None
        key, traceparent = (request.headers.get(name) for name in ("idempotency-key", "traceparent"))
        outcomes = await service.submitting.submit_parts(parts, idempotency_key=key, traceparent=traceparent)
        exchanges = [
            Exchange.submitted(request, one, accepted, endpoint)
            for (one, _), accepted in zip(parts, outcomes, strict=True)
            if isinstance(accepted, Accepted)
        ]
        for failure in outcomes:
            if isinstance(failure, BaseException):
                for exchange in exchanges:
                    exchange.abandon()
                raise failure
        request.state.request_id = exchanges[0].request_id
        exchanges[0].ignored = ignored
        return cls(request, body, bodies, exchanges)

    async def answer(self) -> Response:
        """The plain answer. Raises as `Exchange.result`."""
        works = [self._outcome(place) for place in range(len(self._exchanges))]
        try:
            results = await unless_gone(self._request.receive, all_or_nothing(works))
        except BaseException:
            self._abandon()
            raise
        return await self._first.respond(self._body, merged(results, self._answers_each))

    async def _outcome(self, place: int) -> Json:
        result = await self._exchanges[place].whole_outcome()
        self._ended[place] = True
        return result

    @property
    def _answers_each(self) -> int:
        return self._bodies[0].n or 1

    def stream(self) -> Response:
        usage, made = UsageSum(), self._first.made
        copies = _copies(self._body, self._bodies)
        self._followed = [exchange.follow() for exchange in self._exchanges]
        streams: list[AsyncGenerator[bytes]] = []
        for place, (body, frames) in enumerate(zip(self._bodies, self._followed, strict=True)):
            inner = writer_of(made, body, place * self._answers_each)
            writer = PartWriter(inner, usage, counts_prompt=place % copies == 0)
            streams.append(self._part(place, self._exchanges[place].events(frames, writer)))
        whole = writer_of(made, self._body)

        def last() -> bytes:
            return whole.encoded(whole.usage_chunks(usage.counts)) + whole.last

        answer = AnswerStream(
            self._failing_together(merged_events(streams, last)),
            made.request_id,
            failure=whole.failure,
            abandoned=self._abandon,
            close=self._close,
        )
        answer.headers.update(self._first.headers)
        return answer

    async def _part(self, place: int, events: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
        async with aclosing(events):
            async for event in events:
                yield event
        self._ended[place] = True

    async def _failing_together(self, events: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
        try:
            async with aclosing(events):
                async for event in events:
                    yield event
        except Exception:
            self._abandon()
            raise

    def _close(self) -> None:
        for frames in self._followed:
            frames.close()

    def _abandon(self) -> None:
        self._close()  # else they count as followed, and what is followed goes on
        for exchange, ended in zip(self._exchanges, self._ended, strict=True):
            if not ended:
                exchange.abandon()
