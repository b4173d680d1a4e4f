"""Begins a view that knows nothing from the snapshot of another gateway, while it serves."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import threading
import time
from pathlib import Path

from penstock.common.threads import in_daemon_thread
from penstock.gateway.view.backfill import Backfill
from penstock.gateway.view.change_over import ChangeOver, Imported
from penstock.gateway.view.snapshot_file import Unusable
from penstock.gateway.view.snapshots import Snapshots
from penstock.gateway.view.store import Store
from penstock.gateway.view.view import View
from penstock.schemas.errors import PenstockError

logger = logging.getLogger(__name__)

SILENT_S = 10.0
"""A store that gives nothing for so long is given up."""
WRITER_S = 0.02
_EXPECTED = (Unusable, sqlite3.Error, OSError, PenstockError)


class SnapshotImport:
    """On the event loop. Reading begins at once: the snapshot must not be newer than the ends that are asked for."""

    def __init__(self, snapshots: Snapshots, view: View, store: Store) -> None:
        self._snapshots, self._view, self._store = snapshots, view, store
        self._stopped = threading.Event()
        self._is_used = False
        self._heard_s = time.monotonic()
        self._reading = asyncio.ensure_future(in_daemon_thread(snapshots.read, self._heard))

    def _heard(self, size_bytes: int) -> None:
        """On the reading thread."""
        self._heard_s = time.monotonic()
        if self._stopped.is_set():
            raise Unusable("it is not needed")

    def stop(self) -> None:
        """It is not needed any more, or was not at all: the log is short. Its file is removed unless it is used."""
        self._stopped.set()
        self._reading.add_done_callback(self._end)

    def _end(self, reading: asyncio.Future[Path | None]) -> None:
        if reading.cancelled() or reading.exception() is not None:
            return  # `read` has removed its file
        if not self._is_used:
            asyncio.get_running_loop().run_in_executor(None, self._snapshots.drop)

    async def run(self, backfill: Backfill) -> None:
        """Change over to the snapshot, and have the backfill begin behind it. If there is none, nothing changes.

        What fails once the store reads the new file is raised: then the view and its file do not agree.
        """
        began = time.monotonic()
        try:
            if await self._read() is None:
                logger.info("snapshot.absent: the log is read from its beginning")
                await asyncio.to_thread(self._snapshots.drop)
                return
            imported = await in_daemon_thread(self._snapshots.make_view, dict(backfill.offsets()), backfill)
            over = await self._switched(imported)
        except Exception as error:  # also what a file of a foreign release holds
            is_fault = not isinstance(error, _EXPECTED)
            logger.warning("snapshot.not_used reason=%s: the log is read from its beginning", error, exc_info=is_fault)
            await asyncio.to_thread(self._snapshots.drop)
            return
        try:
            self._view.change_over(over)
        finally:
            over.decide(switched=True)
        backfill.begin_at(imported.offsets, imported.taken_ms)
        logger.info("snapshot.used rows=%d seconds=%.1f", imported.last_number, time.monotonic() - began)

    async def _read(self) -> Path | None:
        while not self._reading.done():
            if time.monotonic() - self._heard_s > SILENT_S:
                self.stop()
                raise Unusable("the store of artifacts does not answer")
            await asyncio.wait({self._reading}, timeout=1)
        return self._reading.result()

    async def _switched(self, imported: Imported) -> ChangeOver:
        """Once the old file is copied and the store reads the new one. The writer waits for the decision."""
        while not self._view.flush():
            await asyncio.sleep(WRITER_S)
        over = self._store.begin_change_over(imported)
        try:
            while not await asyncio.to_thread(over.copied.wait, 1):
                pass
            if over.failure is not None:
                raise over.failure
            self._store.switch(imported)
        except BaseException:
            over.decide(switched=False)
            raise
        self._is_used = True
        return over
