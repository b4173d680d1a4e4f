"""Tiny pipelines of newer families of diffusion models, made in code and untrained: their parts, in small."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SIDE = 32
"""Of their images, in pixels."""
_TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 37,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 77,
    "projection_dim": 32,
}


def make_family(family: str, folder: Path) -> None:
    """A folder that DiffusionPipeline loads. `family`: sdxl, sd3 or flux."""
    import torch

    torch.manual_seed(0)
    {"sdxl": _sdxl, "sd3": _sd3, "flux": _flux}[family](folder).save_pretrained(folder)


def _sdxl(folder: Path) -> Any:
    from diffusers import EulerDiscreteScheduler, StableDiffusionXLPipeline, UNet2DConditionModel
    from transformers import CLIPTextModel, CLIPTextModelWithProjection

    tokenizer, config = _clip(folder)
    unet = UNet2DConditionModel(
        sample_size=SIDE // 2,
        block_out_channels=(16, 32),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=4,
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        transformer_layers_per_block=(1, 2),
        projection_class_embeddings_input_dim=6 * 8 + 32,
        cross_attention_dim=64,
        norm_num_groups=8,
    )
    return StableDiffusionXLPipeline(
        vae=_vae(4),
        text_encoder=CLIPTextModel(config),
        text_encoder_2=CLIPTextModelWithProjection(config),
        tokenizer=tokenizer,
        tokenizer_2=tokenizer,
        unet=unet,
        scheduler=EulerDiscreteScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear"),
    )


def _sd3(folder: Path) -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
    from transformers import CLIPTextModelWithProjection

    tokenizer, config = _clip(folder)
    tokenizer_3, t5 = _t5(64)
    transformer = SD3Transformer2DModel(
        sample_size=SIDE // 2,
        patch_size=1,
        in_channels=16,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=64,
        caption_projection_dim=32,
        pooled_projection_dim=64,
        out_channels=16,
    )
    return StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=_vae(16, shift_factor=0.0609, scaling_factor=1.5035, use_quant_conv=False, use_post_quant_conv=False),
        text_encoder=CLIPTextModelWithProjection(config),
        tokenizer=tokenizer,
        text_encoder_2=CLIPTextModelWithProjection(config),
        tokenizer_2=tokenizer,
        text_encoder_3=t5,
        tokenizer_3=tokenizer_3,
    )


def _flux(folder: Path) -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
    from transformers import CLIPTextModel

    tokenizer, config = _clip(folder)
    tokenizer_2, t5 = _t5(32)
    transformer = FluxTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
    )
    return FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        text_encoder=CLIPTextModel(config),
        text_encoder_2=t5,
        tokenizer=tokenizer,
        tokenizer_2=tokenizer_2,
        transformer=transformer,
        vae=_vae(4, shift_factor=0.0609, scaling_factor=1.5035, use_quant_conv=False, use_post_quant_conv=False),
    )


def _vae(channels: int, **more: Any) -> Any:
    from diffusers import AutoencoderKL

    make: Any = AutoencoderKL
    return make(
        block_out_channels=(8, 16),
        in_channels=3,
        out_channels=3,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=channels,
        norm_num_groups=4,
        sample_size=SIDE,
        **more,
    )


def _clip(folder: Path) -> tuple[Any, Any]:
    """A tokenizer whose tokens are bytes, and the configuration of an encoder for it."""
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import CLIPTextConfig, CLIPTokenizer

    alphabet = sorted(ByteLevel.alphabet())
    words = [*alphabet, *(f"{letter}</w>" for letter in alphabet), "<|startoftext|>", "<|endoftext|>"]
    vocabulary = {word: number for number, word in enumerate(words)}
    for name in ("tokenizer", "tokenizer_2"):
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "vocab.json").write_text(json.dumps(vocabulary))
        (folder / name / "merges.txt").write_text("#version: 0.2\n")
    last = len(vocabulary) - 1
    config = CLIPTextConfig(
        vocab_size=len(vocabulary), bos_token_id=last - 1, eos_token_id=last, pad_token_id=last, **_TEXT
    )
    return CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=77), config


def _t5(width: int) -> tuple[Any, Any]:
    """A tokenizer whose tokens are letters, and an encoder for it."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, T5Config, T5EncoderModel

    letters = {"<pad>": 0, "</s>": 1, "<unk>": 2, **{chr(32 + n): 3 + n for n in range(95)}}
    words = Tokenizer(models.WordLevel(letters, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=512
    )
    config = T5Config(
        vocab_size=len(letters),
        d_model=width,
        d_kv=8,
        d_ff=37,
        num_layers=2,
        num_heads=4,
        tie_word_embeddings=False,  # pyright: ignore[reportCallIssue]
    )
    return tokenizer, T5EncoderModel(config)
