"""OpenAI's endpoints without HTTP: a body becomes a request, an outcome an answer. Routes and batches use them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from penstock.gateway.limits.callers import Caller
from penstock.gateway.openai import chat_answers as answers
from penstock.gateway.openai import chat_bodies as bodies
from penstock.gateway.openai import image_bodies, other_fields, responses_bodies
from penstock.gateway.openai.completion_answers import Shape, completion
from penstock.gateway.openai.exchange import NO_WORDS
from penstock.gateway.openai.image_answers import images_response
from penstock.gateway.openai.nested_fields import IN_CHAT, IN_RESPONSE, IN_TEXT, Known
from penstock.gateway.openai.other_fields import Harmless, UnknownFields, set_aside
from penstock.gateway.openai.responses_answers import Asked, repeated_fields, response
from penstock.gateway.service.brought_images import BroughtImage
from penstock.gateway.service.service import GatewayService
from penstock.schemas.records import InferenceRequest

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Made:
    """What an answer says of its request beside the result. `created`: seconds since the epoch."""

    request_id: str
    created: int
    model: str
    images: Sequence[bytes] | None = None
    """Of a request for images: their bytes; None to answer with URLs."""
    url_of: Callable[[Mapping[str, Any]], str] = lambda image: image["url"]
    """The URL of an image."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One endpoint. `ask` and `images` get the body that was validated as `body`, and raise as `chat_request`."""

    body: type[bodies.OpenAIBody]
    ask: Callable[[Any, Caller, int], InferenceRequest]
    answer: Callable[[Any, Made, Json], Json]
    images: Callable[[Any, Caller], list[BroughtImage]] = lambda body, caller: []
    """Takes the images out of the body; to be called before `ask`."""
    words: bodies.Words = field(default_factory=lambda: NO_WORDS)
    harmless: Harmless = field(default_factory=dict[str, Any])
    nested: Mapping[str, Known] = field(default_factory=dict[str, Any])

    def set_aside(self, body: bodies.OpenAIBody, unknown: UnknownFields) -> list[str]:
        """The names of the fields of a body that have no effect; to be called before `ask`. Raises as `set_aside`."""
        return set_aside(body, self.harmless, self.nested, unknown)


def _chat_answer(body: bodies.ChatCompletionBody, made: Made, result: Json) -> Json:
    return answers.chat_completion(made.request_id, made.created, made.model, result, body.service_tier)


def _completion_answer(body: bodies.CompletionBody, made: Made, result: Json) -> Json:
    return completion(made.request_id, made.created, made.model, result, Shape.of(body), body.service_tier)


def _embedding_answer(body: bodies.EmbeddingBody, made: Made, result: Json) -> Json:
    return answers.embedding_list(made.model, result, body.encoding_format)


def about(body: responses_bodies.ResponsesBody, made: Made) -> Asked:
    return Asked(
        request_id=made.request_id,
        created=made.created,
        model=made.model,
        metadata={**(body.metadata or {})},
        repeated=repeated_fields(body),
    )


def _response_request(body: responses_bodies.ResponsesBody, caller: Caller, now_ms: int) -> InferenceRequest:
    """The request, with what is needed to show the response later if it is stored."""
    request = responses_bodies.responses_request(body, caller, now_ms)
    if body.store is False:
        return request
    return replace(request, response_object=json.dumps(repeated_fields(body), ensure_ascii=False))


def _response_answer(body: responses_bodies.ResponsesBody, made: Made, result: Json) -> Json:
    return response(about(body, made), result)


def _image_answer(body: image_bodies.ImageBody, made: Made, result: Json) -> Json:
    return images_response(made.created, result, made.images, made.url_of)


async def image_contents(service: GatewayService, tenant: str, result: Json) -> list[bytes]:
    """The bytes of the images of a result. Raises as `ArtifactStore.get`."""
    made: list[Json] = result.get("images") or []
    return list(await asyncio.gather(*(image_content(service, tenant, image) for image in made)))


async def image_content(service: GatewayService, tenant: str, image: Mapping[str, Any]) -> bytes:
    return await service.stored(tenant, lambda store: store.get(tenant, image["artifact_id"], sha256=image["sha256"]))


CHAT = Endpoint(
    bodies.ChatCompletionBody,
    bodies.chat_request,
    _chat_answer,
    bodies.chat_images,
    harmless=other_fields.HARMLESS_CHAT,
    nested=IN_CHAT,
)
COMPLETION = Endpoint(
    bodies.CompletionBody,
    bodies.completion_request,
    _completion_answer,
    words=bodies.COMPLETION_WORDS,
    harmless=other_fields.HARMLESS_COMPLETION,
    nested=IN_TEXT,
)
EMBEDDING = Endpoint(
    bodies.EmbeddingBody, bodies.embedding_request, _embedding_answer, harmless=other_fields.HARMLESS_EMBEDDING
)
RESPONSE = Endpoint(
    responses_bodies.ResponsesBody,
    _response_request,
    _response_answer,
    responses_bodies.response_images,
    responses_bodies.WORDS,
    other_fields.HARMLESS_RESPONSE,
    IN_RESPONSE,
)
IMAGE = Endpoint(
    image_bodies.ImageBody,
    image_bodies.image_request,
    _image_answer,
    words=image_bodies.WORDS,
    harmless=other_fields.HARMLESS_IMAGE,
)
