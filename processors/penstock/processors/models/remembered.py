"""Measured peaks of memory kept over restarts: a small file, written whole; one that cannot be read counts as none."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

from penstock.common.threads import in_daemon_thread
from penstock.processors.core.fleet.estimates import Estimates

logger = logging.getLogger(__name__)

LONGEST_BYTES = 16 << 20
"""A file that is longer was not written here."""


class RememberedEstimates:
    """Reads once, at the worker's start; writes when something was learned since."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.estimates = self._read()
        self._written = self.estimates.revision
        self._writing = False

    def _read(self) -> Estimates:
        try:
            if self._file.stat().st_size > LONGEST_BYTES:
                raise ValueError("it is too long")
            return Estimates.from_json(json.loads(self._file.read_text()))
        except FileNotFoundError:
            return Estimates()
        except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
            logger.warning("estimates.unreadable file=%s error=%s: memory is estimated anew", self._file, error)
            return Estimates()

    async def keep(self) -> None:
        """Write what was learned since the last time, if anything was. It never fails: the next time is as good."""
        revision = self.estimates.revision
        if revision == self._written or self._writing:
            return
        self._writing = True
        try:
            await in_daemon_thread(self._write, self.estimates.to_json())
            self._written = revision
        except OSError as error:
            logger.warning("estimates.unwritable file=%s error=%s", self._file, error)
        finally:
            self._writing = False

    def _write(self, remembered: dict[str, Any]) -> None:
        """The file is the old one or the new one, whenever the machine stops."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        draft = self._file.with_name(f"{self._file.name}.{os.getpid()}.new")
        with draft.open("w") as stream:
            json.dump(remembered, stream, separators=(",", ":"))
            stream.flush()
            os.fsync(stream.fileno())
        draft.replace(self._file)
