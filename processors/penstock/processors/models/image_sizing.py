"""How much memory engines take that work on images: by their options, and by the files of their models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from penstock.processors.engines.images.upscaling import read_config, tile_bytes
from penstock.processors.images.planning import MAX_PIXELS
from penstock.processors.models.catalog import ModelConfig
from penstock.processors.models.parts import (
    PROCESS_BYTES,
    base_need,
    element_bytes,
    kv_bytes_per_token,
    parameters,
    tensors_of,
)
from penstock.processors.models.sizing import ModelSize, OnProgress, slots_of

DEFAULT_WINDOW = 2048
ACTIVATION_BYTES = 64 * 2**20
"""What one prompt's image takes while it is read, beside the cache."""
GUARDED_BYTES = 32 * 2**20
"""A process that opens images, before it has one."""
IMAGE_COPIES = 2
"""Of the largest image that an operation works on: what it reads and what it makes, four bytes a pixel each."""


async def size_of_imaging(config: ModelConfig, on_progress: OnProgress) -> ModelSize:
    """Of an engine without a model: its process, and for each of its threads one that has Pillow, and an image."""
    beside = int(config.options.get("threads", 1)) * GUARDED_BYTES
    return ModelSize(
        source=config.source, need_bytes=config.vram_bytes or PROCESS_BYTES + beside + _images_need(config)
    )


def upscaling_need(path: Path, config: ModelConfig) -> int:
    """Weights, one tile, and an image for each thread. Raises InvalidRequest for what is no upscaler."""
    need = base_need(parameters(path), path, config.options)
    return need + tile_bytes(read_config(path), config.options, element_bytes(config.options)) + _images_need(config)


def _images_need(config: ModelConfig) -> int:
    """A quarter of the largest images: most are far smaller, and no worker shall keep gigabytes for the rare ones."""
    pixels = int(config.options.get("max_pixels", MAX_PIXELS))
    return int(config.options.get("threads", 1)) * pixels * IMAGE_COPIES * 4 // 4


def vision_need(path: Path, config: ModelConfig) -> int:
    """Weights, and for each prompt of a batch its cache of a whole window and what its image takes."""
    told = _language_part(json.loads((path / "config.json").read_text()))
    window = int(config.options.get("window") or told.get("max_position_embeddings") or DEFAULT_WINDOW)
    per_prompt = min(window, DEFAULT_WINDOW) * kv_bytes_per_token(told, element_bytes(config.options))
    return base_need(parameters(path), path, config.options) + slots_of(config) * (per_prompt + ACTIVATION_BYTES)


def _language_part(config: dict[str, Any]) -> dict[str, Any]:
    """What config.json says of the part that writes text; in GPT-2's words too."""
    for name in ("text_config", "decoder"):
        if isinstance(config.get(name), dict):
            config = {**config, **config[name]}
    names = {
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
    }
    return {**config, **{name: config[older] for name, older in names.items() if older in config}}


def files_need(path: Path, config: ModelConfig) -> int:
    """Bytes that the engine of a diffusers folder takes: the weights of all its parts, and its process."""
    variant = config.options.get("variant")
    count = 0
    for folder in [one for one in path.iterdir() if one.is_dir()]:
        files = sorted(folder.glob("*.safetensors"))
        chosen = [file for file in files if variant is not None and f".{variant}" in file.name]
        plain = [file for file in files if file.name.count(".") == 1]
        count += sum(tensor.count for file in chosen or plain or files for tensor in tensors_of(file))
    return base_need(count, path, config.options)
