"""Chats with images: messages whose parts hold the images themselves, in place of references to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from penstock.processors.engines.base import Message, RunSpec
from penstock.processors.images.decoded import DecodedImage
from penstock.schemas.errors import InvalidRequest

CAPTION_PROMPT = "Describe this image."
"""What a chat model is asked when the request asks nothing: the option `caption_prompt` says otherwise."""


def with_images(
    messages: Sequence[Message] | None, spec: RunSpec, show: Callable[[DecodedImage], Any]
) -> list[Message]:
    """Messages with the images of their parts, as `show` makes them. Raises InvalidRequest for one that is not there.

    A part of the history names its image's place itself; of the run's own messages it follows from where they stand.
    """
    found: list[Message] = []
    for number, message in enumerate(messages or ()):
        parts = message.get("parts")
        if parts:
            place = f"messages[{number}].parts"
            shown = [_part(part, spec, f"{place}[{n}].image", show) for n, part in enumerate(parts)]
            message = {**message, "parts": shown}
        found.append(message)
    return found


def _part(part: Mapping[str, Any], spec: RunSpec, place: str, show: Callable[[DecodedImage], Any]) -> dict[str, Any]:
    if part["type"] != "image":
        return {"type": "text", "text": part.get("text") or ""}
    image = spec.images.get(part.get("place") or place)
    if image is None:
        raise InvalidRequest(f"payload.{place} is missing", param=f"payload.{place}")
    return {"type": "image", "image": show(image)}
