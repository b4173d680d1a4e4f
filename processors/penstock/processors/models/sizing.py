"""How large a model is before it is loaded: the memory that its engine will take, and what its runs will need of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import struct
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from penstock.processors.core.ledger import CannotLoad
from penstock.processors.engines.base import Limits
from penstock.processors.engines.loading import (
    CUDA_CONTEXT_BYTES,
    block_size,
    cache_tokens,
    device_name,
    dtype_name,
)
from penstock.processors.engines.threads import in_daemon_thread
from penstock.processors.models import gguf_header
from penstock.processors.models.catalog import ModelConfig
from penstock.processors.models.fetching import PROGRESS
from penstock.producers.engine_kinds import load
from penstock.schemas.errors import InvalidRequest

DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2}
PROCESS_BYTES = 200 * 2**20
"""What an engine's process takes beside weights and cache: pages of its own, tokenizer, small activations."""
LOGITS_COPIES = 4
"""Temporary tensors of vocabulary size in a step: logits, sorted, probabilities, their running sum."""
BYTES_PER_TOKEN = 4
"""Of text, before a tokenizer is there to count."""
DEFAULT_MAX_TOKENS = 512

OnProgress = Callable[[float], None]
"""Hears how much of a download is there, from 0 to 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSize:
    """`source` is where the model really lies: what was sized is what is loaded."""

    source: str
    need_bytes: int = 0
    adapters: tuple[str, ...] = ()
    """Where its LoRA adapters really lie."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """What is known of a model's engine before it is loaded. `limits` and `block` are those it will have."""

    limits: Limits
    bytes_per_token: int = BYTES_PER_TOKEN
    default_max_tokens: int = DEFAULT_MAX_TOKENS
    block: int = 1

    def need_tokens(self, text_bytes: int, max_tokens: int | None) -> int:
        """Tokens that a run will need of the engine, about; 0 where tokens are not what limits."""
        if self.limits.tokens is None:
            return 0
        answer = self.default_max_tokens if max_tokens is None else max_tokens
        tokens = -(-text_bytes // self.bytes_per_token) + answer
        return min(-(-tokens // self.block) * self.block, self.limits.tokens)


def estimate(config: ModelConfig) -> Estimate:
    """As its kind of engine has it."""
    return load(config.kind.estimate)(config)


def slots_of(config: ModelConfig) -> int:
    return int(config.options.get("slots", config.kind.slots))


def slots_estimate(config: ModelConfig) -> Estimate:
    """Of an engine that only its slots limit."""
    return Estimate(limits=Limits(slots=slots_of(config)))


def text_estimate(config: ModelConfig) -> Estimate:
    """Of an engine with a cache of tokens."""
    options = config.options
    return Estimate(
        limits=Limits(slots=slots_of(config), tokens=cache_tokens(options)),
        default_max_tokens=int(config.defaults.get("max_tokens", DEFAULT_MAX_TOKENS)),
        block=block_size(options),
    )


async def size_model(config: ModelConfig, on_progress: OnProgress = lambda fraction: None) -> ModelSize:
    """Find the model, fetching it from the hub if need be, and size it. Cancelled, it leaves nothing that goes on.

    `on_progress` hears how much of a download is there, from 0 to 1. What the entry says of the model's memory goes
    before what its files say. Raises CannotLoad or InvalidRequest with the cure, OSError.
    """
    return await load(config.kind.sizer)(config, on_progress)


async def own_size(config: ModelConfig, on_progress: OnProgress) -> ModelSize:
    """Of an engine that takes no memory here."""
    return ModelSize(source=config.source, need_bytes=0)


async def size_of_files(config: ModelConfig, on_progress: OnProgress) -> ModelSize:
    """Of an engine that loads a model's files."""
    check_packages(config)
    code = bool(config.options.get("trust_remote_code"))
    path = local_path(config.source) or await fetch(config.source, config.revision, code=code, on_progress=on_progress)
    adapters = [str(local_path(one) or await fetch(one, on_progress=on_progress)) for one in config.adapters]
    need = await in_daemon_thread(load(config.kind.files_need), path, config)
    return ModelSize(source=str(path), need_bytes=config.vram_bytes or need, adapters=tuple(adapters))


def check_packages(config: ModelConfig) -> None:
    """Raises CannotLoad when quantisation needs a package that is not installed."""
    if config.options.get("quantization") is not None and find_spec("bitsandbytes") is None:
        raise CannotLoad(
            f"{config.id}: quantization needs the package bitsandbytes, which is not installed: "
            "`pip install bitsandbytes`, or leave quantization out"
        )


async def managed_size(config: ModelConfig, on_progress: OnProgress) -> ModelSize:
    """What its server may take of each device: nobody but who wrote its command knows. Raises InvalidRequest."""
    if config.vram_bytes is None:
        raise InvalidRequest(
            f"{config.id}: a managed model needs vram_bytes, the memory that its server may take of each device",
            param="models",
        )
    return ModelSize(source=config.source, need_bytes=config.vram_bytes)


def local_path(source: str) -> Path | None:
    """A local folder or GGUF file; None for the id of a model on the hub. Raises InvalidRequest for what is neither."""
    path = Path(source).expanduser()
    if path.exists():
        return path
    if source.count("/") != 1 or source.startswith(("/", ".", "~")):
        raise InvalidRequest(f"the model {source} is neither a folder, a GGUF file nor a hub id (owner/name)")
    return None


async def fetch(
    source: str,
    revision: str | None = None,
    *,
    code: bool = False,
    on_progress: OnProgress = lambda fraction: None,
) -> Path:
    """The folder of a hub id in the hub's cache; with its Python `code` only when that may be run.

    In a process: the hub's client downloads in threads of an executor, which would hold up the worker's end.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "penstock.processors.models.fetching",
        source,
        revision or "",
        "code" if code else "",
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    folder = ""
    try:
        async for line in process.stdout:
            text = line.decode(errors="replace").strip()
            if text.startswith(PROGRESS):
                on_progress(float(text.removeprefix(PROGRESS)))
            elif text:
                folder = text
        await process.wait()
    except asyncio.CancelledError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        raise
    if process.returncode or not folder:
        raise InvalidRequest(f"the model {source} could not be fetched from the hub; name a local folder")
    return Path(folder)


def parameters(folder: Path) -> int:
    """Number of parameters from the safetensors headers: exact, without reading the weights."""
    return sum(map(file_parameters, sorted(folder.glob("*.safetensors"))))


def file_parameters(file: Path) -> int:
    """Number of parameters in one safetensors file."""
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        header: dict[str, Any] = json.loads(stream.read(length))
    total = 0
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


def weights_need(path: Path, config: ModelConfig) -> int:
    """Bytes that an engine of this model will take: weights in its dtype, and its process."""
    return base_need(_count_and_config(path)[0], path, config.options)


def text_need(path: Path, config: ModelConfig) -> int:
    """The same with its token cache, and its steps."""
    options = config.options
    count, told = _count_and_config(path)
    need = base_need(count, path, options) + cache_tokens(options) * kv_bytes_per_token(told, element_bytes(options))
    # A step makes logits for one token of each of its runs.
    return need + slots_of(config) * int(told.get("vocab_size", 0)) * 4 * LOGITS_COPIES


def base_need(count: int, path: Path, options: Mapping[str, Any]) -> int:
    """Bytes of so many parameters, and of the process that holds them. Raises InvalidRequest when there are none."""
    if not count:
        raise InvalidRequest(f"{path} holds no safetensors weights (pickled ones are not opened)")
    context = 0 if device_name(options) == "cpu" else CUDA_CONTEXT_BYTES
    return count * element_bytes(options) + PROCESS_BYTES + context


def element_bytes(options: Mapping[str, Any]) -> int:
    return 4 if dtype_name(options) == "float32" else 2


def _count_and_config(path: Path) -> tuple[int, Mapping[str, Any]]:
    if path.is_file():
        header = gguf_header.read(path)
        return header.parameters, header.config()
    return parameters(path), model_config(path)


def usable_cores() -> int:
    return len(os.sched_getaffinity(0))
