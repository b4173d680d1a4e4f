"""NVIDIA cards and MIG slices by NVML (`pynvml`, the module of nvidia-ml-py). Never run on a card: docs/gpu-status.md.

They are named as `penstock.processors.hardware.visible` says. A process is given a card by its UUID, so it does not
matter in which order CUDA counts; indexes in CUDA_VISIBLE_DEVICES count as NVML does (CUDA_DEVICE_ORDER=PCI_BUS_ID).
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Mapping, Set
from typing import Any

from penstock.processors.hardware.probe import DeviceFacts, Reading, Unread
from penstock.processors.hardware.processes import numbered_as_drivers_do
from penstock.processors.hardware.visible import Card, Shown, Slice, visible

logger = logging.getLogger(__name__)

KIND = "cuda"
_NOT_AVAILABLE = (1 << 64) - 1


class NvmlProbe:
    """The library stays open between readings, as opening it may wake a card; after an error it is opened again."""

    def __init__(self) -> None:
        self._shown = os.environ.get("CUDA_VISIBLE_DEVICES")
        self._nvml: Any = None
        self._devices: list[Shown] = []
        self._lists_processes = numbered_as_drivers_do()

    def devices(self) -> list[DeviceFacts]:
        """None without a driver."""
        try:
            nvml = self._open()
        except Exception as error:  # no package, no driver, no card: each is said in another way
            logger.info("nvml.absent error=%s", error)
            return []
        try:
            handles = [nvml.nvmlDeviceGetHandleByIndex(number) for number in range(int(nvml.nvmlDeviceGetCount()))]
            self._devices = visible(self._shown, [_card(nvml, handle) for handle in handles])
        except nvml.NVMLError as error:
            logger.warning("nvml.unusable error=%s: this worker has no card", error)
            self._close()
            return []
        return [
            DeviceFacts(device=one.device, kind=KIND, total_bytes=one.total_bytes, address=one.address, title=one.title)
            for one in self._devices
        ]

    def read(self, pids: Set[int]) -> Mapping[str, Reading | Unread]:
        if not self._devices:
            return {}
        try:
            nvml = self._open()
        except Exception as error:
            return dict.fromkeys((one.device for one in self._devices), Unread(f"the driver does not answer: {error}"))
        readings = {one.device: self._read(nvml, one) for one in self._devices}
        if any(isinstance(one, Unread) for one in readings.values()):
            self._close()  # a driver that was replaced, or a card that was reset, is found again by a new session
        return readings

    def _read(self, nvml: Any, device: Shown) -> Reading | Unread:
        try:
            handle = nvml.nvmlDeviceGetHandleByUUID(device.address)
            used_bytes = int(nvml.nvmlDeviceGetMemoryInfo(handle).used)
        except nvml.NVMLError as error:  # it fell off the bus, or is being reset
            return Unread(str(error))
        return Reading(used_bytes=used_bytes, by_pid=_by_pid(nvml, handle) if self._lists_processes else None)

    def _open(self) -> Any:
        if self._nvml is None:
            import pynvml

            pynvml.nvmlInit()
            self._nvml = pynvml
        return self._nvml

    def _close(self) -> None:
        nvml, self._nvml = self._nvml, None
        if nvml is not None:
            with contextlib.suppress(nvml.NVMLError):
                nvml.nvmlShutdown()


def _by_pid(nvml: Any, handle: Any) -> dict[int, int] | None:
    """Bytes by process; None where the driver does not tell. One that computes and draws is listed twice, the same."""
    found: dict[int, int] = {}
    for function in (nvml.nvmlDeviceGetComputeRunningProcesses, nvml.nvmlDeviceGetGraphicsRunningProcesses):
        try:
            processes = function(handle)
        except nvml.NVMLError:  # not supported, or not permitted; of slices only what computes is listed
            if function is nvml.nvmlDeviceGetComputeRunningProcesses:
                return None
            continue
        for process in processes:
            if process.usedGpuMemory is None or process.usedGpuMemory == _NOT_AVAILABLE:
                return None
            found[process.pid] = max(found.get(process.pid, 0), int(process.usedGpuMemory))
    return found


def _card(nvml: Any, handle: Any) -> Card:
    return Card(
        uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
        total_bytes=int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
        title=_text(nvml.nvmlDeviceGetName(handle)),
        slices=_slices(nvml, handle),
    )


def _slices(nvml: Any, handle: Any) -> tuple[Slice, ...] | None:
    """None where MIG is off or not known."""
    try:
        current, _pending = nvml.nvmlDeviceGetMigMode(handle)
        if current != nvml.NVML_DEVICE_MIG_ENABLE:
            return None
        most = int(nvml.nvmlDeviceGetMaxMigDeviceCount(handle))
    except nvml.NVMLError:
        return None
    card = _text(nvml.nvmlDeviceGetUUID(handle))
    found: list[Slice] = []
    for number in range(most):
        try:
            one = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)
        except nvml.NVMLError:  # there is no slice of this number
            continue
        old = f"MIG-{card}/{nvml.nvmlDeviceGetGpuInstanceId(one)}/{nvml.nvmlDeviceGetComputeInstanceId(one)}"
        total_bytes = int(nvml.nvmlDeviceGetMemoryInfo(one).total)
        found.append(Slice(number=number, names=(_text(nvml.nvmlDeviceGetUUID(one)), old), total_bytes=total_bytes))
    return tuple(found)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
