"""NVIDIA cards by NVML (`pynvml`, the module of nvidia-ml-py). Never run on a card here: see docs/gpu-status.md.

A card is called `cuda:N` as torch calls it: N counts the cards that CUDA_VISIBLE_DEVICES shows, in NVML's order, which
engine processes ask CUDA for too (CUDA_DEVICE_ORDER=PCI_BUS_ID).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

from penstock.processors.core.ledger import DeviceCapacity

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


def visible(shown: str | None, uuids: Sequence[str]) -> list[int]:
    """NVML's numbers of the cards that a CUDA_VISIBLE_DEVICES of `shown` leaves, in the order that it gives them.

    As CUDA does, the list ends at the first entry that names no card. MIG slices are not cards of their own here.
    """
    if shown is None:
        return list(range(len(uuids)))
    indices: list[int] = []
    for entry in (part.strip() for part in shown.split(",")):
        if entry.isdigit():
            matching = [int(entry)] if int(entry) < len(uuids) else []
        else:
            matching = [number for number, uuid in enumerate(uuids) if entry and uuid.startswith(entry)]
        if len(matching) != 1:
            break
        indices += matching
    return indices


def _memories(nvml: Any) -> list[tuple[int, int]]:
    """(total, used) bytes of each visible card, by all programs."""
    handles = [nvml.nvmlDeviceGetHandleByIndex(number) for number in range(int(nvml.nvmlDeviceGetCount()))]
    uuids = [_text(nvml.nvmlDeviceGetUUID(handle)) for handle in handles]
    sizes: list[tuple[int, int]] = []
    for number in visible(os.environ.get("CUDA_VISIBLE_DEVICES"), uuids):
        memory = nvml.nvmlDeviceGetMemoryInfo(handles[number])
        sizes.append((int(memory.total), int(memory.used)))
    return sizes


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _probe() -> list[tuple[int, int]]:
    with _session() as nvml:
        if nvml is None:
            return []
        try:
            return _memories(nvml)
        except nvml.NVMLError as error:  # a card that fell off the bus, a driver being replaced
            logger.warning("nvml.probe_failed error=%s", error)
            return []


def capacities(reserve_bytes: int) -> list[DeviceCapacity]:
    """One entry a card; none without a driver."""
    return [
        DeviceCapacity(device=f"cuda:{number}", kind="cuda", total_bytes=total, reserve_bytes=min(reserve_bytes, total))
        for number, (total, _) in enumerate(_probe())
    ]


def used_bytes() -> dict[str, int]:
    """Bytes in use on each card, by all programs."""
    return {f"cuda:{number}": used for number, (_, used) in enumerate(_probe())}
