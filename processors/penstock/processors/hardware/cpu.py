"""Main memory as a device: what this machine or its cgroup has, and what is in use."""

from __future__ import annotations

from pathlib import Path

import psutil

from penstock.processors.core.admission import DeviceCapacity

_CGROUP = Path("/sys/fs/cgroup")


def _cgroup_number(name: str) -> int | None:
    try:
        text = (_CGROUP / name).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def total_bytes() -> int:
    """The smaller of the machine's memory and the cgroup's limit."""
    machine = int(psutil.virtual_memory().total)
    limit = _cgroup_number("memory.max")
    return machine if limit is None else min(machine, limit)


def used_bytes() -> int:
    """In use by all programs, without what the kernel can drop at once."""
    memory = psutil.virtual_memory()
    return int(memory.total - memory.available)


def capacity(limit_bytes: int | None, reserve_bytes: int) -> DeviceCapacity:
    """The ledger's entry for main memory; `limit_bytes` None means all there is."""
    total = total_bytes() if limit_bytes is None else min(limit_bytes, total_bytes())
    return DeviceCapacity(device="cpu", kind="cpu", total_bytes=total, reserve_bytes=min(reserve_bytes, total))
