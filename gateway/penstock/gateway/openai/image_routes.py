"""OpenAI's routes for images: generations and edits, for stock clients with a changed base URL."""

from __future__ import annotations

import base64
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from fastapi import APIRouter, Request
from starlette.datastructures import FormData, UploadFile
from starlette.responses import JSONResponse, Response

from penstock.common.clock import now_ms
from penstock.gateway.context import context_of, service_of
from penstock.gateway.edge.bodies import discard_body, is_multipart
from penstock.gateway.edge.event_stream import KEEPALIVE, KEEPALIVE_S, server_sent
from penstock.gateway.edge.validation import validated
from penstock.gateway.limits.callers import Caller, caller_of
from penstock.gateway.openai import endpoints
from penstock.gateway.openai.chat_bodies import Words, in_openai_words
from penstock.gateway.openai.exchange import Pulse, completed, new_frames
from penstock.gateway.openai.image_answers import Json, image_usage, size_of
from penstock.gateway.openai.image_bodies import WORDS, ImageBody, form_fields, image_request, only_image
from penstock.gateway.openai.routes import Exchange, unknown_fields
from penstock.gateway.routes.multipart import BodyRoute, form_of
from penstock.gateway.service.brought_images import BroughtImage, take_images
from penstock.gateway.service.subscriptions import Subscription
from penstock.gateway.view.frames import PreviewFrame, RestartedFrame, ResultFrame
from penstock.gateway.view.outputs import encode_json, on_output_thread
from penstock.schemas.errors import InvalidRequest, PenstockError, UnsupportedTask

logger = logging.getLogger(__name__)

Fetch = Callable[[Mapping[str, Any]], Awaitable[bytes]]
"""The bytes of an image, by what refers to it. Raises PenstockError."""


@dataclass(frozen=True, kw_only=True)
class ImageStream:
    """One stream. `kind`: image_generation or image_edit, as its events are called."""

    kind: str
    created: int
    partial_images: int
    """At most so many small images on the way."""
    words: Words

    async def events(
        self, subscription: Subscription, fetch: Fetch, keepalive_s: float = KEEPALIVE_S
    ) -> AsyncGenerator[bytes]:
        """Server-sent events of one answer. Raises FinalFailure for every outcome but `completed`."""
        shown = 0
        pulse = Pulse(keepalive_s)
        while True:
            for frame in await new_frames(subscription, keepalive_s):
                match frame:
                    case ResultFrame():
                        async for event in self._images(completed(frame, self.words), fetch):
                            yield event
                        return
                    case RestartedFrame():
                        shown = 0
                    case PreviewFrame() if shown < self.partial_images:
                        if (event := await self._partial(frame.image, shown, fetch)) is not None:
                            shown += 1
                            pulse.told()
                            yield event
                    case _:
                        pass
            if pulse.is_due():
                pulse.told()
                yield KEEPALIVE

    async def _partial(self, image: Json, number: int, fetch: Fetch) -> bytes | None:
        try:
            content = await fetch(image)
        except PenstockError as error:  # the image itself comes without it
            logger.warning("openai.preview_lost artifact_id=%s code=%s", image.get("artifact_id"), error.code)
            return None
        return await on_output_thread(
            lambda: self._event("partial_image", image, content, {"partial_image_index": number})
        )

    async def _images(self, result: Json, fetch: Fetch) -> AsyncGenerator[bytes]:
        """One event an image. The usage is that of all images, so only the first event has it."""
        none = image_usage({})
        for number, image in enumerate(result.get("images") or ()):
            content = await fetch(image)
            more: Json = {"usage": none if number else image_usage(result.get("usage") or {}), "penstock": image}
            yield await on_output_thread(
                lambda image=image, content=content, more=more: self._event("completed", image, content, more)
            )

    def _event(self, name: str, image: Json, content: bytes, more: Json) -> bytes:
        event: Json = {
            "type": f"{self.kind}.{name}",
            "b64_json": base64.b64encode(content).decode(),
            "created_at": self.created,
            "background": "opaque",
            "quality": "auto",
            **size_of(image),
            **more,
        }
        return server_sent(encode_json(event), event["type"])


