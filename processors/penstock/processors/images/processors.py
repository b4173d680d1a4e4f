"""The processes that work on images for an engine: one request at a time each, replaced when they end."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

from penstock.processors.guarded.process import GuardedPool, JobRefused, ProcessEnded
from penstock.processors.guarded.wire import answered, read_body
from penstock.processors.images.decoders import BASE_BYTES, BYTES_OF_PIXEL, ended_on, image_size, refused_as
from penstock.processors.images.encoded import EncodedImage
from penstock.processors.images.operations import Encoded
from penstock.processors.images.planning import MAX_PIXELS
from penstock.schemas.errors import EngineFailed, InvalidRequest, PenstockError, TooLarge, UnsupportedParameter
from penstock.schemas.image_formats import MEDIA_TYPES, sniff
from penstock.schemas.image_operations import FORMATS

_PROGRAM = "penstock.processors.images.processor"
_WORK_BYTES_OF_PIXEL = 32
"""What operations may hold for each pixel of the largest image: what they read and make, and its file."""
_FILE_BYTES_OF_PIXEL = 5
"""No file is larger: four channels that do not compress, and what the format adds."""
_FILE_BYTES = 1 << 20
WORK_CPU_S = 120
"""Seconds of processor time for the operations of a request, once its images are decoded."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageJob:
    """A request's images by place and what is to be done with that at `image`. `quality` None: the form's own."""

    images: Mapping[str, EncodedImage]
    operations: Sequence[Mapping[str, Any]]
    form: str
    quality: int | None


class ImageProcessors:
    """As many processes as threads call `process` at once. `max_pixels` bounds every image on the way."""

    def __init__(self, *, max_pixels: int = MAX_PIXELS, work_cpu_s: int = WORK_CPU_S) -> None:
        self._max_pixels = max_pixels
        self._work_cpu_s = work_cpu_s
        self.pool = GuardedPool(
            _PROGRAM, (BASE_BYTES + (BYTES_OF_PIXEL + _WORK_BYTES_OF_PIXEL) * max_pixels, max_pixels)
        )

    def start(self, count: int) -> None:
        """As `GuardedPool.start`. Raises EngineFailed."""
        try:
            self.pool.start(count)
        except ProcessEnded as error:
            raise EngineFailed(f"no process for images could be started: {error.not_started}") from error

    def process(self, key: str, job: ImageJob) -> Encoded:
        """The file that comes of it. Blocks. `key` names it for `pool.stop`.

        Raises InvalidRequest and TooLarge for what is wrong with an image or an operation, EngineFailed when the work
        failed though its images were whole, Stopped.
        """
        opened = threading.Event()
        bodies = [image.data for image in job.images.values()]
        cpu_s = self._work_cpu_s + sum(image.decode_cpu_s for image in job.images.values())
        try:
            with self.pool.process(key) as process:
                return process.ask(self._header(job), bodies, cpu_s, lambda answers: self._made(answers, opened))
        except JobRefused as error:
            raise _error_of(error, job) from None
        except ProcessEnded as error:
            raise _error_of_end(error, job, opened=opened.is_set()) from error

    def _header(self, job: ImageJob) -> dict[str, Any]:
        return {
            "images": [
                {
                    "place": place,
                    "format": image.source_format,
                    "size": image.size_bytes,
                    "cpu_s": image.decode_cpu_s,
                }
                for place, image in job.images.items()
            ],
            "operations": [dict(one) for one in job.operations],
            "work_cpu_s": self._work_cpu_s,
            "form": job.form,
            "quality": job.quality,
        }

    def _made(self, answers: BinaryIO, opened: threading.Event) -> Encoded:
        """Raises Refusal as the process says; ValueError, KeyError, EOFError for what is no answer."""
        if _part(answers).get("opened") is not True:
            raise ValueError("the process does not say that it has opened the images")
        opened.set()
        about = _part(answers)
        data = read_body(answers, about["size"], _FILE_BYTES_OF_PIXEL * self._max_pixels + _FILE_BYTES)
        width, height = image_size(about, self._max_pixels)
        return Encoded(data=data, media_type=_media_type(data), width=width, height=height)


def _part(answers: BinaryIO) -> dict[str, Any]:
    about = answered(answers)
    if "code" in about:
        raise JobRefused(about)
    return about


def _media_type(data: bytes) -> str:
    """By the bytes: a process that has opened a hostile image is not asked what browsers shall take its file for."""
    found = MEDIA_TYPES.get(sniff(data) or "")
    if found is None or found not in FORMATS.values():
        raise ValueError("the process made no file of an image")
    return found


_ERRORS: Mapping[str, type[PenstockError]] = {
    kind.code: kind for kind in (InvalidRequest, TooLarge, UnsupportedParameter)
}


def _error_of(refusal: JobRefused, job: ImageJob) -> PenstockError:
    if (image := job.images.get(refusal.place or "")) is not None:
        return refused_as(refusal, f"payload.{refusal.place}", image.source_format)
    if refusal.code == "work_memory":
        return EngineFailed("there was not enough memory for the image")
    return _ERRORS.get(refusal.code, EngineFailed)(refusal.message, param=refusal.param)


def _error_of_end(error: ProcessEnded, job: ImageJob, *, opened: bool) -> PenstockError:
    if error.not_started is not None:
        return EngineFailed(f"no process for images could be started: {error.not_started}")
    if not opened:  # of several images nobody knows which it was: the first is that which has to be there
        return ended_on(error, "payload.image", job.images["image"].source_format)
    if error.late:
        return InvalidRequest("payload.operations take too long on an image of this size", param="payload.operations")
    return EngineFailed("the process that worked on the image has ended")
