"""How far a view has come in each partition, and which records ahead of it are its gateway's own. Pure."""

from __future__ import annotations

from collections.abc import Collection

from penstock.schemas.records import Origin
from penstock.schemas.topics import TP


class Positions:
    """`offsets` has the next offset of each partition that was folded."""

    def __init__(self) -> None:
        self.offsets: dict[TP, int] = {}
        self._moved: set[TP] = set()
        self._own: dict[TP, set[int]] = {}

    def passed(self, tp: TP, offset: int) -> None:
        """The record at this offset was folded."""
        self.offsets[tp] = offset + 1
        self._moved.add(tp)

    def is_own(self, tp: TP, offset: int) -> bool:
        """Whether this gateway put the record there, and knows what it says; it is asked once."""
        own = self._own.get(tp)
        if not own or offset not in own:
            return False
        own.discard(offset)
        return True

    def put_here(self, origin: Origin) -> None:
        """This gateway put a record there; it is still to be read, unless it was already."""
        tp = (origin.topic, origin.partition)
        if self.offsets.get(tp, 0) <= origin.offset:
            self._own.setdefault(tp, set()).add(origin.offset)

    def moved(self) -> dict[TP, int]:
        """The offsets that changed since `settled`."""
        return {tp: self.offsets[tp] for tp in self._moved if tp in self.offsets}

    def all_moved(self) -> None:
        """All offsets are to be written, also of partitions in which nothing was folded."""
        self._moved.update(self.offsets)

    def settled(self) -> None:
        """What `moved` gave is on its way to the file."""
        self._moved.clear()

    def forget(self, gone: Collection[TP]) -> None:
        """Partitions of topics that are there no more."""
        for tp in gone:
            self.offsets.pop(tp, None)
            self._own.pop(tp, None)
