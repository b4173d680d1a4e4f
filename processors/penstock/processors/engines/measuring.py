"""Memory of an engine's process on its device: what it holds now, and the most that it has held.

On a CPU its own pages: those that it shares with the fork server, and those of libraries, are nobody's in particular.
The kernel keeps the largest resident size (VmHWM), and what is shared hardly changes over a process's life, so that the
peak of the own pages is known without a thread that samples.
"""

from __future__ import annotations

import os
from pathlib import Path

from penstock.processors.engines.loading import CUDA_CONTEXT_BYTES
from penstock.processors.hardware.processes import own_bytes

_PROC = Path("/proc/self")
_KIB = 1024


class Meter:
    """For one device, as torch names it."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._shared_bytes: int | None = None
        self._peak_bytes = 0

    def used_bytes(self) -> int:
        """What it holds now. On a CPU milliseconds for each gigabyte: the kernel walks every page."""
        if self._device != "cpu":
            import torch

            return int(torch.cuda.memory_reserved(self._device)) + CUDA_CONTEXT_BYTES
        own = own_bytes(os.getpid()) or 0
        self._shared_bytes = max(0, _fields(_PROC / "status").get("VmRSS", 0) - own)
        self._peak_bytes = max(self._peak_bytes, own)
        return own

    def peak_bytes(self) -> int:
        """The most that it has held since it was forked. Cheap."""
        if self._device != "cpu":
            import torch

            return int(torch.cuda.max_memory_reserved(self._device)) + CUDA_CONTEXT_BYTES
        if self._shared_bytes is None:
            self.used_bytes()
        most = _fields(_PROC / "status").get("VmHWM", 0)
        self._peak_bytes = max(self._peak_bytes, most - (self._shared_bytes or 0))
        return self._peak_bytes


def _fields(file: Path) -> dict[str, int]:
    """The sizes of a file of the proc file system, in bytes by name; empty where there is none."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return {}
    words = [line.split() for line in lines]
    return {one[0][:-1]: int(one[1]) * _KIB for one in words if len(one) == 3 and one[2] == "kB" and one[1].isdigit()}
