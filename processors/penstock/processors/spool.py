"""Finished outputs that their store did not take: kept on local disk within a limit, so that they take no memory."""

from __future__ import annotations

import logging
import pickle
import tempfile
import weakref
from pathlib import Path
from typing import IO

from penstock.common.threads import in_daemon_thread
from penstock.processors.engines.base import Finished

logger = logging.getLogger(__name__)


class Spooled:
    """One output in a file without a name: it ends with this object, and with the process however that ends."""

    def __init__(self, spool: Spool, file: IO[bytes], size: int) -> None:
        self._file, self.size = file, size
        weakref.finalize(self, spool.give_back, file, size)

    async def read(self) -> Finished:
        """The output as it was. Raises OSError."""
        return await in_daemon_thread(self._read)

    def _read(self) -> Finished:
        self._file.seek(0)
        return pickle.load(self._file)


class Spool:
    """Used on one event loop, which it does not hold up."""

    def __init__(self, folder: Path, most_bytes: int) -> None:
        """`folder` is there. `most_bytes` in all; 0: nothing is kept here."""
        self._folder = folder
        self._most_bytes = most_bytes
        self.used_bytes = 0

    async def put(self, finished: Finished) -> Spooled | None:
        """Write it; None when there is no room for it, or the disk does not take it."""
        data = pickle.dumps(finished)
        if self.used_bytes + len(data) > self._most_bytes:
            return None
        self.used_bytes += len(data)
        try:
            file = await in_daemon_thread(self._write, data)
        except BaseException as error:
            self.used_bytes -= len(data)
            if not isinstance(error, OSError):
                raise
            logger.warning("spool.not_written folder=%s error=%s", self._folder, error)
            return None
        return Spooled(self, file, len(data))

    def _write(self, data: bytes) -> IO[bytes]:
        file: IO[bytes] = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115 - `Spooled` closes it
        try:
            file.write(data)
            file.flush()
        except BaseException:
            file.close()
            raise
        return file

    def give_back(self, file: IO[bytes], size: int) -> None:
        """Nobody has the output any more."""
        file.close()
        self.used_bytes -= size
