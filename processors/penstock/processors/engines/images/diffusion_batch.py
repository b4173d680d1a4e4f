"""One batch of images through a pipeline: reports steps, shows previews, removes what is cancelled. Needs torch."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Sequence
from typing import Any

from penstock.processors.engines.base import Preview, StepProgress
from penstock.processors.engines.images.diffusion_jobs import DiffusionJob, JobPart
from penstock.processors.engines.images.diffusion_pipelines import INPAINT, TEXT, Pipelines

logger = logging.getLogger(__name__)

Tell = Callable[[Any], None]
PREVIEW_PLACES = 32
"""A preview shows at most so many places of the latents a side."""


class AllCancelled(Exception):
    """Nobody waits for any image of the batch."""


class DiffusionBatch:
    """Parts of jobs with equal keys."""

    def __init__(self, parts: Sequence[JobPart], pipelines: Pipelines, tell: Tell) -> None:
        self._parts = parts
        self._jobs = list(dict.fromkeys(part.job for part in parts))
        self._pipelines = pipelines
        self._tell = tell
        self._kind = self._jobs[0].kind
        self._pipe = pipelines.of(self._kind)
        self._rows: list[tuple[DiffusionJob, int]] = [(part.job, number) for part in parts for number in part.numbers]
        self._generators: list[Any] = []

    def run(self) -> list[list[Any]]:
        """Pillow images of each part; none for those that were cancelled. Raises what the pipeline raises."""
        import torch

        first = self._jobs[0]
        self._pipe.scheduler = self._pipelines.samplers.make(first.sampler)
        self._generators = [torch.Generator("cpu").manual_seed(job.seeds[number]) for job, number in self._rows]
        taken = self._pipelines.parameters(self._kind)
        told: dict[str, Any] = {
            "prompt": [job.prompt for job, _ in self._rows],
            "num_inference_steps": first.steps,
            "guidance_scale": first.guidance,
            "generator": self._generators,
            "callback_on_step_end": self._on_step,
            "callback_on_step_end_tensor_inputs": list(getattr(self._pipe, "_callback_tensor_inputs", ["latents"])),
        }
        if "negative_prompt" in taken and any(job.negative_prompt for job in self._jobs):
            told["negative_prompt"] = [job.negative_prompt for job, _ in self._rows]
        # Of those that change an image some take its size, others (Flux) would make one of their own.
        told |= {"width": first.width, "height": first.height}
        if self._kind != TEXT:
            told["image"] = [job.image for job, _ in self._rows]
        if self._kind == INPAINT:
            told["mask_image"] = [job.mask for job, _ in self._rows]
        if first.strength is not None:
            told["strength"] = first.strength
        if not self._pipelines.drops_rows(self._kind):
            told["callback_on_step_end_tensor_inputs"] = ["latents"]
        try:
            with torch.inference_mode():
                images = self._pipe(**{name: value for name, value in told.items() if name in taken}).images
        except AllCancelled:
            return [[] for _ in self._parts]
        made = dict(zip(self._rows, images, strict=True))
        return [
            [] if part.job.cancelled else [made[part.job, number] for number in part.numbers] for part in self._parts
        ]

    def _on_step(self, pipe: Any, index: int, _: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        if all(job.cancelled for job in self._jobs):
            raise AllCancelled
        if any(job.cancelled for job, _ in self._rows) and self._pipelines.drops_rows(self._kind):
            tensors = self._without_cancelled(pipe, tensors)
        steps = int(pipe.num_timesteps)
        for job in self._jobs:
            if not job.cancelled:
                self._tell(("progress", StepProgress(run_id=job.run_id, step=index + 1, steps=steps)))
                if job.previews is not None and (index + 1) % job.previews == 0 and index + 1 < steps:
                    self._preview(pipe, job, tensors["latents"], index + 1, steps)
        return tensors

    def _without_cancelled(self, pipe: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        """What remains to be computed: rows of tensors, of generators and of what the scheduler remembers."""
        before = len(self._rows)
        keep = [row for row, (job, _) in enumerate(self._rows) if not job.cancelled]
        places = tensors["latents"].shape

        def kept(value: Any) -> Any:
            if getattr(value, "ndim", 0) and value.shape[0] == before:
                return value[keep]
            if getattr(value, "ndim", 0) and value.shape[0] == 2 * before:  # guidance: without the prompt, then with it
                return value[keep + [before + row for row in keep]]
            return value

        for name, value in vars(pipe.scheduler).items():
            if getattr(value, "shape", None) == places:
                setattr(pipe.scheduler, name, value[keep])
            elif isinstance(value, list):
                items: list[Any] = value
                setattr(
                    pipe.scheduler,
                    name,
                    [item[keep] if getattr(item, "shape", None) == places else item for item in items],
                )
        self._rows = [self._rows[row] for row in keep]
        self._generators[:] = [self._generators[row] for row in keep]  # the pipeline holds this very list
        return {name: kept(value) for name, value in tensors.items()}

    def _preview(self, pipe: Any, job: DiffusionJob, latents: Any, step: int, steps: int) -> None:
        import torch

        row = next(row for row, (one, _) in enumerate(self._rows) if one is job)
        try:
            small = latents[row : row + 1]
            longest = max(small.shape[-2:])
            if longest > PREVIEW_PLACES:
                small = torch.nn.functional.interpolate(small, scale_factor=PREVIEW_PLACES / longest, mode="area")
            shift = getattr(pipe.vae.config, "shift_factor", None) or 0.0
            decoded = pipe.vae.decode(small / pipe.vae.config.scaling_factor + shift, return_dict=False)[0]
            image = pipe.image_processor.postprocess(decoded.detach(), output_type="pil")[0]
        except Exception:  # the images go on without it
            logger.exception("diffusion.preview_failed")
            return
        file = io.BytesIO()
        image.save(file, format="jpeg", quality=80)
        self._tell(
            (
                "preview",
                Preview(
                    run_id=job.run_id,
                    step=step,
                    steps=steps,
                    image=file.getvalue(),
                    media_type="image/jpeg",
                    width=image.width,
                    height=image.height,
                ),
            )
        )
