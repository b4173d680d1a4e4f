"""The memory of an engine by parts, before it is loaded: weights, token cache, its largest batch, its process.

One function for each kind of engine in `PARTS`; sizes of weights are read from headers, never from the weights.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.processors.core.fleet.estimates import Shape
from penstock.processors.engines.process.loading import (
    CUDA_CONTEXT_BYTES,
    batch_tokens,
    cache_tokens,
    device_name,
    dtype_name,
    padded_tokens,
    text_slots,
)
from penstock.processors.models import gguf_header
from penstock.schemas.errors import InvalidRequest

DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2}
FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
PROCESS_BYTES = 64 * 2**20
"""What an engine's process owns beside its model, where that was not measured: see `calibration`."""
WORKSPACE_BYTES = 200 * 2**20
"""On a card: workspaces of its libraries, graphs, fragments."""
QUANTIZED_BYTES = {"int8": 1.02, "nf4": 0.5625, "fp4": 0.5625}
"""Bytes of a quantised parameter, with its share of the scales."""
LOGITS_COPIES = 4
"""Temporary tensors of vocabulary size in a step: logits, sorted, probabilities, their running sum."""
TOKENIZER_TIMES = 12
"""A tokenizer takes so many times its file."""


@dataclass(frozen=True, slots=True)
class MemoryPart:
    """A part of an engine's memory, in bytes."""

    name: str
    bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Tensor:
    """A tensor as a header describes it; `stored_bytes` in the file."""

    name: str
    dtype: str
    count: int
    stored_bytes: int
    flat: bool
    """It has fewer than two dimensions: never quantised."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Files:
    """What a model's files tell of its memory without being read."""

    tensors: Sequence[Tensor]
    config: Mapping[str, Any]
    tokenizer_bytes: int = 0

    def number(self, *names: str, default: int = 0) -> int:
        """A field of its configuration, under the first of these names that it has."""
        return next((int(self.config[name]) for name in names if self.config.get(name)), default)


def read_files(path: Path) -> Files:
    """Of a folder, or of a GGUF file. Raises InvalidRequest when there are no weights that may be opened."""
    if path.is_file():
        header = gguf_header.read(path)
        one = Tensor(name="", dtype="GGUF", count=header.parameters, stored_bytes=path.stat().st_size, flat=False)
        return Files(tensors=[one] if header.parameters else [], config=header.config())
    tokenizer = path / "tokenizer.json"
    return Files(
        tensors=safetensors(path),
        config=model_config(path),
        tokenizer_bytes=tokenizer.stat().st_size if tokenizer.is_file() else 0,
    )


def safetensors(folder: Path) -> list[Tensor]:
    """All tensors of the folder's safetensors files, by their headers: exact, in milliseconds."""
    return [tensor for file in sorted(folder.glob("*.safetensors")) for tensor in tensors_of(file)]


def tensors_of(file: Path) -> list[Tensor]:
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        header: dict[str, Any] = json.loads(stream.read(length))
    tensors: list[Tensor] = []
    for name, tensor in header.items():
        if name != "__metadata__":
            begin, end = tensor["data_offsets"]
            dtype = str(tensor["dtype"])
            count = (end - begin) // DTYPE_BYTES.get(dtype, 1)
            flat = len(tensor.get("shape", ())) < 2
            tensors.append(Tensor(name=name, dtype=dtype, count=count, stored_bytes=end - begin, flat=flat))
    return tensors


def parameters(folder: Path) -> int:
    """Number of parameters of a folder's weights."""
    return sum(tensor.count for tensor in safetensors(folder))


def base_need(count: int, path: Path, options: Mapping[str, Any]) -> int:
    """Bytes of so many parameters, and of the process that holds them. Raises InvalidRequest when there are none."""
    if not count:
        raise InvalidRequest(f"{path} holds no safetensors weights (pickled ones are not opened)")
    context = 0 if device_name(options) == "cpu" else CUDA_CONTEXT_BYTES + WORKSPACE_BYTES
    return count * element_bytes(options) + PROCESS_BYTES + context


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


