"""Makes the engine of a configured model: the one place that knows all kinds of engines."""

from __future__ import annotations

from pathlib import Path

from penstock.processors.engines.backend import BACKENDS
from penstock.processors.engines.base import Engine
from penstock.processors.engines.loading import cache_tokens, device_name
from penstock.processors.engines.noop import NoopEngine
from penstock.processors.hardware import cpu, nvml
from penstock.processors.models.catalog import ModelConfig
from penstock.processors.models.sizing import ModelSize, estimate
from penstock.schemas.errors import InvalidRequest


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
    granted_bytes = size.need_bytes if granted_bytes is None else granted_bytes
    if device is not None:
        options["device"] = device
    if config.engine == "noop":
        return NoopEngine(config.id, options)
    if config.engine == "remote":
        from penstock.processors.engines.remote import RemoteEngine

        return RemoteEngine(config.id, config.source, options)
    if config.engine == "managed":
        from penstock.processors.engines.managed import ManagedEngine

        device = device_name(options)
        total = _total_bytes(device)
        return ManagedEngine(
            config.id,
            size.source,
            options,
            devices=[device],
            granted_bytes=granted_bytes,
            total_bytes=total,
            logs=logs,
        )
    if config.engine not in BACKENDS:
        raise InvalidRequest(f"{config.id}: there is no engine {config.engine}", param="models")
    from penstock.processors.engines.host import ChildEngine

    load_timeout_s = float(options.pop("load_timeout_s", 300))
    silent_s = float(options.pop("silent_s", 60))
    if config.engine == "text":
        options["cache_tokens"] = cache_tokens(options)
    options["granted_bytes"] = granted_bytes
    if size.adapters:
        options["adapters"] = list(size.adapters)
    return ChildEngine(
        config.id,
        BACKENDS[config.engine],
        size.source,
        options,
        limits=estimate(config).limits,
        load_timeout_s=load_timeout_s,
        silent_s=silent_s,
    )


def _total_bytes(device: str) -> int:
    """All that a device has; 0 for one that is not there."""
    if device == "cpu":
        return cpu.total_bytes()
    return next((found.total_bytes for found in nvml.capacities(0) if found.device == device), 0)
