"""Where a model comes from, and how much memory it will take: hub id, local folder or GGUF file."""

from __future__ import annotations

import json
import logging
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.processors.engines import gguf_header
from penstock.processors.hardware import cpu
from penstock.schemas.errors import InvalidRequest

logger = logging.getLogger(__name__)

DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2}
PROCESS_BYTES = 200 * 2**20
"""What an engine's process takes beside weights and cache: pages of its own, tokenizer, small activations."""
CUDA_CONTEXT_BYTES = 600 * 2**20
"""What a CUDA context takes of a card before anything is loaded."""
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
LOGITS_COPIES = 4
"""Temporary tensors of vocabulary size in a step: logits, sorted, probabilities, their running sum."""


def resolve_source(source: str) -> Path:
    """A local folder or GGUF file; a hub id is fetched into the hub's cache. Raises InvalidRequest with the cure."""
    path = Path(source).expanduser()
    if path.exists():
        return path
    if source.count("/") != 1 or source.startswith(("/", ".", "~")):
        raise InvalidRequest(f"the model {source} is neither a folder, a GGUF file nor a hub id (owner/name)")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(source, allow_patterns=HUB_FILES))
    except Exception as error:
        raise InvalidRequest(
            f"the model {source} could not be fetched from the hub ({type(error).__name__}); name a local folder"
        ) from error


def parameters(folder: Path) -> int:
    """Number of parameters from the safetensors headers: exact, without reading the weights."""
    total = 0
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            header: dict[str, Any] = json.loads(stream.read(length))
        for name, tensor in header.items():
            if name != "__metadata__":
                begin, end = tensor["data_offsets"]
                total += (end - begin) // DTYPE_BYTES.get(tensor["dtype"], 1)
    return total


def model_config(folder: Path) -> dict[str, Any]:
    """The language model's part of config.json; empty for a folder that has none."""
    file = folder / "config.json"
    if not file.is_file():
        return {}
    config: dict[str, Any] = json.loads(file.read_text())
    nested = config.get("text_config")
    return {**config, **nested} if isinstance(nested, dict) else config


def kv_bytes_per_token(config: Mapping[str, Any], element_bytes: int) -> int:
    """2 (keys, values) · layers · kv heads · head size · bytes."""
    heads = int(config.get("num_attention_heads", 1))
    head_size = int(config.get("head_dim") or int(config.get("hidden_size", 0)) // heads)
    kv_heads = int(config.get("num_key_value_heads") or heads)
    return 2 * int(config.get("num_hidden_layers", 0)) * kv_heads * head_size * element_bytes


def memory_need(source: str, kind: str, options: Mapping[str, Any]) -> int:
    """Bytes that an engine of this model will take: weights in its dtype, its token cache, its steps, its process."""
    path = resolve_source(source)
    element_bytes = 4 if dtype_name(options) == "float32" else 2
    if path.is_file():
        header = gguf_header.read(path)
        count, config = header.parameters, header.config()
    else:
        count, config = parameters(path), model_config(path)
    if not count:
        raise InvalidRequest(f"{path} holds no safetensors weights (pickled ones are not opened)")
    need = count * element_bytes + PROCESS_BYTES
    if kind == "text":
        need += cache_tokens(options) * kv_bytes_per_token(config, element_bytes)
        # A step makes logits for one token of each of its runs.
        need += int(options.get("slots", 64)) * int(config.get("vocab_size", 0)) * 4 * LOGITS_COPIES
    return need + (0 if device_name(options) == "cpu" else CUDA_CONTEXT_BYTES)


def dtype_name(options: Mapping[str, Any]) -> str:
    """As told, else bfloat16 on a card and float32 on a CPU: greedy answers must not depend on who shares the batch."""
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


def usable_cores() -> int:
    return len(os.sched_getaffinity(0))


# -- inside the engine's process


def limit_device_memory(options: Mapping[str, Any]) -> None:
    """Hold a card's allocator to what admission granted (`granted_bytes`). Nothing to do on a CPU."""
    device, granted = device_name(options), options.get("granted_bytes")
    if device == "cpu" or not granted:
        return
    import torch

    total = torch.cuda.get_device_properties(device).total_memory
    fraction = (int(granted) - CUDA_CONTEXT_BYTES) / total
    torch.cuda.set_per_process_memory_fraction(max(0.01, min(1.0, fraction)), device)


def measured_memory(device: str) -> int:
    """Bytes that this process holds on its device; on a CPU its own (USS), as the fork server's pages are shared."""
    if device == "cpu":
        return cpu.own_bytes(os.getpid()) or 0
    import torch

    return int(torch.cuda.memory_reserved(device)) + CUDA_CONTEXT_BYTES
