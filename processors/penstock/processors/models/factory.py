"""Makes the engine of a configured model: the one place that knows all kinds of engines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from penstock.processors.engines.backend import BACKENDS
from penstock.processors.engines.base import Engine
from penstock.processors.engines.loading import cache_tokens, device_name
from penstock.processors.engines.noop import NoopEngine
from penstock.processors.hardware.cpu import CpuProbe
from penstock.processors.hardware.nvml import NvmlProbe
from penstock.processors.hardware.probe import DeviceFacts
from penstock.processors.models.catalog import ModelConfig
from penstock.processors.models.sizing import ModelSize, estimate
from penstock.schemas.errors import InvalidRequest

Facts = Callable[[str], DeviceFacts | None]
"""What is known of a device by its name."""


def this_machine(device: str) -> DeviceFacts | None:
    """Facts of a real device, looked up anew: for engines that are made without a worker."""
    return next((one for probe in (CpuProbe(), NvmlProbe()) for one in probe.devices() if one.device == device), None)


def make_engine(
    config: ModelConfig,
    size: ModelSize,
    devices: tuple[str, ...] = (),
    granted_bytes: int | None = None,
    *,
    facts: Facts = this_machine,
    logs: Path = Path("logs"),
) -> Engine:
    """The engine, not started, for devices (none: the one that its options name) and so many granted bytes of each.

    Those in processes take the options load_timeout_s (300) and silent_s (60).

    `logs` is the folder for what managed servers say. Raises InvalidRequest.
    """
    options = dict(config.options)
    granted_bytes = size.need_bytes if granted_bytes is None else granted_bytes
    if config.engine == "noop":
        return NoopEngine(config.id, options)
    if config.engine == "remote":
        from penstock.processors.engines.remote import RemoteEngine

        return RemoteEngine(config.id, config.source, options)
    if config.engine == "managed":
        from penstock.processors.engines.managed import ManagedEngine

        devices = devices or (device_name(options),)
        known = [facts(device) for device in devices]
        return ManagedEngine(
            config.id,
            size.source,
            options,
            devices=devices,
            granted_bytes=granted_bytes,
            total_bytes=min(0 if one is None else one.total_bytes for one in known),
            addresses=_addresses(known),
            logs=logs,
        )
    if config.engine not in BACKENDS:
        raise InvalidRequest(f"{config.id}: there is no engine {config.engine}", param="models")
    from penstock.processors.engines.host import ChildEngine

    load_timeout_s = float(options.pop("load_timeout_s", 300))
    silent_s = float(options.pop("silent_s", 60))
    if config.engine == "text":
        options["cache_tokens"] = cache_tokens(options)
    options.update(_seen(facts(devices[0])) if devices else {}, granted_bytes=granted_bytes)
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


def _addresses(devices: Sequence[DeviceFacts | None]) -> list[str] | None:
    """What CUDA_VISIBLE_DEVICES is to list; None when it is not known."""
    if any(one is None for one in devices):
        return None
    return [one.address for one in devices if one is not None and one.address is not None]


def _seen(device: DeviceFacts | None) -> dict[str, Any]:
    """How an engine's process finds its device: a card is the only one that it sees, so it is the first.

    On a simulated device it runs on the CPU. A card's number is not told to it: see `engines/child.py`.
    """
    if device is None:
        return {}
    on_card = device.address is not None
    return {"device": "cuda:0" if on_card else "cpu", "address": device.address or ""}
