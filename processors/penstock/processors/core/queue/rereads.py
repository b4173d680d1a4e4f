"""Parked requests that end: their bytes are read again for the outcome, some at a time."""

from __future__ import annotations

from collections.abc import Callable

from penstock.processors.core.effects import Effect, Fetch
from penstock.processors.core.work.work import Work
from penstock.schemas.topics import CLASSES, TP

LAST = len(CLASSES)
"""The urgency of such a reading: after those whose turn is near."""


class Rereads:
    """A hopeless load ends all that wait for it at once: without a limit all of their bytes would come back together.

    What is being read, or was read and is not settled yet, takes `limit_bytes` at most, or is a single record. The
    next ones are asked for when half of that is free again, in order of their offsets: so they are read in ranges.
    """

    def __init__(self, emit: Callable[[Effect], None], limit_bytes: int) -> None:
        self._emit = emit
        self._limit_bytes = limit_bytes
        self._waiting: dict[Work, None] = {}
        self._held: set[Work] = set()
        self._held_bytes = 0

    def add(self, work: Work) -> None:
        """It is ended. Its bytes are asked for, now or when there is room."""
        self._waiting[work] = None
        self._ask()

    def over(self, work: Work) -> None:
        """Its outcome is durable, or it was dropped. Requests that were not added are left alone."""
        if work in self._held:
            self._held.remove(work)
            self._held_bytes -= work.size_bytes
            if self._held_bytes * 2 <= self._limit_bytes:
                self._ask()
        else:
            self._waiting.pop(work, None)

    def _ask(self) -> None:
        wanted: dict[TP, list[int]] = {}
        while self._waiting:
            work = next(iter(self._waiting))
            if self._held and self._held_bytes + work.size_bytes > self._limit_bytes:
                break
            del self._waiting[work]
            self._held.add(work)
            self._held_bytes += work.size_bytes
            wanted.setdefault(work.tp, []).append(work.key[2])
        for tp, offsets in wanted.items():
            self._emit(Fetch(tp, tuple(sorted(offsets)), LAST))
