"""Makes the engine of a configured model, by what its kind says of it (`penstock.producers.engine_kinds`)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.processors.engines.base import Engine
from penstock.processors.engines.loading import device_name
from penstock.processors.engines.noop import NoopEngine
from penstock.processors.engines.summarizing import TASK as SUMMARIZATION
from penstock.processors.engines.summarizing import SummarizingEngine
from penstock.processors.hardware import cpu, nvml
from penstock.processors.models.catalog import ModelConfig
from penstock.processors.models.sizing import ModelSize, estimate
from penstock.producers.engine_kinds import load


@dataclass(frozen=True, kw_only=True, slots=True)
class Making:
    """What an engine is made of. `options` is a copy that its maker may change."""

    config: ModelConfig
    size: ModelSize
    options: dict[str, Any]
    granted_bytes: int
    logs: Path


def make_engine(
    config: ModelConfig,
    size: ModelSize,
    device: str | None = None,
    granted_bytes: int | None = None,
    *,
    logs: Path = Path("logs"),
) -> Engine:
    """The engine, not started, for a device and so many granted bytes of it.

    Those in processes take the options load_timeout_s (300) and silent_s (60).

    `logs` is the folder for what managed servers say. Raises InvalidRequest.
    """
    options = dict(config.options)
    if device is not None:
        options["device"] = device
    granted_bytes = size.need_bytes if granted_bytes is None else granted_bytes
    making = Making(config=config, size=size, options=options, granted_bytes=granted_bytes, logs=logs)
    engine: Engine = load(config.kind.maker)(making)
    return SummarizingEngine(engine) if SUMMARIZATION in config.tasks else engine


def make_noop(making: Making) -> Engine:
    return NoopEngine(making.config.id, making.options)


def make_remote(making: Making) -> Engine:
    from penstock.processors.engines.remote import RemoteEngine

    return RemoteEngine(making.config.id, making.config.source, making.options)


def make_managed(making: Making) -> Engine:
    from penstock.processors.engines.managed import ManagedEngine

    device = device_name(making.options)
    return ManagedEngine(
        making.config.id,
        making.size.source,
        making.options,
        devices=[device],
        granted_bytes=making.granted_bytes,
        total_bytes=_total_bytes(device),
        logs=making.logs,
    )


def make_child(making: Making) -> Engine:
    """An engine in a process of its own."""
    from penstock.processors.engines.host import ChildEngine

    config, options = making.config, making.options
    assert config.kind.backend is not None
    limits = estimate(config).limits
    load_timeout_s = float(options.pop("load_timeout_s", 300))
    silent_s = float(options.pop("silent_s", 60))
    if limits.tokens is not None:
        options["cache_tokens"] = limits.tokens
    options["granted_bytes"] = making.granted_bytes
    if making.size.adapters:
        options["adapters"] = list(making.size.adapters)
    return ChildEngine(
        config.id,
        config.kind.backend,
        making.size.source,
        options,
        limits=limits,
        load_timeout_s=load_timeout_s,
        silent_s=silent_s,
    )


def _total_bytes(device: str) -> int:
    """All that a device has; 0 for one that is not there."""
    if device == "cpu":
        return cpu.total_bytes()
    return next((found.total_bytes for found in nvml.capacities(0) if found.device == device), 0)
