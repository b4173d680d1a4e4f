"""A tiny VisionEncoderDecoder made in code, untrained: it reads an image alone, and knows no questions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from PIL import Image

from penstock.cli.makers.tiny_vision import PATCH, SIDE, image_processor, make_tokenizer


def make_captioner(folder: Path) -> None:
    """Write its folder."""
    import torch
    from transformers import (
        GenerationConfig,
        GPT2Config,
        VisionEncoderDecoderConfig,
        VisionEncoderDecoderModel,
        ViTConfig,
    )

    torch.manual_seed(0)
    tokenizer: Any = make_tokenizer()
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    ends: dict[str, Any] = {name: getattr(tokenizer, name) for name in names}
    apart: dict[str, Any] = {"initializer_range": 0.3}  # by default it says the same of all images
    sizes: dict[str, Any] = {
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    config: Any = VisionEncoderDecoderConfig.from_encoder_decoder_configs(
        ViTConfig(image_size=SIDE, patch_size=PATCH, **sizes, **apart),
        GPT2Config(vocab_size=len(tokenizer), n_positions=64, n_embd=64, n_layer=2, n_head=4, **apart, **ends),
    )
    config.decoder_start_token_id, config.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
    config.pad_token_id = tokenizer.pad_token_id
    model: Any = VisionEncoderDecoderModel(config=config)
    model.generation_config = GenerationConfig(decoder_start_token_id=tokenizer.bos_token_id, **ends)
    for part in (tokenizer, image_processor(), model.eval()):
        part.save_pretrained(folder)


def caption(folder: Path, image: Image.Image, max_tokens: int) -> str:
    """What transformers' own loop makes of an image."""
    from transformers import AutoImageProcessor, AutoTokenizer, VisionEncoderDecoderModel

    model: Any = VisionEncoderDecoderModel.from_pretrained(folder)
    images: Any = AutoImageProcessor.from_pretrained(folder)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    pixels = images(images=[image], return_tensors="pt")["pixel_values"]
    return tokenizer.decode(
        model.generate(pixels, max_new_tokens=max_tokens, do_sample=False)[0], skip_special_tokens=True
    )
