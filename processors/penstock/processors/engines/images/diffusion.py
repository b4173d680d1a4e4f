"""Image generation and editing inside the child: diffusers' pipelines; requests that come together share batches.

A batch is computed in a thread of its own; while it is, further requests gather. Its images become files in other
threads, so that the next batch need not wait for that. Requests share one when model, size, steps, guidance, sampler
and kind are equal. Options: variant, vae_tiling, vae_slicing, cpu_offload, batch_window_ms
(20: how long a first request waits for others), max_pixels (4,194,304).
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from penstock.processors.engines.backend import Emit
from penstock.processors.engines.base import EngineInfo, Finished, Prepared, RunFailed, RunSpec
from penstock.processors.engines.batching.window import BatchWindow
from penstock.processors.engines.images.diffusion_batch import AllCancelled, Batch
from penstock.processors.engines.images.diffusion_jobs import MAX_PIXELS, Job, make_job
from penstock.processors.engines.images.diffusion_memory import run_need
from penstock.processors.engines.images.diffusion_pipelines import Pipelines
from penstock.processors.engines.images.files import encode
from penstock.processors.engines.process.loading import device_name, dtype_name, limit_device_memory
from penstock.processors.engines.process.measuring import Meter
from penstock.schemas.errors import EngineFailed

logger = logging.getLogger(__name__)

SLOTS = 8
BATCH_WINDOW_MS = 20


class DiffusionBackend:
    """One diffusion model."""

    def __init__(self, source: str, options: Mapping[str, Any], emit: Emit) -> None:
        self._source = source
        self._options = options
        self._emit = emit
        self._max_rows = int(options.get("slots", SLOTS))
        window_s = float(options.get("batch_window_ms", BATCH_WINDOW_MS)) / 1000
        self._gathering = BatchWindow(window_s, self._begin_batch)
        self._waiting: list[Job] = []
        self._running: dict[str, Job] = {}
        self._batches: queue.SimpleQueue[list[Job]] = queue.SimpleQueue()
        self._computing = False
        self._moves = 0
        self._loop = asyncio.get_running_loop()
        self._pipelines: Pipelines
        self._encoders: ThreadPoolExecutor

    def load(self) -> EngineInfo:
        import torch

        threads = int(self._options.get("threads", 1))
        torch.set_num_threads(threads)
        self._encoders = ThreadPoolExecutor(threads, "encode")
        limit_device_memory(self._options)
        self._pipelines = Pipelines(self._source, self._options)
        self._pipelines.listen(self._bump)
        threading.Thread(target=self._compute, name="compute", daemon=True).start()
        return EngineInfo(device=device_name(self._options))

    def _bump(self) -> None:
        self._moves += 1

    def prepare(self, spec: RunSpec) -> tuple[Prepared, Job]:
        """Raises UnsupportedParameter, InvalidRequest for what this model cannot do."""
        job = make_job(spec, self._pipelines, spec.model, int(self._options.get("max_pixels", MAX_PIXELS)))
        return Prepared(run_id=spec.run_id, prompt_tokens=0, need_tokens=0, memory_bytes=self._memory(job)), job

    def _memory(self, job: Job) -> int:
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

    def run(self, spec: RunSpec, prompt: Job) -> None:
        self._waiting.append(prompt)
        self._gather()

    def cancel(self, run_id: str) -> None:
        self._waiting = [job for job in self._waiting if job.run_id != run_id]
        job = self._running.pop(run_id, None)
        if job is not None:
            job.cancelled = True  # its rows leave the batch after the step that is computed

    def check(self) -> None:
        pass

    def progress(self) -> int | None:
        return self._moves if self._computing or self._running else None

    def measured_memory(self) -> int:
        return Meter(device_name(self._options)).used_bytes()

    # -- batches

    def _gather(self) -> None:
        if not self._computing and self._waiting:
            rows = sum(len(job.seeds) for job in self._next_batch())
            self._gathering.look(full=rows >= self._max_rows)

    def _next_batch(self) -> list[Job]:
        """What waits longest, and with it what shares its key."""
        batch: list[Job] = []
        rows = 0
        for job in [job for job in self._waiting if job.key == self._waiting[0].key]:
            if batch and rows + len(job.seeds) > self._max_rows:
                break
            batch.append(job)
            rows += len(job.seeds)
        return batch

    def _begin_batch(self) -> None:
        if self._computing or not (batch := self._next_batch()):
            return
        chosen = {job.run_id for job in batch}
        self._waiting = [job for job in self._waiting if job.run_id not in chosen]
        self._running |= {job.run_id: job for job in batch}
        self._computing = True
        self._batches.put(batch)

    def _compute(self) -> None:
        """The thread that computes, for ever."""
        while True:
            batch = self._batches.get()
            self._moves += 1
            self._run_batch(batch)
            self._loop.call_soon_threadsafe(self._end_batch)

    def _run_batch(self, batch: list[Job]) -> None:
        """Runs all together; after a fault each by itself, so that only who brings it about fails."""
        failure: Exception | None = None
        try:
            made = Batch(batch, self._pipelines, self._tell).run()
            for job in batch:
                if job.run_id in made:
                    self._encoders.submit(self._encode, job, made[job.run_id])
        except AllCancelled:
            pass
        except Exception as error:
            failure = error
        if failure is None:
            return
        # Outside of the except block: its traceback would hold the tensors of the failed batch.
        self._clear()
        left = [job for job in batch if not job.cancelled]
        logger.error("diffusion.batch_failed runs=%d error=%s", len(batch), type(failure).__name__, exc_info=failure)
        if len(batch) > 1:
            for job in left:
                self._run_batch([job])
        for job in left if len(batch) == 1 else ():
            error = EngineFailed(f"{type(failure).__name__} while the image was made")
            self._tell(("failed", RunFailed(run_id=job.run_id, error=error, retryable_here=True)))

    def _clear(self) -> None:
        import gc

        import torch

        gc.collect()
        if torch.cuda.is_available() and device_name(self._options) != "cpu":
            torch.cuda.empty_cache()

    def _tell(self, event: tuple[Any, ...]) -> None:
        """From the computing thread: what is told of a run that is over is dropped."""
        self._loop.call_soon_threadsafe(self._tell_if_running, event)

    def _tell_if_running(self, event: tuple[Any, ...]) -> None:
        run_id = event[1].run_id
        if run_id in self._running:
            if event[0] in ("finished", "failed"):
                del self._running[run_id]
            self._emit(event)

    def _end_batch(self) -> None:
        self._computing = False
        self._gather()

    def _encode(self, job: Job, images: list[Any]) -> None:
        """In a thread of the encoders."""
        try:
            event: tuple[Any, ...] = ("finished", self._finished(job, images))
        except Exception as error:
            logger.exception("diffusion.encode_failed")
            failure = EngineFailed(f"{type(error).__name__} while the image was written")
            event = ("failed", RunFailed(run_id=job.run_id, error=failure, retryable_here=True))
        self._bump()
        self._tell(event)

    def _finished(self, job: Job, images: list[Any]) -> Finished:
        files: list[dict[str, Any]] = []
        for seed, image in zip(job.seeds, images, strict=True):
            data, media_type = encode(image, job.output, {**job.facts, "seed": seed})
            size = {"width": image.width, "height": image.height}
            files.append({"data": data, "media_type": media_type, **size, "seed": seed})
        return Finished(run_id=job.run_id, output={"images": files}, finish_reason="stop")
