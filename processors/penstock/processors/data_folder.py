"""The worker's folder, which no other worker uses at the same time.

Several workers may be told the same folder: containers of one service have one configuration. Each takes the first one
that no living worker holds: `worker`, `worker-2`, `worker-3`, … A restarted worker finds the journal of one that died.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)

LOCK = ".lock"
MOST = 256
"""Folders that are tried."""
_HELD = (errno.EAGAIN, errno.EACCES)
_WITHOUT_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


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
        file = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _HELD:
                os.close(file)
                continue
            if error.errno not in _WITHOUT_LOCKS:
                os.close(file)
                raise
            logger.warning("worker.folder_not_locked path=%s: its file system has no locks", path)
        if number > 1:
            logger.info("worker.folder path=%s: other workers hold those before it", path)
        return DataFolder(path, file)
    raise OSError(errno.EBUSY, f"{MOST} workers hold folders", str(base))
