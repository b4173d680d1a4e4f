"""Payloads about images in their normal form, and where they refer to images."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

from penstock.schemas.errors import InvalidRequest, TooLarge
from penstock.schemas.image_operations import normal_operations
from penstock.schemas.limits import LIMITS
from penstock.schemas.payloads import Payload, size_within

GENERATION_DEFAULTS = frozenset(
    {
        "negative_prompt", "width", "height", "inference_steps", "guidance_scale", "seed", "sampler", "n", "previews",
    }
)  # fmt: skip


def generation_payload(payload: Payload) -> Payload:
    """The normal form of a valid payload of image_generation. Raises InvalidRequest, TooLarge."""
    for name in ("prompt", "negative_prompt"):
        if name in payload:
            size_within(payload[name], f"payload.{name}")
    pixels = int(payload.get("width", 1)) * int(payload.get("height", 1))
    if pixels > LIMITS.max_image_pixels:
        raise TooLarge(
            f"payload.width × payload.height is {pixels} pixels; the limit is {LIMITS.max_image_pixels}",
            param="payload.width",
        )
    return payload


def editing_payload(payload: Payload) -> Payload:
    """The same for image_editing."""
    payload["image"] = _image_or_none(payload)
    if "mask" in payload:
        payload["mask"] = image_input(payload["mask"], "payload.mask")
    return generation_payload(payload)


def image_to_text_payload(payload: Payload) -> Payload:
    """The same for image_to_text."""
    payload["image"] = _image_or_none(payload)
    if "prompt" in payload:
        size_within(payload["prompt"], "payload.prompt")
    return payload


def processing_payload(payload: Payload) -> Payload:
    """The normal form of a valid payload of image_processing. Raises InvalidRequest, UnsupportedParameter, TooLarge."""
    payload["image"] = image_input(payload["image"], "payload.image")
    payload["operations"] = normal_operations(payload["operations"])
    for number, operation in enumerate(payload["operations"]):
        if "image" in operation:
            operation["image"] = image_input(operation["image"], f"payload.operations[{number}].image")
    return payload


def image_input(value: Mapping[str, Any], param: str) -> dict[str, str]:
    """A reference without nulls. Raises InvalidRequest unless exactly one of its fields is set."""
    given: dict[str, str] = {name: text for name, text in value.items() if text is not None}
    if len(given) != 1:
        raise InvalidRequest(f"{param} must have artifact_id or url, one of the two", param=param)
    return given


def _image_or_none(payload: Payload) -> dict[str, str]:
    """A reference, or an empty one as the records have it: a conversation's newest image. Raises InvalidRequest."""
    given: Mapping[str, Any] = payload.get("image") or {}
    if all(text is None for text in given.values()):
        return {}
    return image_input(given, "payload.image")


def image_references(payload: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(where it is in the payload, the reference) of each image that a payload in its normal form names.

    The places are `image`, `mask`, `operations[2].image` and `messages[0].parts[1].image`.
    """
    for name in ("image", "mask"):
        if payload.get(name):
            yield name, payload[name]
    for number, operation in enumerate(_list(payload, "operations")):
        if operation.get("image") is not None:
            yield f"operations[{number}].image", operation["image"]
    for number, message in enumerate(_list(payload, "messages")):
        for place, part in enumerate(_list(message, "parts")):
            if part.get("image") is not None:
                yield f"messages[{number}].parts[{place}].image", part["image"]


def _list(values: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    return cast("list[dict[str, Any]]", values.get(name) or [])
