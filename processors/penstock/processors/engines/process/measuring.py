"""Memory of an engine's process on its device: what it holds now, and the most that it has held.

On a CPU its own pages: those that it shares with the fork server, and those of libraries, are nobody's in particular.
The kernel keeps the largest resident size (VmHWM), and what is shared hardly changes over a process's life, so that the
peak of the own pages is known without a thread that samples. It counts pages by processor, and adds up only when one's
count is large: what it says may be short by what they hold back, so that this is added to peaks.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from penstock.processors.engines.process.loading import CUDA_CONTEXT_BYTES
from penstock.processors.hardware.processes import own_bytes

_PROC = Path("/proc/self")
_KIB = 1024
_HELD_BACK_PAGES = 2 * 32
"""By processor: 32 (PERCPU_BATCH of Linux's lib/percpu_counter.c; before 6.2 64 a thread), of files and of others."""


class Meter:
    """For one device, as torch names it. `own` gives the bytes of this process alone, `proc` is its folder."""

    def __init__(
        self, device: str, own: Callable[[], int] = lambda: own_bytes(os.getpid()) or 0, proc: Path = _PROC
    ) -> None:
        self._device = device
        self._own, self._proc = own, proc
        self._held_back_bytes = _HELD_BACK_PAGES * (os.cpu_count() or 1) * os.sysconf("SC_PAGE_SIZE")
        self._shared_bytes: int | None = None
        self._peak_bytes = 0

    def used_bytes(self) -> int:
        """What it holds now. On a CPU milliseconds for each gigabyte: the kernel walks every page."""
        if self._device != "cpu":
            import torch

            return int(torch.cuda.memory_reserved(self._device)) + CUDA_CONTEXT_BYTES
        own = self._own()
        self._shared_bytes = max(0, _fields(self._proc / "status").get("VmRSS", 0) - own)
        self._peak_bytes = max(self._peak_bytes, own)
        return own

    def peak_bytes(self) -> int:
        """The most that it has held since it was forked. Cheap."""
        if self._device != "cpu":
            import torch

            return int(torch.cuda.max_memory_reserved(self._device)) + CUDA_CONTEXT_BYTES
        if self._shared_bytes is None:
            self.used_bytes()
        if most := _fields(self._proc / "status").get("VmHWM", 0):
            most += self._held_back_bytes
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
