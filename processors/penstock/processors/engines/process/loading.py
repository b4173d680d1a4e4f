"""What an engine's options say, and what a process does with its device when it loads a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

CUDA_CONTEXT_BYTES = 600 * 2**20
"""What a CUDA context takes of a card before anything is loaded."""


def dtype_name(options: Mapping[str, Any]) -> str:
    """As configured, else bfloat16 on a card and float32 on a CPU: greedy answers must not depend on the batch."""
    return str(options.get("dtype") or ("float32" if device_name(options) == "cpu" else "bfloat16"))


def device_name(options: Mapping[str, Any]) -> str:
    """As torch and the ledger name it: cpu, cuda:0, cuda:1, …"""
    device = str(options.get("device", "cpu"))
    return "cuda:0" if device == "cuda" else device


def block_size(options: Mapping[str, Any]) -> int:
    return int(options.get("block_size", 32))


def cache_tokens(options: Mapping[str, Any]) -> int:
    """Tokens that the cache of a text engine holds: `num_blocks` × `block_size`, or `cache_tokens`."""
    if "num_blocks" in options:
        return int(options["num_blocks"]) * block_size(options)
    return int(options.get("cache_tokens", 8192)) // block_size(options) * block_size(options)


def text_slots(options: Mapping[str, Any]) -> int:
    """Runs that a text engine has in a step at most."""
    return int(options.get("slots", 64))


def batch_tokens(options: Mapping[str, Any]) -> int:
    """Tokens that a text engine computes in a step at most."""
    return int(options.get("max_batch_tokens", 512))


def padded_tokens(options: Mapping[str, Any]) -> int:
    """Tokens, padded to the longest text, that an embedding engine computes at once at most."""
    return int(options.get("max_batch_tokens", 2048))


# -- inside the engine's process


def set_up_torch(options: Mapping[str, Any]) -> None:
    """Have torch compute with `threads`, and hold a card's allocator to what admission granted (`granted_bytes`)."""
    import torch

    torch.set_num_threads(int(options.get("threads", 1)))
    device, granted = device_name(options), options.get("granted_bytes")
    if device == "cpu" or not granted:
        return
    total = torch.cuda.get_device_properties(device).total_memory
    fraction = (int(granted) - CUDA_CONTEXT_BYTES) / total
    torch.cuda.set_per_process_memory_fraction(max(0.01, min(1.0, fraction)), device)


def end_ids_of(generation_config: Any, tokenizer: Any) -> frozenset[int]:
    """All ids that end a text: the model's and the tokenizer's."""
    given = getattr(generation_config, "eos_token_id", None)
    ids: list[int | None] = [*given] if isinstance(given, list | tuple) else [given]
    return frozenset(int(token) for token in [*ids, tokenizer.eos_token_id] if token is not None)
