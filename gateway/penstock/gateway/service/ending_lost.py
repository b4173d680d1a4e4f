"""Asking workers to end requests that no delivery will bring them: overdue, and their record is gone or passed over."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Sequence

from penstock.common import admin
from penstock.common.clock import now_ms
from penstock.common.settings import KafkaSettings
from penstock.gateway.service.control import Control
from penstock.gateway.service.facts import Facts
from penstock.gateway.threads import Threads
from penstock.gateway.view.follower import Follower
from penstock.gateway.view.lost_requests import GRACE_MS, Overdue, gone, overdue, owned_partitions, passed_over
from penstock.gateway.view.store import Due
from penstock.gateway.view.view import View
from penstock.schemas.errors import PenstockError

logger = logging.getLogger(__name__)

LOOK_S = 3.0
SCANNED_AT_ONCE = 2_000
"""Live requests that are looked at before others have their turn on the loop."""
FOUND_AT_ONCE = 50
FIRST: Due = (0, "", "")
RECALLED_AT_ONCE = 1_000
"""Of those that are left to the view's file, so many are looked at each time; the next time those behind them."""
ASKED_AT_ONCE = 200
"""Commands of one look: topics whose records were deleted by mistake must not flood the control topic."""


class EndingLost:
    """Only workers write outcomes, so this asks the owner of the record's partition. It asks again until there is one.

    A command is sent only for what must end in any case. So it does no harm when the record exists after all.
    """

    def __init__(
        self, view: View, follower: Follower, facts: Facts, control: Control, kafka: KafkaSettings, threads: Threads
    ) -> None:
        self._view = view
        self._follower = follower
        self._facts = facts
        self._control = control
        self._kafka = kafka
        self._threads = threads
        self._looked_at = FIRST

    async def run(self) -> None:
        """Look every few seconds, until it is cancelled. Several gateways do not look at the same moment."""
        while True:
            await asyncio.sleep(LOOK_S * random.uniform(0.7, 1.3))
            try:
                await self.look()
            except PenstockError as error:
                logger.info("lost.not_looked reason=%s", error)
            except Exception:
                logger.exception("lost.not_looked")

    async def look(self) -> int:
        """Ask for the end of what is lost; of how many. Raises BrokerUnavailable."""
        if not (ready := self._follower.readiness()).ready or ready.lacks is not None:
            return 0  # an outcome may be among what is still unread
        found = await self._overdue()
        if not found:
            return 0
        lost = (await self._lost(found))[:ASKED_AT_ONCE]
        if not lost:
            return 0
        # An outcome, or the record at another place, may stand in the log and not in the view.
        await self._follower.catch_up()
        entries = [entry for one in lost if (entry := self._view.find(one.entry.key)) is not None]
        still = {one.entry.key: one.place for one in overdue(entries, {one.tp for one in lost}, now_ms())}
        asked = [one for one in lost if still.get(one.entry.key) == one.place]
        for one in asked:
            logger.warning(
                "lost.end_asked request_id=%s topic=%s partition=%d offset=%d: overdue, perhaps delivered to nobody",
                one.entry.request_id,
                one.place.topic,
                one.place.partition,
                one.place.offset,
            )
            await self._control.end_lost(one)
        return len(asked)

    async def _overdue(self) -> list[Overdue]:
        owned = owned_partitions(self._facts.live_workers())
        owned = frozenset(tp for tp in owned if self._follower.known_topic(tp[0]))
        if not owned:
            return []
        await self._recall()
        live, found = list(self._view.known.held_live()), list[Overdue]()
        for start in range(0, len(live), SCANNED_AT_ONCE):
            found += overdue(live[start : start + SCANNED_AT_ONCE], owned, now_ms())
            await asyncio.sleep(0)
        return found

    async def _recall(self) -> None:
        """Have entries of some that had to end by now in memory."""
        due_ms = now_ms() - GRACE_MS
        found = await self._threads.lists.run(self._view.overdue, self._looked_at, due_ms, RECALLED_AT_ONCE)
        for number, (_, tenant, request_id) in enumerate(found, 1):
            self._view.find((tenant, request_id))
            if number % FOUND_AT_ONCE == 0:
                await asyncio.sleep(0)
        self._looked_at = found[-1] if len(found) == RECALLED_AT_ONCE else FIRST

    async def _lost(self, found: Sequence[Overdue]) -> list[Overdue]:
        tps = list({one.tp for one in found})
        starts = await self._threads.metadata.run(admin.begin_offsets, self._kafka, tps)
        ends = await self._threads.metadata.run(admin.end_offsets, self._kafka, tps)
        lost = gone(found, starts, ends)
        entries = {one.entry for one in lost}
        return lost + passed_over((one for one in found if one.entry not in entries), now_ms())
