"""A diffusers pipeline and its variants for editing, made of the same weights; what each can do. Needs torch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from penstock.processors.engines.images.samplers import Samplers
from penstock.processors.engines.process.loading import device_name, dtype_name
from penstock.schemas.errors import UnsupportedParameter

TEXT, IMAGE, INPAINT, INSTRUCT = "text_to_image", "image_to_image", "inpainting", "instruction"
_DROPS_ROWS = frozenset(
    {
        "StableDiffusionPipeline",
        "StableDiffusionImg2ImgPipeline",
        "StableDiffusionXLPipeline",
        "StableDiffusionXLImg2ImgPipeline",
    }
)
"""Pipelines whose steps see of a batch only what a callback can rewrite."""


class Pipelines:
    """The pipeline that a folder holds, and those that diffusers makes of its parts."""

    def __init__(self, folder: str, options: Mapping[str, Any]) -> None:
        import torch
        from diffusers import DiffusionPipeline

        told: dict[str, Any] = {"torch_dtype": getattr(torch, dtype_name(options)), "use_safetensors": True}
        if options.get("variant"):
            told["variant"] = options["variant"]
        base: Any = DiffusionPipeline.from_pretrained(folder, **told)
        for adapter in options.get("adapters", ()):
            base.load_lora_weights(str(Path(adapter)))
            base.fuse_lora()
            base.unload_lora_weights()
        base.set_progress_bar_config(disable=True)
        if options.get("vae_tiling"):
            base.vae.enable_tiling()
        if options.get("vae_slicing"):
            base.vae.enable_slicing()
        device = device_name(options)
        if options.get("cpu_offload") and device != "cpu":
            base.enable_model_cpu_offload(device=device)
        else:
            base.to(device)
        self.base = base
        self.name = type(base).__name__
        self.samplers = Samplers(base.scheduler)
        self._made: dict[str, Any] = {}

    @cached_property
    def own_kind(self) -> str:
        """What the folder's own pipeline does."""
        if "Inpaint" in self.name:
            return INPAINT
        parameters = inspect.signature(self.base.__call__).parameters
        if "image" in parameters and "strength" not in parameters and "mask_image" not in parameters:
            return INSTRUCT
        return IMAGE if "Img2Img" in self.name else TEXT

    @property
    def scale(self) -> int:
        """Pixels of a side for one place of the latents."""
        return int(getattr(self.base, "vae_scale_factor", 8))

    @property
    def multiple(self) -> int:
        """Sides are multiples of this: transformers put two places into one."""
        return self.scale * (2 if getattr(self.base, "transformer", None) is not None else 1)

    @property
    def side(self) -> int:
        """The side of its images in pixels, where nobody says another."""
        size = getattr(self.base, "default_sample_size", None)
        if size is None:
            model = getattr(self.base, "unet", None) or self.base.transformer
            size = model.config.sample_size
        return int(size if isinstance(size, int) else size[0]) * self.scale

    def kind_for(self, task: str, payload: Mapping[str, Any]) -> str:
        """The kind of pipeline that a request needs. Raises UnsupportedParameter for one that there is not."""
        if task == "image_generation":
            if self.own_kind not in (TEXT, IMAGE):
                raise UnsupportedParameter("this model changes images: it needs one (task image_editing)", param="task")
            kind = TEXT
        elif payload.get("mask") is not None:
            kind = INPAINT
        elif self.own_kind == INPAINT:
            raise UnsupportedParameter("this model needs payload.mask, the place to change", param="payload.mask")
        else:
            kind = INSTRUCT if self.own_kind == INSTRUCT else IMAGE
        if self.of(kind) is None:
            param = "payload.mask" if kind == INPAINT else "task"
            raise UnsupportedParameter(f"{param}: this model cannot do {kind.replace('_', ' ')}", param=param)
        return kind

    def of(self, kind: str) -> Any:
        """The pipeline of a kind, of the same weights; None when diffusers has none."""
        if kind not in self._made:
            self._made[kind] = self.base if kind == self.own_kind else self._variant(kind)
        return self._made[kind]

    def _variant(self, kind: str) -> Any:
        import diffusers

        if INSTRUCT in (kind, self.own_kind) or self.own_kind == INPAINT:
            return None
        auto = {
            TEXT: diffusers.AutoPipelineForText2Image,
            IMAGE: diffusers.AutoPipelineForImage2Image,
            INPAINT: diffusers.AutoPipelineForInpainting,
        }
        try:
            made: Any = auto[kind].from_pipe(self.base)
        except ValueError:
            return None
        made.set_progress_bar_config(disable=True)
        return made

    def parameters(self, kind: str) -> frozenset[str]:
        """What the pipeline of a kind takes."""
        return frozenset(inspect.signature(self.of(kind).__call__).parameters)

    def drops_rows(self, kind: str) -> bool:
        """Whether images can be taken out of a batch that runs."""
        model = getattr(self.of(kind), "unet", None)
        return (
            type(self.of(kind)).__name__ in _DROPS_ROWS
            and model is not None
            and model.config.time_cond_proj_dim is None
            and model.config.in_channels == model.config.out_channels
        )

    @property
    def shows_previews(self) -> bool:
        """Whether latents on their way are an image that the VAE can decode."""
        return not hasattr(self.base, "_pack_latents") and getattr(self.base, "vae", None) is not None

    def listen(self, bump: Callable[[], None]) -> None:
        """Call `bump` as the computing moves, within a step too: one of a large image takes a while."""
        for part in self.base.components.values():
            for module in part.modules() if hasattr(part, "modules") else ():
                if type(module).__name__.endswith(("Block", "Block2D", "Layer", "Transformer2DModel")):
                    module.register_forward_hook(_moved(bump))


def _moved(bump: Callable[[], None]) -> Callable[..., None]:
    def hook(*_: Any) -> None:
        bump()

    return hook
