"""A driver that is not there: the functions of `pynvml` that the probe calls, with NVML's own errors and codes."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pynvml
import pytest

GIB = 1 << 30


@dataclass(eq=False)
class FakeSlice:
    """A MIG slice."""

    uuid: str
    total_bytes: int
    number: int
    used_bytes: int = 0
    processes: dict[int, int | None] = field(default_factory=dict)


@dataclass(eq=False)
class FakeCard:
    """A card. `processes`: bytes by pid, None where the driver does not tell. `error`: what it gives (NVML_ERROR_*)."""

    uuid: str
    total_bytes: int = 80 * GIB
    used_bytes: int = 0
    processes: dict[int, int | None] = field(default_factory=dict)
    slices: list[FakeSlice] | None = None
    error: int | None = None


class FakeDriver:
    """`error`: what nvmlInit gives. Counts sessions, so that a test sees whether they are opened anew and closed."""

    def __init__(self, *cards: FakeCard) -> None:
        self.cards = list(cards)
        self.error: int | None = None
        self.open = 0
        self.opened = 0

    def install(self, monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
        monkeypatch.setitem(__import__("sys").modules, "pynvml", self.module())
        return self

    def module(self) -> ModuleType:
        module = ModuleType("pynvml")
        # Its errors and constants are the real package's.
        module.__dict__.update({name: getattr(pynvml, name) for name in dir(pynvml) if name.startswith("NVML")})
        module.__dict__.update({name: getattr(self, name) for name in dir(self) if name.startswith("nvml")})
        return module

    # -- NVML

    def nvmlInit(self) -> None:
        if self.error is not None:
            raise pynvml.NVMLError(self.error)
        self.open += 1
        self.opened += 1

    def nvmlShutdown(self) -> None:
        self._check()
        self.open -= 1

    def _check(self, one: Any = None) -> None:
        if not self.open:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_UNINITIALIZED)
        if isinstance(one, FakeCard) and one.error is not None:
            raise pynvml.NVMLError(one.error)

    def nvmlDeviceGetCount(self) -> int:
        self._check()
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeCard:
        self._check(self.cards[index])
        return self.cards[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> FakeCard | FakeSlice:
        for card in self.cards:
            for one in (card, *(card.slices or ())):
                if one.uuid == uuid:
                    self._check(card)
                    return one
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)

    def nvmlDeviceGetUUID(self, handle: FakeCard | FakeSlice) -> str:
        self._check(handle)
        return handle.uuid

    def nvmlDeviceGetName(self, handle: FakeCard) -> str:
        self._check(handle)
        return "NVIDIA Fake"

    def nvmlDeviceGetMemoryInfo(self, handle: FakeCard | FakeSlice) -> Any:
        self._check(handle)
        total, used = handle.total_bytes, handle.used_bytes
        return SimpleNamespace(total=total, used=used, free=total - used)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: FakeCard | FakeSlice) -> list[Any]:
        self._check(handle)
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in handle.processes.items()]

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle: FakeCard | FakeSlice) -> list[Any]:
        if isinstance(handle, FakeSlice):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return self.nvmlDeviceGetComputeRunningProcesses(handle)

    def nvmlDeviceGetMigMode(self, handle: FakeCard) -> list[int]:
        self._check(handle)
        if handle.slices is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return [pynvml.NVML_DEVICE_MIG_ENABLE, pynvml.NVML_DEVICE_MIG_ENABLE]

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: FakeCard) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: FakeCard, index: int) -> FakeSlice:
        self._check(handle)
        for one in handle.slices or ():
            if one.number == index:
                return one
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)

    def nvmlDeviceGetGpuInstanceId(self, handle: FakeSlice) -> int:
        return handle.number + 3

    def nvmlDeviceGetComputeInstanceId(self, handle: FakeSlice) -> int:
        return 0
