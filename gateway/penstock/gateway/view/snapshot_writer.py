"""Writes the snapshot of a view to the store of artifacts, in turns with the other gateways."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import threading
import time
from collections.abc import Callable

from penstock.common.clock import now_ms
from penstock.common.release import release
from penstock.common.threads import in_daemon_thread
from penstock.gateway.view.snapshot_file import Unusable
from penstock.gateway.view.snapshots import Snapshots, is_due, turn_of
from penstock.gateway.view.store import Store
from penstock.gateway.view.view import View
from penstock.schemas.errors import PenstockError
from penstock.schemas.topics import TP

logger = logging.getLogger(__name__)

LOOK_S = 10.0
DELETE_S = 600.0


class SnapshotWriter:
    """On the event loop."""

    def __init__(
        self, snapshots: Snapshots, view: View, store: Store, interval_s: float, is_whole: Callable[[], bool]
    ) -> None:
        """`is_whole`: whether the view knows the whole history."""
        self._snapshots, self._view, self._store = snapshots, view, store
        self._interval_s, self._is_whole = interval_s, is_whole
        self._whole_since_ms = 0
        self._written: dict[TP, int] = {}
        """The offsets of partitions with news of requests when this gateway wrote last."""
        self._not_before_s = 0.0
        """From when on this gateway may write again."""

    async def run(self) -> None:
        delete_at_s = 0.0
        while True:
            await asyncio.sleep(min(LOOK_S, self._interval_s / 4))
            try:
                if await self._is_due():
                    await self._write()
            except (Unusable, sqlite3.Error, OSError, PenstockError) as error:
                logger.warning("snapshot.not_written error=%s", error)
            if time.monotonic() >= delete_at_s:
                delete_at_s = time.monotonic() + DELETE_S
                await self._delete_old()

    async def _delete_old(self) -> None:
        try:
            await in_daemon_thread(self._snapshots.delete_old, now_ms())
        except PenstockError as error:
            logger.warning("snapshot.old_not_deleted error=%s", error)

    async def _is_due(self) -> bool:
        if not self._is_whole():
            self._whole_since_ms = 0
            return False
        self._whole_since_ms = self._whole_since_ms or now_ms()
        if time.monotonic() < self._not_before_s or self._view.offsets_of_requests() == self._written:
            return False
        begun_ms = await in_daemon_thread(self._snapshots.begun_ms)
        gateways, now = self._view.gateways, now_ms()
        turn = turn_of(gateways.own_id or "", release(), gateways.known(now), now)
        return is_due(begun_ms, self._whole_since_ms, now, interval_s=self._interval_s, turn=turn)

    async def _write(self) -> None:
        # If it fails, the next in turn writes before this one copies the whole view again.
        self._not_before_s = time.monotonic() + 2 * self._interval_s
        began, offsets, in_file = time.monotonic(), self._view.offsets_of_requests(), threading.Event()
        while not self._view.flush(in_file, all_offsets=True):
            await asyncio.sleep(0.02)
        while not await asyncio.to_thread(in_file.wait, 1):
            pass
        size_bytes = await in_daemon_thread(self._snapshots.write, self._store.path)
        self._written, self._not_before_s = offsets, 0.0
        logger.info("snapshot.written bytes=%d seconds=%.1f", size_bytes, time.monotonic() - began)
