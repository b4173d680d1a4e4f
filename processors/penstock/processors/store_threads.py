"""Threads for calls of the store of artifacts."""

from __future__ import annotations

from collections import defaultdict

from penstock.common.threads import DaemonThreads


class StoreThreads:
    """A store that hangs holds up nothing else, and one that takes nothing holds up nobody who reads from it.

    A store can be full for hours and give what it has. Outputs that it refuses are asked for again and again, and
    each call lasts as long as the client's own tries.
    """

    def __init__(self) -> None:
        self.reads = DaemonThreads()
        self._writes = defaultdict[str | None, DaemonThreads](DaemonThreads)

    def writes(self, store: str | None = None) -> DaemonThreads:
        """For outputs to the store of this name, one that is configured; None for the default one."""
        return self._writes[store]
