"""The kinds of engines: one entry each, of which worker, gateway and command line learn all they know of a kind.

Classes and functions are named as `module:name` and loaded by the worker alone, when it needs them: nobody imports
torch for this list. A new kind is its module and an entry here.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from penstock.common.engine_options import (
    ABOVE_ZERO,
    COMMAND,
    FLAG,
    HEADER_NAMES,
    HEADERS,
    NUMBER,
    TEXT,
    VARIABLES,
    Options,
    names_for,
    one_of,
    whole,
)
from penstock.schemas.abilities import READ_IMAGES, UPSCALE

_SIZING = "penstock.processors.models.sizing"
_FACTORY = "penstock.processors.models.factory"

PROCESS_OPTIONS: Options = {"load_timeout_s": ABOVE_ZERO, "silent_s": ABOVE_ZERO, "threads": whole(1)}
"""Options of every engine in processes of its own."""
IMAGE_FIELDS = ("negative_prompt", "inference_steps", "guidance_scale", "seed", "sampler", "strength")
"""Fields of the payload of an image that OpenAI's API does not have."""
REMOTE_OPTIONS: Options = {
    "tokens_per_minute": ABOVE_ZERO,
    "headers": HEADERS,
    "caller_headers": HEADER_NAMES,
    "remote_model": TEXT,
    "api_key_env": TEXT,
    "timeout_s": ABOVE_ZERO,
    "patience_s": NUMBER,
    "continue": one_of("none", "prefix"),
    "caption_prompt": TEXT,
    "image_fields": names_for(*IMAGE_FIELDS),
}
"""Options of every engine that speaks to an OpenAI-compatible server."""
REMOTE_TASKS = (
    "text_generation", "embedding", "summarization", "image_generation", "image_editing", "image_to_text",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineKind:
    """What is particular to a kind of engine."""

    name: str
    tasks: tuple[str, ...]
    """The tasks that it can serve."""
    usual: int = 1
    """How many of them, from the first on, are served by an entry that names none."""
    slots: int
    """Runs that are together on one engine, where an entry does not say it."""
    options: Options
    """Its own options: a local engine also has PROCESS_OPTIONS."""
    stands_in: bool = False
    """Whether it ignores options that are not its own: an entry of another engine is tried with it unchanged."""
    local: bool = True
    """Whether it runs on this machine, with memory to be granted."""
    on_card: bool = False
    """Whether its engines compute on a card as well; a model whose entry names no device gets one then."""
    backend: str | None = None
    """The class of its `Backend`, for one that lives in a process of its own; else `maker` makes the engine."""
    maker: str = f"{_FACTORY}:make_child"
    sizer: str = f"{_SIZING}:own_size"
    """Finds out before it is loaded how much memory it takes."""
    files_need: str | None = None
    """Bytes that it takes with the files of a model, for the sizer `size_of_files`; None: see `parts.py`."""
    openai: bool = False
    """Whether it passes on whatever OpenAI's protocol has."""
    abilities: frozenset[str] = frozenset()
    """What it can do beyond its tasks (`penstock.schemas.abilities`)."""
    built_in: bool = False
    """Whether each worker has one by itself: no entry names it, and no listing shows it."""
    opens_images: bool = False
    """Whether it opens images itself, under guard: it is given files as they came, else pixels."""

    @property
    def all_options(self) -> Options:
        """What `options` of a model's entry may hold."""
        return {**(PROCESS_OPTIONS if self.local else {}), **self.options}


KINDS: dict[str, EngineKind] = {
    kind.name: kind
    for kind in (
        EngineKind(
            name="text",
            tasks=("text_generation", "summarization"),
            usual=2,
            slots=64,
            on_card=True,
            backend="penstock.processors.engines.text.backend:TextBackend",
            sizer=f"{_SIZING}:size_of_files",
            options={
                "cache_tokens": whole(1),
                "block_size": whole(1),
                "num_blocks": whole(1),
                "max_batch_tokens": whole(1),
                "ignore_eos": FLAG,
                "attention": TEXT,
                "tool_parser": TEXT,
                "parse_control_strings": FLAG,
            },
        ),
        EngineKind(
            name="embedding",
            tasks=("embedding",),
            slots=256,
            on_card=True,
            backend="penstock.processors.engines.text.embedding:EmbeddingBackend",
            sizer=f"{_SIZING}:size_of_files",
            options={"max_batch_tokens": whole(1)},
        ),
        EngineKind(
            name="diffusers",
            tasks=("image_generation", "image_editing"),
            slots=8,
            on_card=True,
            backend="penstock.processors.engines.images.diffusion:DiffusionBackend",
            sizer=f"{_SIZING}:size_of_files",
            files_need="penstock.processors.models.image_sizing:files_need",
            options={
                "variant": TEXT,
                "batch_window_ms": NUMBER,
                "max_pixels": whole(1),
                "vae_tiling": FLAG,
                "vae_slicing": FLAG,
                "cpu_offload": FLAG,
            },
        ),
        EngineKind(
            name="imaging",
            tasks=("image_processing",),
            slots=16,
            backend="penstock.processors.engines.images.imaging:ImagingBackend",
            sizer="penstock.processors.models.image_sizing:size_of_imaging",
            opens_images=True,
            options={"max_pixels": whole(1)},
        ),
        EngineKind(
            name="upscaling",
            tasks=("image_processing",),
            slots=16,
            on_card=True,
            backend="penstock.processors.engines.images.upscaling:UpscalingBackend",
            sizer=f"{_SIZING}:size_of_files",
            files_need="penstock.processors.models.image_sizing:upscaling_need",
            abilities=frozenset({UPSCALE}),
            options={"max_pixels": whole(1), "tile": whole(1)},
        ),
        EngineKind(
            name="vision",
            tasks=("image_to_text", "text_generation"),
            slots=4,
            on_card=True,
            backend="penstock.processors.engines.images.vision:VisionBackend",
            sizer=f"{_SIZING}:size_of_files",
            files_need="penstock.processors.models.image_sizing:vision_need",
            abilities=frozenset({READ_IMAGES}),
            options={"caption_prompt": TEXT, "batch_window_ms": NUMBER, "parse_control_strings": FLAG},
        ),
        EngineKind(
            name="remote",
            tasks=REMOTE_TASKS,
            slots=8,
            local=False,
            maker=f"{_FACTORY}:make_remote",
            openai=True,
            options=REMOTE_OPTIONS,
        ),
        EngineKind(
            name="managed",
            tasks=REMOTE_TASKS,
            slots=8,
            maker=f"{_FACTORY}:make_managed",
            sizer=f"{_SIZING}:managed_size",
            openai=True,
            options={
                **REMOTE_OPTIONS,
                "command": COMMAND,
                "env": VARIABLES,
                "health": TEXT,
                "port": whole(1, 65_535),
                "devices": whole(1),
                "grace_s": NUMBER,
            },
        ),
        EngineKind(
            name="items",
            tasks=("conversation_items",),
            slots=256,
            local=False,
            built_in=True,
            maker=f"{_FACTORY}:make_items",
            options={},
        ),
        EngineKind(
            name="noop",
            tasks=("text_generation", "embedding", "summarization"),
            slots=256,
            local=False,
            stands_in=True,
            maker=f"{_FACTORY}:make_noop",
            options={
                "tokens": whole(0),
                "delay_ms": NUMBER,
                "first_delay_ms": NUMBER,
                "load_ms": NUMBER,
                "hold": TEXT,
                "chars": whole(0),
                "echo": FLAG,
            },
        ),
    )
}
"""By name."""


def load(name: str) -> Any:
    """The class or function that `module:name` names."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)
