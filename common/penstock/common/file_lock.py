"""A file that one process holds. The kernel lets go of it when the process ends, however it does."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
from pathlib import Path

logger = logging.getLogger(__name__)

_HELD = (errno.EWOULDBLOCK, errno.EACCES)
_WITHOUT_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


def hold(path: Path) -> int | None:
    """Take the lock: its descriptor, to be closed; None while another has it.

    The file holds the pid of its holder. Raises OSError where it cannot be made. On a file system without locks it is
    taken in any case, and the log says so.
    """
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _WITHOUT_LOCKS:
            os.close(file)
            if error.errno in _HELD:
                return None
            raise
        logger.warning("file.not_locked path=%s: its file system has no locks", path)
    try:
        os.ftruncate(file, 0)
        os.pwrite(file, f"{os.getpid()}\n".encode(), 0)
    except OSError:
        os.close(file)
        raise
    return file
