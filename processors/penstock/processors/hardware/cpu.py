"""Main memory as a device: what this machine or its cgroup has, and what is in use."""

from __future__ import annotations

from pathlib import Path

import psutil

from penstock.processors.core.ledger import DeviceCapacity

_CGROUP = Path("/sys/fs/cgroup")
_V1_UNLIMITED = 1 << 60


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _cgroup() -> tuple[int, int] | None:
    """(limit, used) bytes of our control group, version 2 or 1; None when it sets no limit."""
    for limit_name, used_name, stat_name, cache_name in (
        ("memory.max", "memory.current", "memory.stat", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
    ):
        limit, used = _number(_CGROUP / limit_name), _number(_CGROUP / used_name)
        if limit is not None and used is not None and limit < _V1_UNLIMITED:
            return limit, max(0, used - _stat(_CGROUP / stat_name, cache_name))
    return None


def _stat(path: Path, name: str) -> int:
    """A line of memory.stat. Cached file pages count as used there, but the kernel drops them when asked for memory."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name} ")), 0)


def total_bytes() -> int:
    """The smaller of the machine's memory and the cgroup's limit."""
    machine, group = int(psutil.virtual_memory().total), _cgroup()
    return machine if group is None else min(machine, group[0])


def used_bytes() -> int:
    """In use by all programs (of the cgroup, where it limits us), without what the kernel can drop at once."""
    memory, group = psutil.virtual_memory(), _cgroup()
    if group is not None and group[0] < memory.total:
        return group[1]
    return int(memory.total - memory.available)


def own_bytes(pid: int) -> int | None:
    """Memory that belongs to this process alone (USS); None when it is gone. Pages shared by a fork are not counted."""
    try:
        return int(psutil.Process(pid).memory_full_info().uss)
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return None


def capacity(limit_bytes: int | None, reserve_bytes: int) -> DeviceCapacity:
    """The ledger's entry for main memory; `limit_bytes` None means all there is."""
    total = total_bytes() if limit_bytes is None else min(limit_bytes, total_bytes())
    return DeviceCapacity(device="cpu", kind="cpu", total_bytes=total, reserve_bytes=min(reserve_bytes, total))
