"""Admission: who may use how much memory. Reserved plus measured never passes a device's limit.

A grant or None, never an exception for "not now" (after vLLM's allocate_slots). What can never fit is told at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.schemas.errors import EngineFailed, InsufficientCapacity


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceCapacity:
    """A device and what of it may never be granted (`reserve_bytes`: the system's and other programs' share)."""

    device: str
    kind: str
    total_bytes: int
    reserve_bytes: int = 0

    @property
    def limit_bytes(self) -> int:
        return max(0, self.total_bytes - self.reserve_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Grant:
    """Memory given to an owner; to be released exactly once."""

    number: int
    owner: str
    device: str
    bytes: int
    granted_at: float


class MemoryShort(EngineFailed):
    """It would fit, but not now: what waits for it goes on waiting."""


class CannotLoad(EngineFailed):
    """Loading it again would fail again: somebody has to mend its configuration or its files."""


class IllegalRelease(RuntimeError):
    """A grant was released twice, or was never given."""


class _Device:
    __slots__ = ("capacity", "foreign_bytes", "reserved_bytes")

    def __init__(self, capacity: DeviceCapacity) -> None:
        self.capacity = capacity
        self.reserved_bytes = 0
        self.foreign_bytes = 0  # measured use that no grant explains

    @property
    def free_bytes(self) -> int:
        return max(0, self.capacity.limit_bytes - self.reserved_bytes - self.foreign_bytes)


class Ledger:
    """Grants against devices. `observe` tells what is really in use, so that others' memory is not granted again."""

    def __init__(self, devices: Sequence[DeviceCapacity]) -> None:
        self._devices = {capacity.device: _Device(capacity) for capacity in devices}
        self._grants: dict[int, Grant] = {}
        self._number = 0

    def fits_ever(self, need_bytes: int, device: str | None = None) -> bool:
        """Whether any device (or this one) could hold it, were it empty."""
        return any(need_bytes <= held.capacity.limit_bytes for held in self._candidates(device))

    def grant(self, owner: str, need_bytes: int, device: str | None, now: float) -> Grant | None:
        """Reserve on the device with the most room (or on this one); None when it does not fit now."""
        fitting = [held for held in self._candidates(device) if need_bytes <= held.free_bytes]
        if not fitting:
            return None
        best = max(fitting, key=lambda held: held.free_bytes)
        best.reserved_bytes += need_bytes
        self._number += 1
        grant = Grant(number=self._number, owner=owner, device=best.capacity.device, bytes=need_bytes, granted_at=now)
        self._grants[grant.number] = grant
        return grant

    def release(self, grant: Grant) -> None:
        """Raises IllegalRelease."""
        if self._grants.pop(grant.number, None) is None:
            raise IllegalRelease(f"grant {grant.number} of {grant.owner} is not held")
        self._devices[grant.device].reserved_bytes -= grant.bytes

    def observe(self, device: str, used_bytes: int, *, by_grants_bytes: int = 0) -> None:
        """What a probe measured in all, and how much of it belongs to holders of grants."""
        self._devices[device].foreign_bytes = max(0, used_bytes - by_grants_bytes)

    def free_bytes(self, device: str) -> int:
        return self._devices[device].free_bytes

    def reserved_bytes(self, device: str) -> int:
        return self._devices[device].reserved_bytes

    def devices(self) -> list[DeviceCapacity]:
        return [held.capacity for held in self._devices.values()]

    def grants(self) -> list[Grant]:
        return list(self._grants.values())

    def insufficient(self, what: str, need_bytes: int, device: str | None = None) -> InsufficientCapacity:
        """The error for what can never fit, naming need and capacity."""
        capacity = max((held.capacity.limit_bytes for held in self._candidates(device)), default=0)
        return InsufficientCapacity(
            f"{what} needs {need_bytes / 2**20:.0f} MiB; the largest device here grants {capacity / 2**20:.0f} MiB",
            details={"need": need_bytes, "capacity": capacity, "unit": "bytes"},
        )

    def _candidates(self, device: str | None) -> list[_Device]:
        return [held for name, held in self._devices.items() if device is None or name == device]
