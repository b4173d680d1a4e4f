"""Payloads of image_processing and image_to_text in their normal form."""

from __future__ import annotations

from penstock.schemas.image_operations import normal_operations
from penstock.schemas.image_payloads import image_input
from penstock.schemas.limits import Limits
from penstock.schemas.payloads import Payload, at_most, size_within

IMAGE_TO_TEXT_DEFAULTS = frozenset({"prompt", "max_tokens"})


def processing_payload(payload: Payload, limits: Limits) -> Payload:
    """The normal form of a valid payload of image_processing. Raises InvalidRequest, UnsupportedParameter, TooLarge."""
    payload["image"] = image_input(payload["image"], "payload.image")
    payload["operations"] = normal_operations(payload["operations"])
    for number, operation in enumerate(payload["operations"]):
        if "image" in operation:
            operation["image"] = image_input(operation["image"], f"payload.operations[{number}].image")
    return payload


def image_to_text_payload(payload: Payload, limits: Limits) -> Payload:
    """The same for image_to_text."""
    payload["image"] = image_input(payload["image"], "payload.image")
    if "prompt" in payload:
        size_within(payload["prompt"], "payload.prompt", limits)
    if "max_tokens" in payload:
        at_most(payload, "max_tokens", limits.max_tokens, "payload.")
    return payload
