"""The worker's folder, which no other worker uses at the same time.

Several workers may be told the same folder: containers of one service have one configuration. Each takes the first one
that no living worker holds: `worker`, `worker-2`, `worker-3`, … A restarted worker finds the journal of one that died.
"""

from __future__ import annotations

import errno
import logging
import os
from dataclasses import dataclass
from pathlib import Path

from penstock.common import file_lock

logger = logging.getLogger(__name__)

LOCK = ".lock"
MOST = 256
"""Folders that are tried."""


@dataclass(frozen=True, slots=True)
class DataFolder:
    """`file`: the descriptor of its lock. The kernel lets go of that when the process ends, however it does."""

    path: Path
    file: int

    def release(self) -> None:
        os.close(self.file)


def claim(base: Path) -> DataFolder:
    """Hold `base`, or the first folder beside it that is free. Raises OSError where it cannot be made or written."""
    for number in range(1, MOST + 1):
        path = base if number == 1 else base.with_name(f"{base.name}-{number}")
        path.mkdir(parents=True, exist_ok=True)
        file = file_lock.hold(path / LOCK)
        if file is None:
            continue
        if number > 1:
            logger.info("worker.folder path=%s: other workers hold those before it", path)
        return DataFolder(path, file)
    raise OSError(errno.EBUSY, f"{MOST} workers hold folders", str(base))
