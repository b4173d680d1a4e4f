"""NVIDIA cards by NVML (`pynvml`, the module of nvidia-ml-py). Never run on a card here: see docs/gpu-status.md."""

from __future__ import annotations

import logging
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from penstock.processors.core.admission import DeviceCapacity

logger = logging.getLogger(__name__)


@contextmanager
def _session() -> Generator[Any]:
    """The initialised module, or None on a machine without the driver."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception as error:  # no package, no driver, no card: all mean that there is nothing to probe
        logger.debug("nvml.absent error=%s", error)
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def capacities(reserve_bytes: int) -> list[DeviceCapacity]:
    """One entry a card, named cuda:N in NVML's order; none without a driver."""
    with _session() as nvml:
        if nvml is None:
            return []
        found: list[DeviceCapacity] = []
        for number in range(int(nvml.nvmlDeviceGetCount())):
            memory = nvml.nvmlDeviceGetMemoryInfo(nvml.nvmlDeviceGetHandleByIndex(number))
            found.append(
                DeviceCapacity(
                    device=f"cuda:{number}", kind="cuda", total_bytes=int(memory.total), reserve_bytes=reserve_bytes
                )
            )
        return found


def used_bytes() -> dict[str, int]:
    """Bytes in use on each card, by all programs."""
    with _session() as nvml:
        if nvml is None:
            return {}
        return {
            f"cuda:{number}": int(nvml.nvmlDeviceGetMemoryInfo(nvml.nvmlDeviceGetHandleByIndex(number)).used)
            for number in range(int(nvml.nvmlDeviceGetCount()))
        }
