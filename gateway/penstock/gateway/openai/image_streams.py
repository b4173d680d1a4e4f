"""Streams of OpenAI's routes for images: small images on the way, then each image as it is kept."""

from __future__ import annotations

import base64
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.gateway.edge.event_stream import KEEPALIVE, KEEPALIVE_S, server_sent
from penstock.gateway.openai.chat_bodies import Words
from penstock.gateway.openai.exchange import Pulse, completed, new_frames
from penstock.gateway.openai.image_answers import Json, image_usage, size_of
from penstock.gateway.service.subscriptions import Subscription
from penstock.gateway.view.frames import PreviewFrame, RestartedFrame, ResultFrame
from penstock.gateway.view.outputs import encode_json, on_output_thread
from penstock.schemas.errors import PenstockError

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
