"""A tiny BLIP made in code, untrained: what it says of an image is nonsense, by the steps of a real one."""

from __future__ import annotations

from pathlib import Path

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "picture", "of", *map(chr, range(ord("b"), ord("z")))]


def make_blip(folder: Path, side: int = 32) -> None:
    """A folder that transformers' image-text-to-text class loads. It reads images of `side` × `side` pixels.

    What its attention takes of memory grows with the fourth power of the side: 11 MiB an image at 192.
    """
    import torch
    from transformers import BertTokenizer, BlipConfig, BlipForConditionalGeneration, BlipImageProcessor, BlipProcessor

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 37, "num_hidden_layers": 2, "num_attention_heads": 4}
    apart = {"initializer_range": 0.2}  # by default it says the same of all images
    ids = {"bos_token_id": 2, "eos_token_id": 3, "sep_token_id": 3, "pad_token_id": 0}
    text = {
        "vocab_size": len(WORDS) + 1,
        "encoder_hidden_size": 32,
        "max_position_embeddings": 64,
        **sizes,
        **ids,
        **apart,
    }
    config = BlipConfig(
        text_config={**text, "projection_dim": 32},
        vision_config={**sizes, **apart, "projection_dim": 32, "image_size": side, "patch_size": 8},
    )
    BlipForConditionalGeneration(config).save_pretrained(folder)
    tokenizer = BertTokenizer(vocab={word: number for number, word in enumerate(WORDS)})
    processor = BlipImageProcessor(size={"height": side, "width": side})
    BlipProcessor(image_processor=processor, tokenizer=tokenizer).save_pretrained(folder)
