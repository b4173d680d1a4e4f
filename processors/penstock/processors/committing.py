"""Commits what the flow allows: at an interval, and once more at the end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping

from penstock.processors.core.commit.commit import Commit
from penstock.schemas.topics import TP

logger = logging.getLogger(__name__)

SendCommit = Callable[[Mapping[TP, tuple[int, str]]], Awaitable[Mapping[TP, bool]]]


class Committer:
    """One commit at a time: the next one carries what has gathered since. `joined`: is this worker in the group now?"""

    def __init__(self, offsets: Commit, commit: SendCommit, joined: Callable[[], bool], *, interval_s: float) -> None:
        self._offsets = offsets
        self._commit = commit
        self._joined = joined
        self._interval_s = interval_s
        self._one_at_a_time = asyncio.Lock()

    async def run_forever(self) -> None:
        """Commit at each interval, while this worker is in the group."""
        while True:
            await asyncio.sleep(self._interval_s)
            if self._joined():
                await self.commit_now()

    async def commit_now(self) -> None:
        """Commit what may be committed. What the broker does not take is part of the next commit."""
        async with self._one_at_a_time:
            generation = self._offsets.generation
            offsets = self._offsets.commits()
            if not offsets:
                return
            try:
                answers = await self._commit(offsets)
            except Exception as error:
                logger.warning("commit.failed partitions=%d error=%r: tried again", len(offsets), error)
                return
            if self._offsets.generation != generation:
                return  # an assignment came in between, and brought what the broker has
            for tp, taken in answers.items():
                if taken:
                    self._offsets.committed(tp, *offsets[tp])
