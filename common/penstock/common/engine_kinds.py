"""The kinds of engines: one entry each, of which worker, gateway and command line learn all they know of a kind.

Classes and functions are named as `module:name` and loaded by the worker alone, when it needs them: nobody imports
torch for this list. A new kind is its module and an entry here.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from penstock.schemas.abilities import READ_IMAGES, UPSCALE

_SIZING = "penstock.processors.models.sizing"
_FACTORY = "penstock.processors.models.factory"

CHILD_OPTIONS = frozenset({"load_timeout_s", "silent_s", "threads", "slots"})
"""Options of every engine in a process of its own."""
OF_THE_ENTRY = frozenset(
    {"device", "dtype", "quantization", "window", "trust_remote_code", "granted_bytes", "adapters"}
)
"""What engines are told in `options` although it stands elsewhere in a model's entry."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineKind:
    """What is particular to a kind of engine."""

    name: str
    tasks: tuple[str, ...]
    """The tasks that it can serve; the first is what an entry serves that names none."""
    slots: int
    """Runs that are together on one engine, where an entry does not say it."""
    local: bool = True
    """Whether it runs on this machine, with memory to be granted."""
    backend: str | None = None
    """The class of its `Backend`, for one that lives in a process of its own; else `maker` makes the engine."""
    maker: str = f"{_FACTORY}:make_child"
    sizer: str = f"{_SIZING}:own_size"
    """Finds out before it is loaded how much memory it takes."""
    files_need: str = f"{_SIZING}:weights_need"
    """Bytes that it takes with the files of a model, for the sizer `size_of_files`."""
    estimate: str = f"{_SIZING}:slots_estimate"
    """What its runs will need, before it is loaded."""
    openai: bool = False
    """Whether it passes on whatever OpenAI's protocol has."""
    abilities: frozenset[str] = frozenset()
    """What it can do beyond its tasks (`penstock.schemas.abilities`)."""
    opens_images: bool = False
    """Whether it opens images itself, under guard: it is given files as they came, else pixels."""
    options: frozenset[str] | None = None
    """The options that it knows; None: it looks at them itself."""

    def unknown_option(self, options: dict[str, Any]) -> str | None:
        """An option that it does not know, if there is one."""
        if self.options is None:
            return None
        return next((name for name in options if name not in self.options | CHILD_OPTIONS | OF_THE_ENTRY), None)


KINDS: dict[str, EngineKind] = {
    kind.name: kind
    for kind in (
        EngineKind(
            name="text",
            tasks=("text_generation", "summarization"),
            slots=64,
            backend="penstock.processors.engines.text.backend:TextBackend",
            sizer=f"{_SIZING}:size_of_files",
            files_need=f"{_SIZING}:text_need",
            estimate=f"{_SIZING}:text_estimate",
        ),
        EngineKind(
            name="embedding",
            tasks=("embedding",),
            slots=256,
            backend="penstock.processors.engines.text.embedding:EmbeddingBackend",
            sizer=f"{_SIZING}:size_of_files",
        ),
        EngineKind(
            name="diffusers",
            tasks=("image_generation", "image_editing"),
            slots=8,
            backend="penstock.processors.engines.images.diffusion:DiffusionBackend",
            sizer=f"{_SIZING}:size_of_files",
            files_need="penstock.processors.models.diffusion_sizing:files_need",
            options=frozenset({"variant", "vae_tiling", "vae_slicing", "cpu_offload", "batch_window_ms", "max_pixels"}),
        ),
        EngineKind(
            name="imaging",
            tasks=("image_processing",),
            slots=16,
            backend="penstock.processors.engines.images.imaging:ImagingBackend",
            sizer="penstock.processors.models.vision_sizing:size_of_imaging",
            opens_images=True,
            options=frozenset({"max_pixels"}),
        ),
        EngineKind(
            name="upscaling",
            tasks=("image_processing",),
            slots=16,
            backend="penstock.processors.engines.images.upscaling:UpscalingBackend",
            sizer=f"{_SIZING}:size_of_files",
            files_need="penstock.processors.models.vision_sizing:upscaling_need",
            abilities=frozenset({UPSCALE}),
            options=frozenset({"max_pixels", "tile"}),
        ),
        EngineKind(
            name="vision",
            tasks=("image_to_text", "text_generation"),
            slots=4,
            backend="penstock.processors.engines.images.vision:VisionBackend",
            sizer=f"{_SIZING}:size_of_files",
            files_need="penstock.processors.models.vision_sizing:vision_need",
            abilities=frozenset({READ_IMAGES}),
            options=frozenset({"caption_prompt", "batch_window_ms"}),
        ),
        EngineKind(
            name="remote",
            tasks=("text_generation", "embedding", "summarization"),
            slots=8,
            local=False,
            maker=f"{_FACTORY}:make_remote",
            openai=True,
        ),
        EngineKind(
            name="managed",
            tasks=("text_generation", "embedding", "summarization"),
            slots=8,
            maker=f"{_FACTORY}:make_managed",
            sizer=f"{_SIZING}:managed_size",
            openai=True,
        ),
        EngineKind(
            name="noop",
            tasks=("text_generation", "embedding", "summarization"),
            slots=256,
            local=False,
            maker=f"{_FACTORY}:make_noop",
        ),
    )
}
"""By name."""


def load(name: str) -> Any:
    """The class or function that `module:name` names."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)
