"""Models for `images.py`, made in code and untrained, large enough that computing them takes most of the time.

python benchmarks/image_models.py diffusion|captioner FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

SIDE = 224


def diffusion(folder: Path) -> None:
    """Stable Diffusion's form with a UNet of 64 and 128 channels (3.6 M parameters): for 256 × 256 pixels."""
    import torch
    from diffusers import DiffusionPipeline, UNet2DConditionModel

    from penstock.cli.makers.tiny_diffusion import make

    make("generation", folder)
    pipeline: Any = DiffusionPipeline.from_pretrained(folder)
    torch.manual_seed(0)
    config = {**pipeline.unet.config, "block_out_channels": (64, 128), "attention_head_dim": 8}
    pipeline.unet = UNet2DConditionModel.from_config(config)
    pipeline.save_pretrained(folder)


def captioner(folder: Path) -> None:
    """A ViT and a GPT-2 of six layers and 384 channels each (24 M parameters). It never says that it has ended."""
    import torch
    from transformers import (
        GenerationConfig,
        GPT2Config,
        VisionEncoderDecoderConfig,
        VisionEncoderDecoderModel,
        ViTConfig,
        ViTImageProcessor,
    )

    from penstock.cli.makers.tiny_vision import make_tokenizer

    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    ends: dict[str, Any] = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    layers: dict[str, Any] = {"num_hidden_layers": 6, "num_attention_heads": 6}
    config: Any = VisionEncoderDecoderConfig.from_encoder_decoder_configs(
        ViTConfig(hidden_size=384, intermediate_size=1536, image_size=SIDE, patch_size=16, **layers),
        GPT2Config(
            vocab_size=len(tokenizer),
            n_positions=128,
            n_embd=384,
            n_layer=6,
            n_head=6,
            bos_token_id=tokenizer.bos_token_id,
            **ends,
        ),
    )
    start: dict[str, Any] = {"decoder_start_token_id": tokenizer.bos_token_id, **ends}
    for name, value in start.items():
        setattr(config, name, value)
    model: Any = VisionEncoderDecoderModel(config=config)
    model.generation_config = GenerationConfig(bos_token_id=tokenizer.bos_token_id, **start)
    with torch.no_grad():  # tied to the output: the logit of an end is 0, and some other one is above
        model.decoder.get_input_embeddings().weight[tokenizer.eos_token_id] = 0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    ViTImageProcessor(size={"height": SIDE, "width": SIDE}).save_pretrained(folder)


if __name__ == "__main__":
    {"diffusion": diffusion, "captioner": captioner}[sys.argv[1]](Path(sys.argv[2]))
