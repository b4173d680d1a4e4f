"""What backends share that work on images, one request a thread: planning, running, giving up, telling the outcome."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from heapq import heappop, heappush
from itertools import pairwise
from typing import Any

from penstock.processors.engines.backend import Emit
from penstock.processors.engines.base import EngineInfo, Finished, Prepared, RunFailed, RunSpec, refuse_unsupported
from penstock.processors.engines.batching.turns import turn_of
from penstock.processors.engines.process.measuring import Meter
from penstock.processors.guarded.process import JobStopped
from penstock.processors.images.decoded import DecodedImage
from penstock.processors.images.encoded import EncodedImage
from penstock.processors.images.operations import Encoded
from penstock.processors.images.planning import MAX_PIXELS, Step, plan
from penstock.schemas.errors import EngineFailed, InvalidRequest, PenstockError, TooLarge
from penstock.schemas.image_operations import FORMATS

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A request's images by place, and what is to be done with that at `image`: in its own words, and planned.

    A backend gets either `images` or `files`, as its kind says. `form` is that of the output, where no step says
    another; `quality` None: the form's own.
    """

    images: Mapping[str, DecodedImage]
    files: Mapping[str, EncodedImage]
    operations: Sequence[Mapping[str, Any]]
    steps: list[Step]
    form: str
    quality: int | None


class ImageWork:
    """`max_pixels` (64 megapixels) bounds every image on the way."""

    device = "cpu"
    upscales = False

    def __init__(self, source: str, options: Mapping[str, Any], emit: Emit) -> None:
        self._source = source
        self._options = options
        self._emit = emit
        self._max_pixels = int(options.get("max_pixels", MAX_PIXELS))
        self._running: set[str] = set()
        self._waiting: list[tuple[float, int, str, Job]] = []
        """A heap of (turn, number of arrival, run, its job). Each push and pop is one step for the interpreter."""
        self._numbers = itertools.count()
        self._done = 0
        self._loop = asyncio.get_running_loop()
        self._pool: ThreadPoolExecutor

    def compute(self, run_id: str, job: Job) -> Encoded:
        """In a thread of the pool. Raises PenstockError, MemoryError, and Stopped for what was cancelled meanwhile."""
        raise NotImplementedError

    def load(self) -> EngineInfo:
        self._pool = ThreadPoolExecutor(self.threads(), "image")
        return EngineInfo(device=self.device)

    def threads(self) -> int:
        """How many requests are computed at once: Pillow uses one core for each, and lets others run meanwhile."""
        return int(self._options.get("threads", 1))

    def prepare(self, spec: RunSpec) -> tuple[Prepared, Job]:
        """What cannot work is refused here, by the operation's number and field. Raises as `planning.plan`."""
        refuse_unsupported(spec)
        images: Mapping[str, DecodedImage | EncodedImage] = {**spec.images, **spec.files}
        if "image" not in images:
            raise InvalidRequest("payload.image is missing", param="payload.image")
        self._check_sizes(images)
        operations = spec.payload.get("operations") or []
        steps = plan(
            operations,
            {place: (image.width, image.height) for place, image in images.items()},
            upscales=self.upscales,
            max_pixels=self._max_pixels,
        )
        name = images["image"].source_format.lower()
        output = spec.output
        job = Job(
            images=spec.images,
            files=spec.files,
            operations=operations,
            steps=steps,
            form=(output and output.format) or (name if name in FORMATS else "png"),
            quality=None if output is None else output.quality,
        )
        memory_bytes = _memory(images, steps)
        return Prepared(run_id=spec.run_id, prompt_tokens=0, need_tokens=0, memory_bytes=memory_bytes), job

    def _check_sizes(self, images: Mapping[str, DecodedImage | EncodedImage]) -> None:
        for place, image in images.items():
            if image.width * image.height > self._max_pixels:
                raise TooLarge(
                    f"payload.{place} is {image.width} x {image.height} pixels: this model takes {self._max_pixels} in"
                    " all",
                    param=f"payload.{place}",
                )

    def run(self, spec: RunSpec, prompt: Job) -> None:
        self._running.add(spec.run_id)
        entry = (turn_of(spec.priority, time.monotonic()), next(self._numbers), spec.run_id, prompt)
        heappush(self._waiting, entry)
        self._pool.submit(self._work_next)

    def cancel(self, run_id: str) -> None:
        self._running.discard(run_id)  # its thread sees it before the next operation

    def check(self) -> None:
        pass

    def progress(self) -> int | None:
        return self._done if self._running else None

    def measured_memory(self) -> int:
        return Meter(self.device).used_bytes()

    def go_on(self, run_id: str) -> None:
        """Called between the steps of a run. Raises Stopped."""
        if run_id not in self._running:
            raise JobStopped
        self._done += 1

    # -- in a thread of the pool

    def _work_next(self) -> None:
        _, _, run_id, job = heappop(self._waiting)
        self._work(run_id, job)

    def _work(self, run_id: str, job: Job) -> None:
        try:
            self.go_on(run_id)
            event: tuple[Any, ...] = ("finished", _finished(run_id, self.compute(run_id, job)))
        except JobStopped:
            return
        except MemoryError:
            failure = EngineFailed("there was not enough memory for the image")
            event = ("failed", RunFailed(run_id=run_id, error=failure, retryable_here=True))
        except PenstockError as error:
            again = error.retryable or isinstance(error, EngineFailed)
            event = ("failed", RunFailed(run_id=run_id, error=error, retryable_here=again))
        except Exception as error:
            logger.exception("engine.imaging_failed")
            failure = EngineFailed(f"{type(error).__name__} while the image was processed")
            event = ("failed", RunFailed(run_id=run_id, error=failure, retryable_here=True))
        self._loop.call_soon_threadsafe(self._end, run_id, event)

    # -- on the event loop

    def _end(self, run_id: str, event: tuple[Any, ...]) -> None:
        if run_id in self._running:
            self._running.discard(run_id)
            self._emit(event)


def _finished(run_id: str, made: Encoded) -> Finished:
    return Finished(run_id=run_id, output={"images": [{**asdict(made), "seed": None}]}, finish_reason=None)


def _memory(images: Mapping[str, DecodedImage | EncodedImage], steps: Sequence[Step]) -> int:
    """Bytes of main memory: the images that came, and the largest pair of what an operation reads and makes."""
    came = images["image"].width, images["image"].height
    pixels = [width * height for width, height in (came, *(step.size for step in steps))]
    largest = max((one + other for one, other in pairwise(pixels)), default=pixels[0])
    return sum(image.pixel_bytes for image in images.values()) + 4 * largest
