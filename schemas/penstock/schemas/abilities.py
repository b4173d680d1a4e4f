"""What some requests need of a model beyond its task: to enlarge images, or to read those among messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from penstock.schemas.image_operations import wants_model

UPSCALE = "upscale"
READ_IMAGES = "read_images"
WORDS: Mapping[str, str] = {UPSCALE: "enlarges images", READ_IMAGES: "reads images among messages"}
"""What a model with an ability does."""


class Need(NamedTuple):
    """An ability, and the field that asks for it."""

    ability: str
    param: str


def needed(task: str, payload: Mapping[str, Any]) -> Need | None:
    """What a payload in its normal form needs; None when every model of its task will do."""
    if task == "image_processing":
        number = wants_model(payload.get("operations") or ())
        return None if number is None else Need(UPSCALE, f"payload.operations[{number}].op")
    if task != "text_generation":
        return None
    for number, message in enumerate(payload.get("messages") or ()):
        for place, part in enumerate(message.get("parts") or ()):
            if part.get("type") == "image":
                return Need(READ_IMAGES, f"payload.messages[{number}].content[{place}]")
    return None
