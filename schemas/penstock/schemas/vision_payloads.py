"""Payloads of image_processing in their normal form."""

from __future__ import annotations

from penstock.schemas.image_operations import normal_operations
from penstock.schemas.image_payloads import image_input
from penstock.schemas.limits import Limits
from penstock.schemas.payloads import Payload


def processing_payload(payload: Payload, limits: Limits) -> Payload:
    """The normal form of a valid payload of image_processing. Raises InvalidRequest, UnsupportedParameter, TooLarge."""
    payload["image"] = image_input(payload["image"], "payload.image")
    payload["operations"] = normal_operations(payload["operations"])
    for number, operation in enumerate(payload["operations"]):
        if "image" in operation:
            operation["image"] = image_input(operation["image"], f"payload.operations[{number}].image")
    return payload