def element_bytes(options: Mapping[str, Any]) -> int:
    """Of a number as the engine computes with it."""
    return 4 if dtype_name(options) == "float32" else 2


def weights_bytes(files: Files, options: Mapping[str, Any]) -> int:
    """As loaded: in the engine's dtype, or quantised; what is stored as whole numbers stays as it is stored."""
    plain, quantized = element_bytes(options), QUANTIZED_BYTES.get(str(options.get("quantization")))
    total = 0.0
    for tensor in files.tensors:
        if tensor.dtype not in FLOATS and tensor.dtype != "GGUF":
            total += tensor.stored_bytes
        elif quantized is None or tensor.flat or "embed" in tensor.name or "lm_head" in tensor.name:
            total += tensor.count * plain
        else:
            total += tensor.count * quantized
    return math.ceil(total)


def _text(files: Files, options: Mapping[str, Any]) -> list[MemoryPart]:
    size, cache = element_bytes(options), cache_tokens(options)
    tokens, hidden = batch_tokens(options), files.number("hidden_size")
    inner = files.number("intermediate_size", default=4 * hidden)
    # A step makes logits for one token of each of its runs.
    logits = text_slots(options) * files.number("vocab_size") * 4 * LOGITS_COPIES
    mask = tokens * (cache + tokens) * size
    return [
        MemoryPart("token cache", cache * kv_bytes_per_token(files.config, size)),
        MemoryPart("batch", logits + mask + tokens * (6 * hidden + 3 * inner) * size),
    ]


def _embedding(files: Files, options: Mapping[str, Any]) -> list[MemoryPart]:
    tokens, hidden = padded_tokens(options), files.number("hidden_size")
    inner = files.number("intermediate_size", default=4 * hidden)
    heads = files.number("num_attention_heads", default=1)
    longest = min(files.number("max_position_embeddings", default=512), int(options.get("window", 1 << 30)))
    tokens = max(tokens, longest)
    return [MemoryPart("batch", tokens * ((8 * hidden + 3 * inner) * 4 + heads * longest * 4))]


PARTS: Mapping[str, Callable[[Files, Mapping[str, Any]], list[MemoryPart]]] = {"text": _text, "embedding": _embedding}
"""By kind of engine: what it takes beside weights, tokenizer and process."""


def shape_of(kind: str, options: Mapping[str, Any]) -> Shape:
    """What the options allow of the engine's largest batch: peaks are learned by it."""
    if kind == "text":
        return (float(text_slots(options)), float(batch_tokens(options)), float(cache_tokens(options)))
    return (float(padded_tokens(options)),) if kind == "embedding" else ()


def memory_parts(
    path: Path, kind: str, options: Mapping[str, Any], process_bytes: int = PROCESS_BYTES
) -> tuple[MemoryPart, ...]:
    """All that an engine of this model will hold at its peak, on its device. Raises InvalidRequest."""
    files = read_files(path)
    if not files.tensors:
        raise InvalidRequest(f"{path} holds no safetensors weights (pickled ones are not opened)")
    weights = MemoryPart("weights", weights_bytes(files, options))
    running = PARTS[kind](files, options)
    if device_name(options) != "cpu":
        own = [MemoryPart("CUDA context", CUDA_CONTEXT_BYTES), MemoryPart("workspaces", WORKSPACE_BYTES)]
        return (weights, *running, *own)
    own = [MemoryPart("tokenizer", files.tokenizer_bytes * TOKENIZER_TIMES), MemoryPart("process", process_bytes)]
    # While weights are converted, the pages of their files are there too.
    stored = sum(one.stored_bytes for one in files.tensors)
    converted = 0 if all(one.dtype == "F32" for one in files.tensors) and element_bytes(options) == 4 else stored
    loading = converted - sum(part.bytes for part in running)
    return (weights, *running, *own, *([MemoryPart("loading", loading)] if loading > 0 else []))
