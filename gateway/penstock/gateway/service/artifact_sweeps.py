"""Sweeps of the artifact store, every so often and when an operator asks: this gateway knows the outcomes."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from penstock.common.artifacts.sweep import Doomed, Key, in_question, plan
from penstock.common.artifacts.sweeping import Sweeper
from penstock.gateway.conversations.layout import Layout
from penstock.gateway.threads import Threads
from penstock.gateway.view.view import View
from penstock.schemas.errors import PenstockError

logger = logging.getLogger(__name__)

SHOWN = 1_000
"""At most so many artifacts are named in an answer."""
_FOUND_AT_ONCE = 200


@dataclass(frozen=True, slots=True)
class Swept:
    """What a sweep took away, or would take away."""

    doomed: Sequence[Doomed]
    released: int
    """Conversations that are no more and held artifacts until now."""
    dry_run: bool

    def to_json(self) -> dict[str, Any]:
        counts = Counter(one.reason for one in self.doomed)
        return {
            "object": "artifact.sweep",
            "dry_run": self.dry_run,
            "artifacts": {reason: counts[reason] for reason in ("expired", "orphan", "partial")},
            "bytes": sum(one.size_bytes for one in self.doomed),
            "released_conversations": self.released,
            "data": [
                {"tenant": one.tenant, "artifact_id": one.artifact_id, "reason": one.reason, "bytes": one.size_bytes}
                for one in self.doomed[:SHOWN]
            ],
        }


class ArtifactSweeps:
    """Used on one event loop; one sweep at a time."""

    def __init__(self, sweeper: Sweeper, view: View, layout: Layout, threads: Threads, every_s: float) -> None:
        self._sweeper = sweeper
        self._view = view
        self._layout = layout
        self._threads = threads
        self._every_s = every_s
        self._one = asyncio.Lock()

    async def run(self) -> None:
        """Complete the index by time, then sweep every so often, until it is cancelled.

        Several gateways do not begin a sweep together.
        """
        try:
            with _logged("artifacts.not_indexed"):
                await self._index()
            while self._every_s:
                await asyncio.sleep(self._every_s * random.uniform(0.5, 1.0))
                with _logged("artifacts.not_swept"):
                    swept = await self.sweep()
                    if swept.doomed or swept.released:
                        logger.info("artifacts.swept artifacts=%d released=%d", len(swept.doomed), swept.released)
        except asyncio.CancelledError:
            self._sweeper.stop()
            raise

    async def _index(self) -> None:
        async with self._one:
            if added := await asyncio.to_thread(self._sweeper.index):
                logger.info("artifacts.indexed artifacts=%d", added)

    async def sweep(self, *, dry_run: bool = False) -> Swept:
        """Raises StoreUnavailable, BrokerUnavailable."""
        async with self._one:
            listing, facts = await asyncio.to_thread(self._sweeper.look)
            now_ms = self._sweeper.now_ms()
            named = await self._outcomes(in_question(listing, facts, now_ms))
            in_some = listing.holding or any(one.conversation_id is not None for one in facts.values())
            conversations = await self._conversations() if in_some else None
            swept = plan(listing, facts, now_ms, named=named, conversations=conversations)
            doomed = swept.doomed if dry_run else await asyncio.to_thread(self._sweeper.apply, swept)
            return Swept(doomed, len(swept.released), dry_run)

    async def _outcomes(self, requests: Iterable[Key]) -> dict[Key, frozenset[str]]:
        """By request that has ended, as this gateway knows: the artifacts that its outcome names."""
        named: dict[Key, frozenset[str]] = {}
        for number, key in enumerate(requests):
            if number % _FOUND_AT_ONCE == 0:
                await asyncio.sleep(0)  # others have their turn on the loop
            entry = self._view.known.peek(key)
            if entry is not None and entry.erased:
                named[key] = frozenset()
            elif entry is not None and entry.done:
                named[key] = entry.artifact_ids
        return named

    async def _conversations(self) -> set[Key]:
        return set(await self._threads.conversations.run(self._layout.everyone))


@contextmanager
def _logged(event: str) -> Generator[None]:
    """A failure is logged, and the work is tried again another time."""
    try:
        yield
    except PenstockError as error:
        logger.warning("%s reason=%s", event, error)
    except Exception:
        logger.exception(event)
