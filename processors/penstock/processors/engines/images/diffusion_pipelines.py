"""A diffusers pipeline and its variants for editing, made of the same weights; what each can do. Needs torch."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from penstock.processors.engines.process.loading import device_name, dtype_name
from penstock.schemas.errors import UnsupportedParameter

_KARRAS = {"use_karras_sigmas": True}
SAMPLERS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "euler": ("EulerDiscreteScheduler", {}),
    "euler_a": ("EulerAncestralDiscreteScheduler", {}),
    "euler_karras": ("EulerDiscreteScheduler", _KARRAS),
    "ddim": ("DDIMScheduler", {}),
    "ddpm": ("DDPMScheduler", {}),
    "dpm++_2m": ("DPMSolverMultistepScheduler", {}),
    "dpm++_2m_karras": ("DPMSolverMultistepScheduler", _KARRAS),
    "dpm2": ("KDPM2DiscreteScheduler", {}),
    "dpm2_a": ("KDPM2AncestralDiscreteScheduler", {}),
    "deis": ("DEISMultistepScheduler", {}),
    "heun": ("HeunDiscreteScheduler", {}),
    "lcm": ("LCMScheduler", {}),
    "lms": ("LMSDiscreteScheduler", {}),
    "pndm": ("PNDMScheduler", {}),
    "unipc": ("UniPCMultistepScheduler", {}),
}
FLOW_SAMPLERS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "euler": ("FlowMatchEulerDiscreteScheduler", {}),
    "heun": ("FlowMatchHeunDiscreteScheduler", {}),
}
"""Of models that were trained by flow matching, as SD3 and Flux."""


def _squeezed(name: str) -> str:
    plain = re.sub(r"[\s_-]+", "", name.lower()).removesuffix("scheduler")
    return plain.replace("pp", "++").replace("ancestral", "a")


class Samplers:
    """The samplers of one model. Each batch gets a scheduler of its own: they have a state."""

    def __init__(self, scheduler: Any) -> None:
        self._own = scheduler
        flow = type(scheduler).__name__.startswith("FlowMatch")
        compatible = {kind.__name__ for kind in getattr(scheduler, "compatibles", ())} | {type(scheduler).__name__}
        known = FLOW_SAMPLERS if flow else SAMPLERS
        self._known = {name: made for name, made in known.items() if flow or made[0] in compatible}

    def named(self, name: str | None) -> str | None:
        """The sampler of this name, in any spelling: `Euler a`, `DPMPP-2M`. Raises UnsupportedParameter."""
        if name is None:
            return None
        squeezed = _squeezed(name)
        # The name of a scheduler's class is that of its first sampler.
        names = ((known, made[0]) for known, made in self._known.items())
        found = next((known for known, kind in names if squeezed in (_squeezed(known), _squeezed(kind))), None)
        if found is None:
            raise UnsupportedParameter(
                f"payload.sampler: this model knows {', '.join(sorted(self._known))}", param="payload.sampler"
            )
        return found

    def make(self, name: str | None) -> Any:
        """A new scheduler; None: the model's own."""
        import diffusers

        if name is None:
            return type(self._own).from_config(self._own.config)
        kind, changes = self._known[name]
        return getattr(diffusers, kind).from_config(self._own.config, **changes)


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
