"""Decoded images as Pillow has them."""

from __future__ import annotations

from typing import Any, cast

from PIL import Image, ImageChops

from penstock.processors.images.decoded import DecodedImage
from penstock.schemas.errors import InvalidRequest


def opened(image: DecodedImage) -> Image.Image:
    """The pixels as Pillow has them, not copied."""
    return Image.frombuffer(
        image.mode, (image.width, image.height), cast("bytes", image.pixels), "raw", image.mode, 0, 1
    )


def flattened(image: Image.Image) -> Image.Image:
    """Without alpha, on white: what transparency hides is never seen."""
    if image.mode not in ("RGBA", "LA"):
        return image
    ground = Image.new("RGBA", image.size, "white")
    return Image.alpha_composite(ground, image.convert("RGBA")).convert("RGB" if image.mode == "RGBA" else "L")


def in_colours(image: Image.Image) -> Image.Image:
    """As RGB on white: for models, which know no transparency."""
    return flattened(image).convert("RGB")


def as_seen(image: DecodedImage) -> Image.Image:
    """As models see it."""
    return in_colours(opened(image))


def mask_in_grey(mask: Any, image: Any) -> Any:
    """The mask of an edit in grey, white where the image may change. Raises InvalidRequest.

    As OpenAI's API has it, the transparent parts of a mask with an alpha channel may change; one without an alpha
    channel is white there.
    """
    if image is not None and mask.size != image.size:
        sizes = [f"{one.width} × {one.height}" for one in (mask, image)]
        raise InvalidRequest(
            f"payload.mask is {sizes[0]} pixels and the image is {sizes[1]}: both must have one size",
            param="payload.mask",
        )
    if mask.mode != "RGBA":
        return mask.convert("L")
    alpha = mask.getchannel("A")
    if alpha.getextrema() == (255, 255):
        raise InvalidRequest(
            "payload.mask has an alpha channel and is opaque everywhere, so that nothing may change: make it"
            " transparent where the image may change, or send it without alpha, white where the image may change",
            param="payload.mask",
        )
    return ImageChops.invert(alpha)
