"""Main memory as a device: what this machine or its control groups grant, and what is in use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from pathlib import Path

import psutil

from penstock.processors.hardware.probe import DeviceFacts, Reading
from penstock.processors.hardware.processes import OwnBytes

NAME = "cpu"
_MOUNT = Path("/sys/fs/cgroup")
_OURS = Path("/proc/self/cgroup")
_V1_UNLIMITED = 1 << 60


class CpuProbe:
    """One device, `cpu`. Of our own processes it gives what belongs to each alone."""

    def __init__(self) -> None:
        self._own = OwnBytes()

    def devices(self) -> list[DeviceFacts]:
        return [DeviceFacts(device=NAME, kind=NAME, total_bytes=total_bytes(), title="main memory")]

    def read(self, pids: Set[int]) -> Mapping[str, Reading]:
        return {NAME: Reading(used_bytes=used_bytes(), by_pid=self._own.of(pids))}


def total_bytes() -> int:
    """The smallest of the machine's memory and the limits of our control groups."""
    return min([int(psutil.virtual_memory().total), *(limit for limit, _ in _limits())])


def used_bytes() -> int:
    """In use, without what the kernel can drop at once: so much of `total_bytes` cannot be had any more."""
    memory = psutil.virtual_memory()
    free = [int(memory.available), *(limit - used for limit, used in _limits())]
    return max(0, total_bytes() - max(0, min(free)))


# -- control groups


def _limits() -> Iterator[tuple[int, int]]:
    """(limit, used) bytes of each control group above us that has a limit, of version 2 and 1."""
    paths = _groups()
    for base, path, names in (
        (_MOUNT, paths.get("", "/"), ("memory.max", "memory.current", "inactive_file")),
        (
            _MOUNT / "memory",
            paths.get("memory", "/"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ),
    ):
        for folder in _upwards(base, path):
            limit, used = _number(folder / names[0]), _number(folder / names[1])
            if limit is not None and used is not None and limit < _V1_UNLIMITED:
                # Cached file pages count as used there, but the kernel drops them when asked for memory.
                yield limit, max(0, used - _stat(folder / "memory.stat", names[2]))


def _groups() -> dict[str, str]:
    """By controller (`` for version 2), our group's path. In a container it may name folders that are not there."""
    try:
        lines = _OURS.read_text().splitlines()
    except OSError:
        return {}
    fields = [line.split(":", 2) for line in lines if line.count(":") >= 2]
    return {controller: path for _, controllers, path in fields for controller in controllers.split(",")}


def _upwards(base: Path, path: str) -> Iterator[Path]:
    parts = [part for part in path.split("/") if part and part != ".."]
    for count in range(len(parts), -1, -1):
        yield base.joinpath(*parts[:count])


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _stat(path: Path, name: str) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name} ")), 0)
