"""How large a model is before it is loaded: the memory that its engine will take, and the limits that it will have."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from penstock.common.engine_kinds import load
from penstock.common.threads import in_daemon_thread
from penstock.processors.core.fleet.estimates import Shape
from penstock.processors.core.fleet.ledger import CannotLoad
from penstock.processors.engines.base import Limits
from penstock.processors.engines.process.loading import cache_tokens
from penstock.processors.models.catalog import ModelConfig
from penstock.processors.models.fetching import AWAY, FAILED, PROGRESS
from penstock.processors.models.parts import PROCESS_BYTES, MemoryPart, memory_parts, shape_of
from penstock.schemas.errors import EngineFailed, InvalidRequest

OnProgress = Callable[[float], None]
"""Hears how much of a download is there, from 0 to 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSize:
    """`source` is where the model really lies: what was sized is what is loaded."""

    source: str
    need_bytes: int = 0
    host_bytes: int = 0
    """Of main memory, while its weights pass through that on their way to a card."""
    adapters: tuple[str, ...] = ()
    """Where its LoRA adapters really lie."""
    parts: tuple[MemoryPart, ...] = ()
    """What `need_bytes` is made of, where it was estimated."""
    shape: Shape = ()
    """What its options allow of its largest batch."""


def slots_of(config: ModelConfig) -> int:
    return int(config.options.get("slots", config.kind.slots))


def silent_s_of(options: Mapping[str, Any]) -> float:
    """Seconds without a sign of life after which a process of an engine is killed."""
    return float(options.get("silent_s", 60))


def limits_of(config: ModelConfig) -> Limits:
    """Of an engine in a process of its own. Tokens limit those that have a cache of them."""
    caches = "cache_tokens" in config.kind.options
    return Limits(slots=slots_of(config), tokens=cache_tokens(config.options) if caches else None)


async def _not_measured(kind: str, threads: int, silent_s: float) -> int:
    return PROCESS_BYTES


async def size_model(
    config: ModelConfig,
    on_progress: OnProgress = lambda fraction: None,
    *,
    process_bytes: Callable[[str, int, float], Awaitable[int]] = _not_measured,
) -> ModelSize:
    """Find the model, fetching it from the hub if need be, and size it. Cancelled, it leaves nothing that goes on.

    `on_progress` hears how much of a download is there, from 0 to 1. What the entry says of the model's memory goes
    before what its files say. `process_bytes` returns what a process of a kind of engine, with so many threads, owns
    beside its model. Raises CannotLoad or InvalidRequest with the cure, OSError.
    """
    size: ModelSize = await load(config.kind.sizer)(config, on_progress)
    if config.vram_bytes is not None or all(part.name != "process" for part in size.parts):
        return size
    options = config.options
    own = await process_bytes(config.engine, int(options.get("threads", 1)), silent_s_of(options))
    parts = tuple(replace(part, bytes=own) if part.name == "process" else part for part in size.parts)
    return replace(size, parts=parts, need_bytes=sum(part.bytes for part in parts))


async def own_size(config: ModelConfig, on_progress: OnProgress) -> ModelSize:
    """Of an engine that takes no memory here."""
    return ModelSize(source=config.source, need_bytes=0)


async def size_of_files(config: ModelConfig, on_progress: OnProgress) -> ModelSize:
    """Of an engine that loads a model's files."""
    check_packages(config)
    code = bool(config.options.get("trust_remote_code"))
    path = local_path(config.source) or await fetch(config.source, config.revision, code=code, on_progress=on_progress)
    adapters = [str(local_path(one) or await fetch(one, on_progress=on_progress)) for one in config.adapters]
    parts: tuple[MemoryPart, ...] = ()
    if config.kind.files_need is None:
        parts = await in_daemon_thread(memory_parts, path, config.engine, config.options)
        need = sum(part.bytes for part in parts)
    else:
        need = await in_daemon_thread(load(config.kind.files_need), path, config)
    return ModelSize(
        source=str(path),
        need_bytes=config.vram_bytes or need,
        host_bytes=next((part.bytes for part in parts if part.name == "weights"), need),
        adapters=tuple(adapters),
        parts=parts,
        shape=shape_of(config.engine, config.options),
    )


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

    In a process: the hub's client downloads in threads of an executor, which would hold up the worker's end. Raises
    InvalidRequest when the hub refuses it, EngineFailed when another try may help.
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
    last = "ended without a word"
    try:
        async for line in process.stdout:
            text = line.decode(errors="replace").strip()
            if text.startswith(PROGRESS):
                on_progress(float(text.removeprefix(PROGRESS)))
            elif text:
                last = text
        await process.wait()
    except asyncio.CancelledError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        raise
    if process.returncode == 0:
        return Path(last)
    kind = InvalidRequest if last.startswith(FAILED) else EngineFailed
    why = last.removeprefix(FAILED).removeprefix(AWAY)
    raise kind(f"the model {source} could not be fetched from the hub: {why}")
