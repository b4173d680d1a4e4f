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
