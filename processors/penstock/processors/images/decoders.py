"""The processes that decode images: one image at a time each, started when first needed, replaced when they end."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any, BinaryIO, TypeVar

from penstock.common.threads import in_daemon_thread
from penstock.processors.guarded.process import GuardedPool, JobRefused, JobStopped, ProcessEnded
from penstock.processors.guarded.wire import answered, read_body
from penstock.processors.images.decoded import CHANNELS, DecodedImage
from penstock.processors.images.encoded import EncodedImage
from penstock.processors.settings import ImagesSection
from penstock.schemas.errors import InternalError, InvalidRequest, PenstockError, TooLarge
from penstock.schemas.image_formats import sniff

_PROGRAM = "penstock.processors.images.decoder"
BASE_BYTES = 512 << 20
"""Address space of a process without an image."""
BYTES_OF_PIXEL = 24
"""What decoding may hold for each pixel: coefficients of a progressive JPEG, the frame, that turned and converted."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeLimits:
    """What one image may have and take. `formats` are names of `penstock.schemas.image_formats.MEDIA_TYPES`."""

    formats: Collection[str] = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
    max_pixels: int = 50_000_000
    max_side: int = 16_384
    cpu_s: int = 10
    memory_bytes: int | None = None
    """Address space of a decoder; None: what the largest image needs."""

    @property
    def address_space(self) -> int:
        return self.memory_bytes or BASE_BYTES + BYTES_OF_PIXEL * self.max_pixels


def ended_on(error: ProcessEnded, param: str, format_name: str) -> PenstockError:
    if error.not_started is not None:
        return InternalError(f"no image decoder could be started: {error.not_started}")
    if error.late:
        return InvalidRequest(f"{param}: decoding this {format_name} image takes too long", param=param)
    return InvalidRequest(f"{param}: decoding this {format_name} image ended its decoder", param=param)


def refused_as(refusal: JobRefused, param: str, format_name: str) -> PenstockError:
    """The error for the sender of an image that its process has refused."""
    match refusal.code:
        case "too_large":
            return TooLarge(f"{param} {refusal.message}", param=param)
        case "memory":
            return InvalidRequest(f"{param}: decoding this {format_name} image takes too much memory", param=param)
        case _:
            return InvalidRequest(f"{param} {refusal.message}", param=param)


def image_size(about: dict[str, Any], max_pixels: int) -> tuple[int, int]:
    """Width and height. Raises ValueError for what no image has, KeyError."""
    width, height = about["width"], about["height"]
    if type(width) is not int or type(height) is not int or min(width, height) < 1 or width * height > max_pixels:
        raise ValueError("the process made no image")
    return width, height


class Decoders:
    """At most `processes` images are decoded at a time; the others wait. Used on one event loop."""

    def __init__(self, limits: DecodeLimits | None = None, *, processes: int = 2) -> None:
        self.limits = limits = limits or DecodeLimits()
        self._free = asyncio.Semaphore(processes)
        self._numbers = itertools.count()
        self.pool = GuardedPool(_PROGRAM, (limits.address_space, limits.max_pixels, limits.max_side, limits.cpu_s))
        self.deaths = 0
        """Decoders that ended while they had an image."""

    async def decode(self, data: bytes, *, param: str) -> DecodedImage:
        """The image. `param` is the field that an error names.

        Raises InvalidRequest for what is no whole image of an accepted format, TooLarge, and InternalError when no
        decoder can be started.
        """
        return await self._asked(data, param, only_look=False, answer=self._decoded)

    async def look(self, data: bytes, *, param: str) -> EncodedImage:
        """The image as it came, with the size that it has. Raises as `decode`, as far as its beginning shows it."""
        return await self._asked(data, param, only_look=True, answer=self._looked_at)

    def close(self) -> None:
        self.pool.close()

    async def _asked(
        self, data: bytes, param: str, *, only_look: bool, answer: Callable[[bytes, str, BinaryIO], T]
    ) -> T:
        format_name = self._format_of(data, param)
        job = {"format": format_name, "size": len(data), "only_look": only_look}
        read = partial(answer, data, format_name)
        async with self._free:
            try:
                # A caller who is cancelled leaves a process at work: the pool ends it.
                with self.pool.process(f"{next(self._numbers)}") as process:
                    return await in_daemon_thread(process.ask, job, [data], self.limits.cpu_s, read)
            except JobRefused as error:
                raise refused_as(error, param, format_name) from None
            except JobStopped:
                raise InternalError("the worker stops: no image is decoded any more") from None
            except ProcessEnded as error:
                self.deaths += error.not_started is None
                raise ended_on(error, param, format_name) from None

    def _decoded(self, data: bytes, format_name: str, answers: BinaryIO) -> DecodedImage:
        width, height, mode = self._size(answers)
        pixels = read_body(answers, width * height * CHANNELS[mode], self.limits.max_pixels * CHANNELS[mode])
        return DecodedImage(width, height, mode, pixels, format_name, hashlib.sha256(data).hexdigest())

    def _looked_at(self, data: bytes, format_name: str, answers: BinaryIO) -> EncodedImage:
        digest = hashlib.sha256(data).hexdigest()
        return EncodedImage(*self._size(answers), data, format_name, digest, self.limits.cpu_s)

    def _size(self, answers: BinaryIO) -> tuple[int, int, str]:
        """Width, height and mode. Raises Refusal, ValueError, KeyError for what is no size, EOFError."""
        about: dict[str, Any] = answered(answers)
        if "code" in about:
            raise JobRefused(about)
        mode: Any = about["mode"]
        if not isinstance(mode, str) or mode not in CHANNELS:
            raise ValueError("the decoder made no image of a known mode")
        return *image_size(about, self.limits.max_pixels), mode

    def _format_of(self, data: bytes, param: str) -> str:
        accepted = ", ".join(self.limits.formats)
        format_name = sniff(data)
        if format_name is None:
            raise InvalidRequest(f"{param} is not an image of an accepted format ({accepted})", param=param)
        if format_name not in self.limits.formats:
            raise InvalidRequest(f"{param} is a {format_name} image; accepted are {accepted}", param=param)
        return format_name


def decoders_of(settings: ImagesSection) -> Decoders:
    """As a worker's settings say."""
    limits = DecodeLimits(
        formats=tuple(settings.formats),
        max_pixels=settings.max_pixels,
        max_side=settings.max_side,
        cpu_s=settings.decode_cpu_s,
    )
    return Decoders(limits, processes=settings.decoders)
