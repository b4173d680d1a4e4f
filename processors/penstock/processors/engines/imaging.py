"""Image processing inside the child: the operations of a request, one request a thread, on all threads granted.

No model is needed for plain operations. `upscaling` is this backend with a model for `upscale`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from PIL import Image

from penstock.processors.engines.backend import Emit
from penstock.processors.engines.base import EngineInfo, Finished, Prepared, RunFailed, RunSpec, refuse_unsupported
from penstock.processors.engines.measuring import Meter
from penstock.processors.images.decoded import DecodedImage
from penstock.processors.images.operations import Picture, apply, encode
from penstock.processors.images.pictures import opened
from penstock.processors.images.planning import MAX_PIXELS, Step, plan
from penstock.schemas.errors import EngineFailed, InvalidRequest, UnsupportedParameter
from penstock.schemas.image_operations import FORMATS

logger = logging.getLogger(__name__)


class Stopped(Exception):
    """The run was cancelled while it was computed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A request's images and what is to be done with the first of them."""

    images: Mapping[str, DecodedImage]
    steps: list[Step]
    format: str | None
    quality: int | None


class ImagingBackend:
    """Pillow's operations. `max_pixels` (64 megapixels) bounds every image on the way."""

    device = "cpu"
    upscales = False

    def __init__(self, source: str, options: Mapping[str, Any], emit: Emit) -> None:
        self._source = source
        self._options = options
        self._emit = emit
        self._max_pixels = int(options.get("max_pixels", MAX_PIXELS))
        self._running: set[str] = set()
        self._done = 0
        self._loop = asyncio.get_running_loop()
        self._pool: ThreadPoolExecutor

    def load(self) -> EngineInfo:
        Image.init()
        self._pool = ThreadPoolExecutor(self.threads(), "image")
        return EngineInfo(device=self.device)

    def threads(self) -> int:
        """How many requests are computed at once: Pillow uses one core for each, and lets others run meanwhile."""
        return int(self._options.get("threads", 1))

    def prepare(self, spec: RunSpec) -> tuple[Prepared, Job]:
        """What cannot work is refused here, by the operation's number and field. Raises as `planning.plan`."""
        refuse_unsupported(spec)
        if "image" not in spec.images:
            raise InvalidRequest("payload.image is missing", param="payload.image")
        steps = plan(
            spec.payload.get("operations") or [],
            {place: (image.width, image.height) for place, image in spec.images.items()},
            upscales=self.upscales,
            max_pixels=self._max_pixels,
        )
        output = spec.output
        job = Job(
            images=spec.images,
            steps=steps,
            format=None if output is None else output.format,
            quality=None if output is None else output.quality,
        )
        return Prepared(run_id=spec.run_id, prompt_tokens=0, need_tokens=0, memory_bytes=_memory(job)), job

    def run(self, spec: RunSpec, prompt: Job) -> None:
        self._running.add(spec.run_id)
        self._pool.submit(self._work, spec.run_id, prompt)

    def cancel(self, run_id: str) -> None:
        self._running.discard(run_id)  # its thread sees it before the next operation

    def check(self) -> None:
        pass

    def progress(self) -> int | None:
        return self._done if self._running else None

    def measured_memory(self) -> int:
        return Meter(self.device).used_bytes()

    def upscale(self, run_id: str, image: Image.Image, factor: int) -> Image.Image:
        """`factor` times larger, where there is a model. Raises Stopped for a run that was cancelled meanwhile."""
        raise UnsupportedParameter("upscale needs a model", param="payload.operations")

    # -- in a thread of the pool

    def _work(self, run_id: str, job: Job) -> None:
        try:
            event: tuple[Any, ...] = ("finished", self._computed(run_id, job))
        except Stopped:
            return
        except MemoryError:
            failure = EngineFailed("there was not enough memory for the image")
            event = ("failed", RunFailed(run_id=run_id, error=failure, retryable_here=True))
        except Exception as error:
            logger.exception("engine.imaging_failed")
            failure = EngineFailed(f"{type(error).__name__} while the image was processed")
            event = ("failed", RunFailed(run_id=run_id, error=failure, retryable_here=True))
        self._loop.call_soon_threadsafe(self._end, run_id, event)

    def _computed(self, run_id: str, job: Job) -> Finished:
        source = job.images["image"]
        images = {place: opened(image) for place, image in job.images.items()}
        name = source.source_format.lower()
        picture = Picture(
            image=images["image"], format=job.format or (name if name in FORMATS else "png"), quality=job.quality
        )
        for step in job.steps:
            self._go_on(run_id)
            picture = apply(picture, step, images, lambda image, factor: self.upscale(run_id, image, factor))
            self._done += 1
        self._go_on(run_id)
        encoded = encode(picture)
        self._done += 1
        image = {
            "data": encoded.data,
            "media_type": encoded.media_type,
            "width": encoded.width,
            "height": encoded.height,
            "seed": None,
        }
        return Finished(run_id=run_id, output={"images": [image]}, finish_reason=None)

    def _go_on(self, run_id: str) -> None:
        if run_id not in self._running:
            raise Stopped

    # -- on the event loop

    def _end(self, run_id: str, event: tuple[Any, ...]) -> None:
        if run_id in self._running:
            self._running.discard(run_id)
            self._emit(event)


def _memory(job: Job) -> int:
    """Bytes of main memory: the images that came, and the largest pair of what an operation reads and makes."""
    sizes = [(one.width, one.height) for one in job.images.values()]
    pixels = [width * height for width, height in (sizes[0], *(step.size for step in job.steps))]
    largest = max((one + other for one, other in pairwise(pixels)), default=pixels[0])
    return sum(len(image.pixels) for image in job.images.values()) + 4 * largest
