"""Makes the engine of a configured model, by what its kind says of it (`penstock.common.engine_kinds`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.common.engine_kinds import load
from penstock.processors.engines.base import Engine
from penstock.processors.engines.items import ItemsEngine
from penstock.processors.engines.noop import NoopEngine
from penstock.processors.engines.process.loading import device_name
from penstock.processors.engines.text.summarizing import TASK as SUMMARIZATION
from penstock.processors.engines.text.summarizing import SummarizingEngine
from penstock.processors.hardware.cpu import CpuProbe
from penstock.processors.hardware.nvml import NvmlProbe
from penstock.processors.hardware.probe import DeviceFacts
from penstock.processors.models.catalog import ModelConfig
from penstock.processors.models.sizing import ModelSize, limits_of, silent_s_of
from penstock.processors.settings import ImagesSection

Facts = Callable[[str], DeviceFacts | None]
"""What is known of a device by its name."""


def this_machine(device: str) -> DeviceFacts | None:
    """Facts of a real device, looked up again: for engines that are made without a worker."""
    return next((one for probe in (CpuProbe(), NvmlProbe()) for one in probe.devices() if one.device == device), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Making:
    """What an engine is made of. `options` is a copy that its maker may change."""

    config: ModelConfig
    size: ModelSize
    options: dict[str, Any]
    devices: tuple[str, ...]
    granted_bytes: int
    facts: Facts
    logs: Path
    images: ImagesSection | None


def make_engine(
    config: ModelConfig,
    size: ModelSize,
    devices: tuple[str, ...] = (),
    granted_bytes: int | None = None,
    *,
    facts: Facts = this_machine,
    logs: Path = Path("logs"),
    images: ImagesSection | None = None,
) -> Engine:
    """The engine, not started, for devices (none: the one that its options name) and so many granted bytes of each.

    Those in processes take the options load_timeout_s (300) and silent_s (60).

    `logs` is the folder for what managed servers say; `images` as the worker's settings say. Raises InvalidRequest.
    """
    making = Making(
        config=config,
        size=size,
        options=dict(config.options),
        devices=devices,
        granted_bytes=size.need_bytes if granted_bytes is None else granted_bytes,
        facts=facts,
        logs=logs,
        images=images,
    )
    engine: Engine = load(config.kind.maker)(making)
    return SummarizingEngine(engine) if SUMMARIZATION in config.tasks else engine


def make_noop(making: Making) -> Engine:
    return NoopEngine(making.config.id, making.options)


def make_items(making: Making) -> Engine:
    return ItemsEngine(making.config.id)


def make_remote(making: Making) -> Engine:
    from penstock.processors.engines.remote.engine import RemoteEngine

    return RemoteEngine(making.config.id, making.config.source, making.options, images=making.images)


def make_managed(making: Making) -> Engine:
    from penstock.processors.engines.managed.engine import ManagedEngine

    devices = making.devices or (device_name(making.options),)
    known = [making.facts(device) for device in devices]
    return ManagedEngine(
        making.config.id,
        making.size.source,
        making.options,
        devices=devices,
        granted_bytes=making.granted_bytes,
        total_bytes=min(0 if one is None else one.total_bytes for one in known),
        addresses=_addresses(known),
        logs=making.logs,
        images=making.images,
    )


def make_child(making: Making) -> Engine:
    from penstock.processors.engines.process.host import ChildEngine

    config, options = making.config, making.options
    assert config.kind.backend is not None
    limits = limits_of(config)
    load_timeout_s = float(options.pop("load_timeout_s", 300))
    silent_s = silent_s_of(options)
    options.pop("silent_s", None)
    if limits.tokens is not None:
        options["cache_tokens"] = limits.tokens
    options.update(_seen(making.facts(making.devices[0])) if making.devices else {}, granted_bytes=making.granted_bytes)
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


def _addresses(devices: Sequence[DeviceFacts | None]) -> list[str] | None:
    """What CUDA_VISIBLE_DEVICES is to list; None when it is not known."""
    if any(one is None for one in devices):
        return None
    return [one.address for one in devices if one is not None and one.address is not None]


def _seen(device: DeviceFacts | None) -> dict[str, Any]:
    """How an engine's process finds its device: a card is the only one that it sees, so it is the first.

    On a simulated device it runs on the CPU. It does not get a card's number: see `engines/process/child.py`.
    """
    if device is None:
        return {}
    on_card = device.address is not None
    return {"device": "cuda:0" if on_card else "cpu", "address": device.address or ""}
