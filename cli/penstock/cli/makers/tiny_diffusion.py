"""Tiny diffusion pipelines made in code, untrained: what they draw is noise, by the same steps as a real model's.

python -m penstock.cli.makers.tiny_diffusion KIND FOLDER, KIND one of generation, editing, inpainting.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def make(kind: str, folder: Path) -> None:
    """A pipeline that diffusers loads, of 64 × 64 pixels: text to image, InstructPix2Pix, or inpainting."""
    import diffusers
    import torch

    torch.manual_seed(0)
    channels, name = {
        "generation": (4, "StableDiffusionPipeline"),
        "editing": (8, "StableDiffusionInstructPix2PixPipeline"),
        "inpainting": (9, "StableDiffusionInpaintPipeline"),
    }[kind]
    pipeline = getattr(diffusers, name)(
        unet=_unet(channels),
        vae=_vae(),
        scheduler=diffusers.DDIMScheduler(
            beta_start=0.00085,
            beta_end=0.012,
            beta_schedule="scaled_linear",
            clip_sample=False,
            set_alpha_to_one=False,
            steps_offset=1,
        ),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
        **_text(folder),
    )
    pipeline.save_pretrained(folder)


def _text(folder: Path) -> dict[str, Any]:
    """A CLIP of two layers, and its tokenizer: every byte is a token."""
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

    alphabet = sorted(ByteLevel.alphabet())
    words = [*alphabet, *(f"{letter}</w>" for letter in alphabet), "<|startoftext|>", "<|endoftext|>"]
    vocabulary = {word: number for number, word in enumerate(words)}
    files = folder / "tokenizer"
    files.mkdir(parents=True, exist_ok=True)
    (files / "vocab.json").write_text(json.dumps(vocabulary))
    (files / "merges.txt").write_text("#version: 0.2\n")
    tokenizer = CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=77)
    config = CLIPTextConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=77,
        projection_dim=32,
        bos_token_id=len(vocabulary) - 2,
        eos_token_id=len(vocabulary) - 1,
        pad_token_id=len(vocabulary) - 1,
    )
    return {"text_encoder": CLIPTextModel(config), "tokenizer": tokenizer}


def _vae() -> Any:
    from diffusers import AutoencoderKL

    # Its annotations are of tuples of one.
    make: Any = AutoencoderKL
    return make(
        in_channels=3,
        out_channels=3,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(8, 8, 16, 16),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=4,
        sample_size=64,
    )


def _unet(channels: int) -> Any:
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel(
        sample_size=8,
        in_channels=channels,
        out_channels=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        block_out_channels=(16, 32),
        layers_per_block=1,
        cross_attention_dim=32,
        attention_head_dim=4,
        norm_num_groups=8,
    )


if __name__ == "__main__":
    make(sys.argv[1], Path(sys.argv[2]))
