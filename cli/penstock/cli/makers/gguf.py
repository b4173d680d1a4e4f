"""Turn a GGUF file into a plain model folder: safetensors in bfloat16, config, tokenizer and chat template.

usage: python -m penstock.cli.makers.gguf FILE OUT
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any


def convert(gguf: Path, out: Path) -> None:
    """Write a folder that `from_pretrained` loads. Raises what transformers raises on a file it cannot read."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    source, name = str(gguf.parent), gguf.name
    tokenizer: Any = AutoTokenizer.from_pretrained(source, gguf_file=name)
    loaded: Any = AutoModelForCausalLM.from_pretrained(source, gguf_file=name, dtype=torch.float32)

    # A model loaded from GGUF refuses save_pretrained: its weights go into a fresh one of the same class.
    settings = loaded.config.to_dict()
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        settings.pop(key, None)
    model: Any = type(loaded)(type(loaded.config)(**settings))
    missing, unexpected = model.load_state_dict(loaded.state_dict(), strict=False)
    if unexpected or any(name != "lm_head.weight" for name in missing):
        raise SystemExit(f"the weights of {gguf} do not fit its architecture: {missing} {unexpected}")
    model.tie_weights()
    del loaded

    end = tokenizer.eos_token_id
    pad = end if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    model.generation_config = GenerationConfig(bos_token_id=tokenizer.bos_token_id, eos_token_id=end, pad_token_id=pad)
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)


if __name__ == "__main__":
    convert(Path(sys.argv[1]).absolute(), Path(sys.argv[2]))
