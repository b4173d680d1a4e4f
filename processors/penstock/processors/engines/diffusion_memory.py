"""How much memory a diffusion model takes, from its files, and what a run takes beyond that, from its shape."""

from __future__ import annotations

from pathlib import Path

from penstock.processors.models.catalog import ModelConfig
from penstock.processors.models.sizing import base_need, file_parameters

COPIES = 3
"""Tensors of the widest layer that are there together."""
TILE_PIXELS = 512 * 512
"""A VAE that works in tiles holds one of them."""


def files_need(path: Path, config: ModelConfig) -> int:
    """Bytes that the engine of a diffusers folder takes: the weights of all its parts, and its process."""
    variant = config.options.get("variant")
    count = 0
    for folder in [one for one in path.iterdir() if one.is_dir()]:
        files = sorted(folder.glob("*.safetensors"))
        chosen = [file for file in files if variant is not None and f".{variant}" in file.name]
        plain = [file for file in files if file.name.count(".") == 1]
        count += sum(file_parameters(file) for file in chosen or plain or files)
    return base_need(count, path, config.options)


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
