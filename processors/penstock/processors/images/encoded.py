"""An image as the file that came, after a guarded look at its beginning: for engines that open images themselves."""

from __future__ import annotations

from dataclasses import dataclass, field
from pickle import PickleBuffer
from typing import Any

from penstock.processors.images.decoded import CHANNELS


@dataclass(frozen=True, slots=True)
class EncodedImage:
    """Nobody has decoded `data`: only a process under guard may. Width and height are those of the image upright.

    `source_format` is one of `penstock.schemas.image_formats.MEDIA_TYPES`, detected from the bytes. Decoding may take
    `decode_cpu_s` seconds of processor time.
    """

    width: int
    height: int
    mode: str
    data: bytes | memoryview = field(repr=False)
    source_format: str
    source_sha256: str
    decode_cpu_s: int

    @property
    def size_bytes(self) -> int:
        """What it takes where it waits."""
        return len(self.data)

    @property
    def pixel_bytes(self) -> int:
        """What it will take decoded."""
        return self.width * self.height * CHANNELS[self.mode]

    def __reduce__(self) -> tuple[Any, ...]:
        """The file by itself, for who sends it without a copy (PEP 574)."""
        fields = (self.width, self.height, self.mode, PickleBuffer(self.data), self.source_format)
        return EncodedImage, (*fields, self.source_sha256, self.decode_cpu_s)
