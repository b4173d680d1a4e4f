"""The OpenAI routes for embeddings and models, and one submitted request of any.

Those for text stand in `text_routes`, those for responses in `response_routes`.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from pydantic_core import to_json
from starlette.responses import Response

from penstock.common.clock import now_ms
from penstock.gateway.context import context_of, service_of
from penstock.gateway.edge.errors import error_body
from penstock.gateway.edge.event_stream import server_sent
from penstock.gateway.limits.callers import caller_of
from penstock.gateway.openai import chat_answers as answers
from penstock.gateway.openai import chat_bodies as shapes
from penstock.gateway.openai import endpoints
from penstock.gateway.openai.endpoints import Endpoint, Made
from penstock.gateway.openai.exchange import (
    AnswerStream,
    ClientGone,
    EventWriter,
    cancel_abandoned,
    outcome,
    stream_events,
    unless_gone,
)
from penstock.gateway.openai.other_fields import UnknownFields, ignored_header
from penstock.gateway.routes.multipart import BodyRoute
from penstock.gateway.routes.paging import page
from penstock.gateway.service.brought_images import BroughtImage, with_inputs
from penstock.gateway.service.large_answers import is_large, whole_result
from penstock.gateway.service.model_states import find_one
from penstock.gateway.service.models import of_task
from penstock.gateway.service.service import GatewayService
from penstock.gateway.service.submitting import Accepted, Checked
from penstock.gateway.service.subscriptions import Stopping, Subscription
from penstock.gateway.view.outputs import json_bytes, on_output_thread
from penstock.schemas.errors import InvalidRequest, PenstockError
from penstock.schemas.records import InferenceRequest

router = APIRouter(prefix="/v1", tags=["openai"], route_class=BodyRoute)
Task = Annotated[
    str | None,
    Query(description="Models for this task, or `all`. Without it: all but those that do `image_processing` alone."),
]


@router.post("/embeddings", summary="Embeddings, as OpenAI's API has them")
async def create_embeddings(body: shapes.EmbeddingBody, request: Request) -> Response:
    """As floats, or as base64 of little-endian float32."""
    return await (await Exchange.of(request, body, endpoints.EMBEDDING)).answer(body)


@router.get("/models", summary="The models that workers offer")
async def list_models(request: Request, task: Task = None) -> dict[str, Any]:
    return page(of_task(service_of(request).facts.public_models(), task))


@router.get("/models/{model_id:path}", summary="One model, by its id or an alias")
async def retrieve_model(model_id: str, request: Request, pool: str | None = None) -> dict[str, Any]:
    return find_one(service_of(request).facts.public_models(), model_id, pool)


def unknown_fields(request: Request) -> UnknownFields:
    """What becomes of fields that this release does not know."""
    return context_of(request).settings.gateway.unknown_fields


async def shaped(
    result: answers.Json, shape: Callable[[answers.Json], answers.Json], headers: Mapping[str, str]
) -> Response:
    """What `shape` makes of a result, as JSON; a large one is encoded on a thread."""
    if not is_large(result):
        return Response(to_json(shape(result)), media_type="application/json", headers=headers)
    content = await on_output_thread(lambda: json_bytes(shape(result)))
    return Response(content, media_type="application/json", headers=headers)


class Exchange:
    """One submitted request and the connection that waits for its outcome."""

    def __init__(
        self,
        request: Request,
        service: GatewayService,
        asked: InferenceRequest,
        model: str,
        endpoint: Endpoint,
    ) -> None:
        self.streams = asked.stream
        self.request_id = asked.request_id
        self.created = int(time.time())
        self.model = model
        self.comes_back = False
        """Its client named it by an Idempotency-Key: it can ask for the same request again, from any gateway."""
        self.ignored: Sequence[str] = ()
        """Fields of the body that have no effect."""
        self._tenant = asked.tenant
        self._endpoint = endpoint
        self._words = endpoint.words
        self._request = request
        self._service = service

    @classmethod
    async def of(cls, request: Request, body: shapes.OpenAIBody, endpoint: Endpoint) -> Exchange:
        """Submit what the body asks for. Raises as `begin`, and what the endpoint refuses."""
        ignored = endpoint.set_aside(body, unknown_fields(request))
        images = endpoint.images(body, caller_of(request))
        exchange = await cls.begin(request, endpoint.ask(body, caller_of(request), now_ms()), endpoint, images)
        exchange.ignored = ignored
        return exchange

    @classmethod
    async def begin(
        cls,
        request: Request,
        asked: InferenceRequest,
        endpoint: Endpoint,
        images: Sequence[BroughtImage] = (),
    ) -> Exchange:
        """Submit, with the images that came along.

        Raises as `Submitter.check` and `Submitter.submit`.
        """
        service, key = service_of(request), request.headers.get("idempotency-key")
        checked = await cls.check(request, asked, endpoint)
        checked, keep = with_inputs(checked, images, context_of(request).allowances, service)
        accepted = await service.submitting.submit(
            checked, idempotency_key=key, traceparent=request.headers.get("traceparent"), keep=keep
        )
        request.state.request_id = accepted.request_id
        return cls.submitted(request, checked, accepted, endpoint)

    @staticmethod
    async def check(request: Request, asked: InferenceRequest, endpoint: Endpoint) -> Checked:
        """Raises as `Submitter.check`, in the words of the endpoint."""
        try:
            return await service_of(request).submitting.check(caller_of(request), asked)
        except InvalidRequest as error:
            raise shapes.in_openai_words(error, words=endpoint.words) from None

    @classmethod
    def submitted(cls, request: Request, checked: Checked, accepted: Accepted, endpoint: Endpoint) -> Exchange:
        model = checked.model or checked.request.model or "default"
        exchange = cls(request, service_of(request), checked.request, model, endpoint)
        exchange.comes_back = request.headers.get("idempotency-key") is not None
        exchange.request_id = accepted.request_id
        return exchange

    @property
    def made(self) -> Made:
        return Made(self.request_id, self.created, self.model)

    @property
    def headers(self) -> dict[str, str]:
        return {"x-request-id": self.request_id, **ignored_header(self.ignored)}

    async def answer(self, body: shapes.OpenAIBody) -> Response:
        """The plain answer to a body. Raises as `result`."""
        return await self.respond(body, await self.result())

    async def respond(self, body: shapes.OpenAIBody, result: answers.Json) -> Response:
        def shape(result: answers.Json) -> answers.Json:
            return self._endpoint.answer(body, self.made, result)

        return await shaped(result, shape, self.headers)

    async def result(self) -> answers.Json:
        """The whole result. Raises FinalFailure; a client that went away leaves a cancelled request."""
        try:
            return await unless_gone(self._request.receive, self.whole_outcome())
        except (ClientGone, Stopping):
            # The edge knows whether its client left, or its key was taken back. A client that is asked to retry
            # would send a new request.
            self.abandon()
            raise

    async def whole_outcome(self) -> answers.Json:
        """The whole result. Raises FinalFailure, and what ends a subscription."""
        frames = self._service.subscriptions.await_outcome(self._tenant, self.request_id, resumes=False)
        try:
            return await self._whole(await outcome(frames, self._words))
        finally:
            frames.close()

    async def _whole(self, result: answers.Json) -> answers.Json:
        """The result with a large output in it, where stock clients expect it."""
        return await whole_result(self._service, self._tenant, result)

    def stream(self, writer: EventWriter) -> Response:
        return self.stream_of(lambda frames: self.events(frames, writer), writer.failure)

    def events(self, frames: Subscription, writer: EventWriter) -> AsyncGenerator[bytes]:
        """The events that `writer` makes of the request's frames."""
        return stream_events(frames, writer, whole=self._whole, words=self._words)

    def follow(self) -> Subscription:
        """The request's frames."""
        return self._service.subscriptions.subscribe(self._tenant, self.request_id, resumes=False)

    def failure_event(self, error: PenstockError) -> bytes:
        """What ends a stream that cannot be carried on, where its protocol has no event for that."""
        return server_sent(answers.compact_json(error_body(error, self.request_id)))

    def stream_of(
        self,
        events_of: Callable[[Subscription], AsyncGenerator[bytes]],
        failure: Callable[[PenstockError], bytes],
    ) -> Response:
        """Events made of the request's frames; `failure` makes the one for what comes in between."""
        frames = self.follow()
        events = events_of(frames)

        def abandoned() -> None:
            frames.close()
            self.abandon()

        answer = AnswerStream(events, self.request_id, failure=failure, abandoned=abandoned, close=frames.close)
        answer.headers.update(self.headers)
        return answer

    def abandon(self) -> None:
        """Cancel what nobody can ask for any more; for why not those with a key, see docs/decisions/0020."""
        if self.comes_back or self._service.subscriptions.followed(self._tenant, self.request_id):
            return
        cancel_abandoned(self._service.control, self._tenant, self.request_id)
