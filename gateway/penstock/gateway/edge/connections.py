"""Long connections by caller: those of a key that was revoked or of a ticket that has expired end within a second."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Generator
from contextlib import contextmanager

from penstock.gateway.edge.keys import KeyRing
from penstock.gateway.limits.callers import Caller

logger = logging.getLogger(__name__)

LOOK_S = 0.5


class Connections:
    """Sockets, streams and long polls that are open; each must end when its `revoked` event is set."""

    def __init__(self, still_good: Callable[[Caller], bool], keys: KeyRing | None = None) -> None:
        self._still_good = still_good
        self._keys = keys
        self._open: dict[Caller, set[asyncio.Event]] = {}

    @contextmanager
    def of(self, caller: Caller) -> Generator[asyncio.Event]:
        """Around a connection: the event that is set when its key is taken back."""
        revoked = asyncio.Event()
        if not caller.may_end:
            yield revoked
            return
        self._open.setdefault(caller, set()).add(revoked)
        try:
            yield revoked
        finally:
            left = self._open.get(caller, set[asyncio.Event]())
            left.discard(revoked)
            if not left:
                self._open.pop(caller, None)

    def look(self) -> int:
        """Tell the connections of keys that are gone; how many. Also without any, the keys are those of the file.

        A change that nobody's call has read would be lost if the file broke afterwards.
        """
        if self._keys is not None:
            self._keys.problem()
        gone = [caller for caller in self._open if not self._still_good(caller)]
        told = 0
        for caller in gone:
            connections = self._open.pop(caller)
            told += len(connections)
            for revoked in connections:
                revoked.set()
        if told:
            logger.info("edge.revoked keys=%d connections=%d", len(gone), told)
        return told

    async def watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                self.look()
            except Exception:  # a watch that ended would leave the sockets of revoked keys open for ever
                logger.exception("edge.look_failed")
