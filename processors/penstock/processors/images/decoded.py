"""An image as pixels: what guarded decoding gives, and all that engines and operations ever see of an image."""

from __future__ import annotations

from dataclasses import dataclass, field
from pickle import PickleBuffer
from typing import Any

CHANNELS = {"L": 1, "RGB": 3, "RGBA": 4}
"""Bytes of a pixel by mode."""


@dataclass(frozen=True, slots=True)
class DecodedImage:
    """The first frame, upright (EXIF orientation applied), without metadata, its colours in sRGB.

    `pixels` holds the rows from the top, without padding: width x height x CHANNELS[mode] bytes, 8 bits a channel.
    `source_format` is one of `penstock.schemas.image_formats.MEDIA_TYPES`; `source_sha256` is the digest in
    hexadecimal of the bytes that it was decoded from.
    """

    width: int
    height: int
    mode: str
    pixels: bytes | memoryview = field(repr=False)
    source_format: str
    source_sha256: str

    def __post_init__(self) -> None:
        if len(self.pixels) != self.width * self.height * CHANNELS[self.mode]:
            raise ValueError("the pixels do not fill the image")

    @property
    def size_bytes(self) -> int:
        """What it takes where it waits."""
        return len(self.pixels)

    @property
    def pixel_bytes(self) -> int:
        return len(self.pixels)

    def __reduce__(self) -> tuple[Any, ...]:
        """The pixels by themselves, for who sends them without a copy (PEP 574)."""
        pixels = PickleBuffer(self.pixels)
        return DecodedImage, (self.width, self.height, self.mode, pixels, self.source_format, self.source_sha256)
