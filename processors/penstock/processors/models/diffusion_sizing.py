"""How much memory a diffusion model takes, from its files."""

from __future__ import annotations

from pathlib import Path

from penstock.processors.models.catalog import ModelConfig
from penstock.processors.models.parts import base_need, tensors_of


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