router = APIRouter(prefix="/v1/images", tags=["openai"], route_class=BodyRoute)

URL_S = 3_600
"""Seconds for which the URL of an image needs no key, as OpenAI's do."""
IMAGE_NAMES = ("image", "image[]")
"""How clients name the part with the image: one, or one of a list."""


@router.post("/generations", summary="Images from a prompt, as OpenAI's API has it")
async def create_image(body: ImageBody, request: Request) -> Response:
    """As base64, as URLs of artifacts, or streamed. A client that disconnects cancels."""
    return await _answer(await Exchange.of(request, body, endpoints.IMAGE), body, request, "image_generation")


@router.post("/edits", summary="An image changed by a prompt, as OpenAI's API has it: multipart with image and mask")
async def edit_image(request: Request) -> Response:
    """As base64, as URLs of artifacts, or streamed. A client that disconnects cancels."""
    caller = caller_of(request)
    if not is_multipart(request.scope):
        raise InvalidRequest("send multipart/form-data: the image is a file in it")
    async with form_of(request) as form:
        body, inputs, images = await _edit_of(form, caller)
    ignored = endpoints.IMAGE.set_aside(body, unknown_fields(request))
    exchange = await Exchange.begin(request, image_request(body, caller, now_ms(), inputs), endpoints.IMAGE, images)
    exchange.ignored = ignored
    return await _answer(exchange, body, request, "image_edit")


@router.post("/variations", summary="Variations of an image: not supported", include_in_schema=False)
async def create_variation(request: Request) -> Response:
    """No engine here makes variations without a prompt."""
    await discard_body(request.scope, request.receive)
    raise UnsupportedTask(
        "variations are not supported: edit the image with a prompt at /v1/images/edits, with penstock[strength]"
    )


async def _edit_of(form: FormData, caller: Caller) -> tuple[ImageBody, Json, list[BroughtImage]]:
    """(the fields, references to the images, what becomes artifacts). Raises InvalidRequest, UnsupportedParameter."""
    texts = [(name, part) for name, part in form.multi_items() if isinstance(part, str)]
    files = [(name, part) for name, part in form.multi_items() if isinstance(part, UploadFile)]
    body = validated(ImageBody, form_fields(texts))
    only_image(sum(name in IMAGE_NAMES for name, _ in files), "image", needed=not body.in_conversation)
    only_image(sum(name == "mask" for name, _ in files), "mask", needed=False)
    contents: dict[str, bytes] = {}
    for name, part in files:
        if name not in (*IMAGE_NAMES, "mask"):
            raise InvalidRequest(f"the file {name[:100]} is not expected: image and mask are", param=name[:100])
        contents["mask" if name == "mask" else "image"] = await part.read()
    holder: Json = {"payload": {name: {"file": name} for name in contents}}
    try:
        images = await on_output_thread(lambda: take_images(holder, caller.tenant, contents))
    except PenstockError as error:
        raise in_openai_words(error) from None
    return body, holder["payload"], images


async def _answer(exchange: Exchange, body: ImageBody, request: Request, kind: str) -> Response:
    service, tenant = service_of(request), caller_of(request).tenant

    async def fetch(image: Mapping[str, Any]) -> bytes:
        return await endpoints.image_content(service, tenant, image)

    if body.stream:
        about = ImageStream(kind=kind, created=exchange.created, partial_images=body.partial_images or 0, words=WORDS)
        return exchange.stream_of(lambda frames: about.events(frames, fetch), exchange.failure_event)
    result = await exchange.result()
    contents = None
    if body.response_format != "url":
        contents = await endpoints.image_contents(service, tenant, result)
    base, caller, tickets = str(request.base_url).rstrip("/"), caller_of(request), context_of(request).tickets

    def url_of(image: Mapping[str, Any]) -> str:
        ticket, _ = tickets.issue_for_artifact(caller, image["artifact_id"], URL_S)
        return f"{base}{image['url']}?ticket={ticket}"

    made = replace(exchange.made, images=contents, url_of=url_of)
    answer = await on_output_thread(
        lambda: JSONResponse(endpoints.IMAGE.answer(body, made, result), headers=exchange.headers)
    )
    return answer
