"""Where a model comes from, and how much memory it will take: hub id, local folder or GGUF file."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.schemas.errors import InvalidRequest

DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2}
RUNTIME_BYTES = 150 * 2**20
"""What an engine's process takes beside weights and cache: pages of its own, activations, tokenizer."""


def resolve_source(source: str) -> Path:
    """A local folder or GGUF file; a hub id is fetched into the hub's own cache. Raises InvalidRequest with the cure."""
    path = Path(source).expanduser()
    if path.exists():
        return path
    if source.count("/") != 1 or source.startswith(("/", ".", "~")):
        raise InvalidRequest(f"the model {source} is neither a folder, a GGUF file nor a hub id (owner/name)")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(source, ignore_patterns=["*.bin", "*.msgpack", "*.h5", "*.onnx", "*.gguf"]))
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
    """The model's config.json; empty for one that has none."""
    file = folder / "config.json"
    return json.loads(file.read_text()) if file.is_file() else {}


def kv_bytes_per_token(config: Mapping[str, Any], element_bytes: int) -> int:
    """2 (keys, values) · layers · kv heads · head size · bytes."""
    heads = int(config.get("num_attention_heads", 1))
    head_size = int(config.get("head_dim") or int(config.get("hidden_size", 0)) // heads)
    kv_heads = int(config.get("num_key_value_heads") or heads)
    return 2 * int(config.get("num_hidden_layers", 0)) * kv_heads * head_size * element_bytes


def memory_need(source: str, kind: str, options: Mapping[str, Any]) -> int:
    """Bytes that an engine of this model will take: weights in its dtype, its token cache, its process."""
    path = resolve_source(source)
    element_bytes = 4 if dtype_name(options) == "float32" else 2
    if path.is_file():  # GGUF: quantised on disk, expanded when loaded
        return path.stat().st_size * 8 + RUNTIME_BYTES
    weights = parameters(path) * element_bytes
    cache = 0
    if kind == "text":
        cache = cache_tokens(options) * kv_bytes_per_token(model_config(path), element_bytes)
    return weights + cache + RUNTIME_BYTES


def dtype_name(options: Mapping[str, Any]) -> str:
    """float32 on a CPU (bfloat16 is slower there without its instructions), bfloat16 on CUDA, unless told."""
    return str(options.get("dtype") or ("bfloat16" if device_name(options).startswith("cuda") else "float32"))


def device_name(options: Mapping[str, Any]) -> str:
    return str(options.get("device", "cpu"))


def block_size(options: Mapping[str, Any]) -> int:
    return int(options.get("block_size", 32))


def cache_tokens(options: Mapping[str, Any]) -> int:
    """Tokens that the cache of a text engine holds: `num_blocks` × `block_size`, or `cache_tokens`."""
    if "num_blocks" in options:
        return int(options["num_blocks"]) * block_size(options)
    return int(options.get("cache_tokens", 8192)) // block_size(options) * block_size(options)
