"""Images as files, and as engines get them."""

from __future__ import annotations

import io
from typing import Any

from PIL import Image

from penstock.processors.images.decoded import DecodedImage
from penstock.processors.images.encoded import EncodedImage


def file_of(image: Image.Image, format_name: str = "PNG", **options: Any) -> bytes:
    data = io.BytesIO()
    image.save(data, format_name, **options)
    return data.getvalue()


def decoded(image: Image.Image, source_format: str = "PNG") -> DecodedImage:
    return DecodedImage(*image.size, image.mode, image.tobytes(), source_format, "0" * 64)


def encoded(image: Image.Image, source_format: str = "PNG") -> EncodedImage:
    return EncodedImage(*image.size, image.mode, file_of(image, source_format), source_format, "", 10)
