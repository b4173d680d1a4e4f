"""The distance of the view from the ends of its partitions: waits for an end, and partitions that stand still."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping
from typing import Protocol

from penstock.common import admin
from penstock.common.kafka_errors import unavailable
from penstock.common.reader import STANDSTILL_S, empty_ranges
from penstock.common.settings import KafkaSettings
from penstock.gateway.threads import Threads
from penstock.schemas.errors import BrokerUnavailable, NotFound
from penstock.schemas.topics import TP

BEHIND_S = 30.0
SHORT_S = 30.0
"""After so long a log that is shorter than what was read of it has lost its end."""
LOOK_S = 2.0
"""So often it is asked whether a partition that does not move has anything to read at all."""


class Followed(Protocol):
    """What reads partitions, as a view does."""

    def offsets(self) -> dict[TP, int]: ...


class Ends:
    """On the event loop. `wake` is to be called when the view has moved."""

    def __init__(self, settings: KafkaSettings, view: Followed, threads: Threads) -> None:
        self._settings = settings
        self._view = view
        self._threads = threads
        self._loop = asyncio.get_running_loop()
        self._waiters: list[tuple[Mapping[TP, int], asyncio.Future[None]]] = []
        self._stuck: dict[TP, tuple[int, float]] = {}
        """Partitions with lag: where the view stood there, and since when."""
        self.lag: dict[str, int] = {}
        """By topic, the records that the view had not read at the last look; topics that it had read are left out."""
        self._short: tuple[TP, float, float] | None = None
        """A partition whose end, as the broker reported it, lies before the view's position: since when, and last."""

    def wake(self) -> None:
        """Tell who waits for what the view has reached."""
        if not self._waiters:
            return
        offsets = self._view.offsets()
        left: list[tuple[Mapping[TP, int], asyncio.Future[None]]] = []
        for ends, future in self._waiters:
            if future.done():
                continue
            if all(offsets.get(tp, 0) >= end for tp, end in ends.items()):
                future.set_result(None)
            else:
                left.append((ends, future))
        self._waiters = left

    async def reached(self, ends: Mapping[TP, int], deadline_s: float) -> bool:
        """Wait until the view has folded up to these ends; False at the deadline."""
        offsets = self._view.offsets()
        if all(offsets.get(tp, 0) >= end for tp, end in ends.items()):
            return True
        future: asyncio.Future[None] = self._loop.create_future()
        self._waiters.append((ends, future))
        try:
            async with asyncio.timeout(deadline_s):
                await future
        except TimeoutError:
            return False
        return True

    async def of_now(self, deadline_s: float) -> dict[TP, int]:
        """The ends that partitions with news of requests have now. Raises BrokerUnavailable."""
        before = dict(self._view.offsets())
        partitions = self.partitions_of_requests(before)
        try:
            ends = await self._threads.ends.run(admin.end_offsets, self._settings, partitions, min(deadline_s, 10))
        except NotFound as error:
            raise unavailable(error) from error
        self._check_ends(before, ends)
        return ends

    def _check_ends(self, before: Mapping[TP, int], ends: Mapping[TP, int]) -> None:
        """Raises BrokerUnavailable for ends that this view has read beyond: the broker may hide other records too.

        A broker that starts again may tell such ones for a moment; logs that were cut or made anew have them to stay.
        """
        short = [tp for tp, end in ends.items() if end < before[tp]]
        if not short:
            self._short = None
            return
        now = time.monotonic()
        tp, since, last = self._short or (short[0], now, now)
        if tp not in short or now - last > SHORT_S:  # another time
            tp, since = short[0], now
        self._short = tp, since, now
        if now - since < SHORT_S:
            raise BrokerUnavailable(
                f"the broker tells an end of {tp[0]} that this gateway has read beyond; try again", retry_after_s=1
            )

    async def reach(self, ends: Mapping[TP, int], deadline_s: float) -> None:
        """Wait until the view stands at these ends. Raises BrokerUnavailable at the deadline."""
        give_up, next_look = time.monotonic() + deadline_s, 0.0
        while (now := time.monotonic()) < give_up:
            before = dict(self._view.offsets())
            if await self.reached(ends, min(STANDSTILL_S, give_up - now)):
                return
            behind = {tp: end for tp, end in ends.items() if before.get(tp, 0) < end}
            # While one moves, others may wait for it: where the past is read in the order of time, most do.
            if now >= next_look and all(self._stands_at(tp, before) for tp in behind):
                await self._pass_empty(behind)
                next_look = now + LOOK_S
        raise BrokerUnavailable("the gateway is behind the topics; try again", retry_after_s=1)

    async def look_at_lag(self) -> None:
        """Note which partitions have records that the view does not come to. Raises BrokerUnavailable."""
        ends = await self._threads.metadata.run(admin.end_offsets, self._settings, list(self._view.offsets()))
        stuck_at = {tp: offset for tp, (offset, _) in self._stuck.items()}
        await self._pass_empty(
            {tp: end for tp, end in ends.items() if tp in stuck_at and self._stands_at(tp, stuck_at)}
        )
        before = dict(self._view.offsets())
        now, stuck = time.monotonic(), dict[TP, tuple[int, float]]()
        for tp, end in ends.items():
            if tp in before and before[tp] < end:
                position, since = self._stuck.get(tp, (-1, now))
                stuck[tp] = (before[tp], since if position == before[tp] else now)
        self._stuck = stuck
        self.lag = {}
        for tp in stuck:
            self.lag[tp[0]] = self.lag.get(tp[0], 0) + ends[tp] - before[tp]

    @property
    def stands_still(self) -> bool:
        """Whether a partition has not moved for long, though it has something to read."""
        offsets, now = self._view.offsets(), time.monotonic()
        return any(offsets.get(tp) == at and now - since > BEHIND_S for tp, (at, since) in self._stuck.items())

    def partitions_of_requests(self, partitions: Iterable[TP]) -> list[TP]:
        """Those whose records say something of requests."""
        names = self._settings.names
        quiet = {names.model, names.worker, names.idempotency, names.usage}
        return [tp for tp in partitions if tp[0] not in quiet]

    def _stands_at(self, tp: TP, before: Mapping[TP, int]) -> bool:
        return self._view.offsets().get(tp) == before.get(tp)

    async def _pass_empty(self, ends: Mapping[TP, int]) -> None:
        """A transaction's marker may stand at the end: no record will ever come that moves the view there."""
        offsets = self._view.offsets()
        ranges = {tp: (offsets[tp], end) for tp, end in ends.items() if tp in offsets and offsets[tp] < end}
        if not ranges:
            return
        for tp, end in (await self._threads.metadata.run(empty_ranges, self._settings, ranges)).items():
            if offsets.get(tp) == ranges[tp][0]:
                offsets[tp] = end
