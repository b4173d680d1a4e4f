"""Image processing without a model: each request in a process that opens its images and works on them, under guard.

So pixels stay where they were decoded: files come in, a file goes out. `upscaling` is for what needs a model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.processors.engines.backend import Emit
from penstock.processors.engines.base import EngineInfo
from penstock.processors.engines.images.work import ImageWork, Job
from penstock.processors.hardware.processes import own_bytes
from penstock.processors.images.operations import Encoded
from penstock.processors.images.processors import ImageJob, ImageProcessors


class ImagingBackend(ImageWork):
    """Pillow's operations, on as many processes as threads are granted."""

    def __init__(self, source: str, options: Mapping[str, Any], emit: Emit) -> None:
        super().__init__(source, options, emit)
        self.processors = ImageProcessors(max_pixels=self._max_pixels)

    def load(self) -> EngineInfo:
        self.processors.start(self.threads())
        return super().load()

    def compute(self, run_id: str, job: Job) -> Encoded:
        about = ImageJob(images=job.files, operations=job.operations, form=job.form, quality=job.quality)
        try:
            return self.processors.process(run_id, about)
        finally:
            self._done += 1

    def cancel(self, run_id: str) -> None:
        super().cancel(run_id)
        self.processors.pool.stop(run_id)

    def progress(self) -> int | None:
        """Its processes have limits of their own: what hangs is ended there."""
        return None

    def measured_memory(self) -> int:
        return super().measured_memory() + sum(own_bytes(pid) or 0 for pid in self.processors.pool.pids())
