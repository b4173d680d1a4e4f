"""How much is left on the file system that a gateway writes to."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

LOW_BYTES = 1 << 30
LOW_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class Disk:
    """The file system of a folder."""

    folder: Path
    free_bytes: int
    size_bytes: int

    @property
    def is_low(self) -> bool:
        return self.free_bytes < min(LOW_BYTES, LOW_SHARE * self.size_bytes)


def look_at(folder: Path) -> Disk:
    """Raises OSError."""
    found = shutil.disk_usage(folder)
    return Disk(folder, found.free, found.total)
