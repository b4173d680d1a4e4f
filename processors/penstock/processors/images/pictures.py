"""Decoded images as Pillow has them."""

from __future__ import annotations

from typing import cast

from PIL import Image

from penstock.processors.images.decoded import DecodedImage


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
