"""Image generation and editing inside the child: diffusers' pipelines; requests that come together share batches.

A batch is computed in a thread of its own; while it is, further requests gather. Its images become files in other
threads, so that the next batch need not wait for that. Requests share one when model, size, steps, guidance, sampler
and kind are equal. Options: variant, vae_tiling, vae_slicing, cpu_offload, batch_window_ms
(20: how long a first request waits for others), max_pixels (4,194,304).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from penstock.processors.engines.backend import Emit
from penstock.processors.engines.base import EngineInfo, Finished, Prepared, RunFailed, RunSpec
from penstock.processors.engines.batching.alike import AlikeBatches
from penstock.processors.engines.batching.batches import Batches
from penstock.processors.engines.batching.limit import BatchLimit
from penstock.processors.engines.batching.turns import turn_of
from penstock.processors.engines.images.diffusion_batch import DiffusionBatch
from penstock.processors.engines.images.diffusion_jobs import MAX_PIXELS, DiffusionJob, JobPart, make_job
from penstock.processors.engines.images.diffusion_pipelines import Pipelines
from penstock.processors.engines.process.loading import device_name, dtype_name, set_up_torch
from penstock.processors.engines.process.measuring import Meter
from penstock.processors.images.files import encode
from penstock.schemas.errors import EngineFailed, InvalidRequest

logger = logging.getLogger(__name__)

SLOTS = 8
BATCH_WINDOW_MS = 20


class DiffusionBackend:
    """One diffusion model."""

    def __init__(self, source: str, options: Mapping[str, Any], emit: Emit) -> None:
        self._source = source
        self._options = options
        self._emit = emit
        self._jobs: dict[str, DiffusionJob] = {}
        """Runs that nobody has heard the end of."""
        self._waiting: AlikeBatches[JobPart] = AlikeBatches(lambda part: part.job.key, lambda part: len(part.numbers))
        self._batches = Batches[JobPart, list[Any]](
            self._waiting,
            self,
            BatchLimit(int(options.get("slots", SLOTS))),
            emit,
            window_s=float(options.get("batch_window_ms", BATCH_WINDOW_MS)) / 1000,
        )
        self._loop = asyncio.get_running_loop()
        self._pipelines: Pipelines
        self._encoders: ThreadPoolExecutor

    def load(self) -> EngineInfo:
        set_up_torch(self._options)
        self._encoders = ThreadPoolExecutor(int(self._options.get("threads", 1)), "encode")
        self._pipelines = Pipelines(self._source, self._options)
        self._pipelines.listen(self._batches.moved)
        self._batches.start()
        return EngineInfo(device=device_name(self._options))

    def prepare(self, spec: RunSpec) -> tuple[Prepared, DiffusionJob]:
        """Raises UnsupportedParameter, InvalidRequest for what this model cannot do."""
        job = make_job(spec, self._pipelines, spec.model, int(self._options.get("max_pixels", MAX_PIXELS)))
        return Prepared(run_id=spec.run_id, prompt_tokens=0, need_tokens=0, memory_bytes=self._memory(job)), job

    def _memory(self, job: DiffusionJob) -> int:
        base = self._pipelines.base
        model = getattr(base, "unet", None) or getattr(base, "transformer", None)
        config: Any = {} if model is None else model.config
        widths = config.get("block_out_channels") or (config.get("attention_head_dim") or 64,)
        return run_need(
            pixels=job.width * job.height,
            rows=len(job.seeds),
            latent_scale=self._pipelines.scale,
            vae_width=int((base.vae.config.get("block_out_channels") or (128,))[0]),
            model_width=int(widths[0]),
            element_bytes=4 if dtype_name(self._options) == "float32" else 2,
            tiled=bool(self._options.get("vae_tiling")),
        )

    def run(self, spec: RunSpec, prompt: DiffusionJob) -> None:
        self._jobs[spec.run_id] = prompt
        self._waiting.add(JobPart(prompt, range(len(prompt.seeds))), turn_of(spec.priority, time.monotonic()))
        self._batches.look()

    def cancel(self, run_id: str) -> None:
        job = self._jobs.pop(run_id, None)
        if job is not None:
            job.cancelled = True  # its rows leave the batch after the step that is computed
            self._waiting.drop(lambda part: part.job is job)

    def check(self) -> None:
        self._batches.check()

    def progress(self) -> int | None:
        return self._batches.progress(busy=bool(self._jobs))

    def measured_memory(self) -> int:
        return Meter(device_name(self._options)).used_bytes()

    def compute(self, batch: Sequence[JobPart]) -> list[list[Any]]:
        return DiffusionBatch(batch, self._pipelines, self._tell).run()

    def weight(self, batch: Sequence[JobPart]) -> int:
        return sum(len(part.numbers) for part in batch)

    def wanted(self, item: JobPart) -> bool:
        return not item.job.cancelled

    def split(self, item: JobPart) -> Sequence[JobPart]:
        return [JobPart(item.job, [number]) for number in item.numbers]

    def ended(self, item: JobPart, result: list[Any] | EngineFailed) -> None:
        job = item.job
        if job.cancelled:
            return
        if isinstance(result, EngineFailed):
            self.cancel(job.run_id)
            self._emit(("failed", RunFailed(run_id=job.run_id, error=result, retryable_here=True)))
            return
        job.made |= dict(zip(item.numbers, result, strict=True))
        if len(job.made) == len(job.seeds):
            self._encoders.submit(self._encode, job, [job.made[number] for number in range(len(job.seeds))])

    def _tell(self, event: tuple[Any, ...]) -> None:
        """Called from another thread. Events of a run that has ended are dropped."""
        self._loop.call_soon_threadsafe(self._tell_if_running, event)

    def _tell_if_running(self, event: tuple[Any, ...]) -> None:
        run_id = event[1].run_id
        if run_id in self._jobs:
            if event[0] in ("finished", "failed"):
                del self._jobs[run_id]
            self._emit(event)

    def _encode(self, job: DiffusionJob, images: list[Any]) -> None:
        """In a thread of the encoders."""
        try:
            event: tuple[Any, ...] = ("finished", self._finished(job, images))
        except InvalidRequest as error:
            event = ("failed", RunFailed(run_id=job.run_id, error=error, retryable_here=False))
        except Exception as error:
            logger.exception("diffusion.encode_failed")
            failure = EngineFailed(f"{type(error).__name__} while the image was written")
            event = ("failed", RunFailed(run_id=job.run_id, error=failure, retryable_here=True))
        self._batches.moved()
        self._tell(event)

    def _finished(self, job: DiffusionJob, images: list[Any]) -> Finished:
        files: list[dict[str, Any]] = []
        for seed, image in zip(job.seeds, images, strict=True):
            data, media_type = encode(image, job.output, {**job.facts, "seed": seed})
            size = {"width": image.width, "height": image.height}
            files.append({"data": data, "media_type": media_type, **size, "seed": seed})
        return Finished(run_id=job.run_id, output={"images": files}, finish_reason="stop")


COPIES = 3
"""Tensors of the widest layer that are there together."""
TILE_PIXELS = 512 * 512
"""A VAE that works in tiles holds one of them."""


def run_need(
    *, pixels: int, rows: int, latent_scale: int, vae_width: int, model_width: int, element_bytes: int, tiled: bool
) -> int:
    """Bytes that a run of so many images takes while it goes through the model and, after it, the VAE's decoder.

    `vae_width` and `model_width` are the channels of the first blocks: activations are largest there.
    """
    decoding = (min(pixels, TILE_PIXELS) if tiled else pixels * rows) * vae_width * COPIES * element_bytes
    places = pixels // (latent_scale * latent_scale)
    # Guidance doubles the rows; a block keeps what it skips over, its queries, keys and values.
    stepping = 2 * rows * places * model_width * 4 * COPIES * element_bytes
    return max(decoding, stepping) + rows * pixels * 3 * 4
