"""A path that no other process of the same kind uses at the same time.

Several processes may be given the same path: containers of one service have one configuration. Each takes the first one
that no living process holds: `worker`, `worker-2`, `worker-3`, … A restarted process finds what one that died left.
"""

from __future__ import annotations

import errno
import logging
import os
from dataclasses import dataclass
from pathlib import Path

from penstock.common import file_lock

logger = logging.getLogger(__name__)

MOST = 256
"""Paths that are tried."""


@dataclass(frozen=True, slots=True)
class OwnPath:
    """`file`: the descriptor of its lock. The kernel releases that when the process ends, however it does."""

    path: Path
    file: int

    def release(self) -> None:
        os.close(self.file)


def claim_folder(base: Path) -> OwnPath:
    """Hold `base`, or the first free folder beside it. Raises OSError where it cannot be made or written."""
    return _claim(base, "", "/.lock")


def claim_file(base: Path) -> OwnPath:
    """The same for a file; its folder is made, the file is not."""
    return _claim(base.with_suffix(""), base.suffix, ".lock")


def _claim(base: Path, suffix: str, lock: str) -> OwnPath:
    for number in range(1, MOST + 1):
        path = base.with_name(base.name + (f"-{number}" if number > 1 else "") + suffix)
        lock_path = Path(f"{path}{lock}")
        lock_path.parent.mkdir(parents=True, exist_ok=True)
        file = file_lock.hold(lock_path)
        if file is None:
            continue
        if number > 1:
            logger.info("own_path.taken path=%s: other processes hold those before it", path)
        return OwnPath(path, file)
    raise OSError(errno.EBUSY, f"{MOST} processes hold such paths", str(base))
