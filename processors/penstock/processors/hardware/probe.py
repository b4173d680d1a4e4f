"""What every probe offers: the devices that it knows, and a reading of the memory in use on each."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceFacts:
    """A device that is there. `kind`: cpu, cuda or simulated.

    `address` is what CUDA_VISIBLE_DEVICES must say so that a process sees this card, or slice, alone; None where there
    is no card. `title` is its name for people.
    """

    device: str
    kind: str
    total_bytes: int
    address: str | None = None
    title: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """Memory in use on a device, in bytes.

    `used_bytes`: by all programs; on a simulated device by others than ours. `by_pid`: by process, as processes are
    numbered here; None where the driver does not tell (WSL2, containers).
    """

    used_bytes: int
    by_pid: Mapping[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Unread:
    """A device that could not be measured this time, and why."""

    reason: str


class Probe(Protocol):
    """Its methods block, and never raise for what a driver does: they are called in a thread of their own."""

    def devices(self) -> list[DeviceFacts]:
        """Those that are there; looked at once, when the worker starts."""
        ...

    def read(self, pids: Set[int]) -> Mapping[str, Reading | Unread]:
        """Of each device. `pids` are the processes of our engines: others need not be distinguished."""
        ...
