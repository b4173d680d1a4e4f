"""How much memory a run of a diffusion model takes beyond the model, from its shape."""

from __future__ import annotations

COPIES = 3
"""Tensors of the widest layer that are there together."""
TILE_PIXELS = 512 * 512
"""A VAE that works in tiles holds one of them."""


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
