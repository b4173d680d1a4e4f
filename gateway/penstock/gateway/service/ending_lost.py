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
from penstock.gateway.view.lost_requests import Overdue, gone, overdue, owned_partitions, passed_over
from penstock.gateway.view.view import View
from penstock.schemas.errors import PenstockError

logger = logging.getLogger(__name__)

LOOK_S = 3.0
LOOKED_THROUGH = 100_000
"""With more live requests than this it looks less often: they cost 0.3 µs each."""
SCANNED_AT_ONCE = 2_000
"""Live requests that are looked at before others have their turn on the loop."""
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

    async def run(self) -> None:
        """Look every few seconds, until it is cancelled. Several gateways do not look at the same moment."""
        while True:
            crowd = max(1.0, self._view.live_count / LOOKED_THROUGH)
            await asyncio.sleep(LOOK_S * crowd * random.uniform(0.7, 1.3))
            try:
                await self.look()
            except PenstockError as error:
                logger.info("lost.not_looked reason=%s", error)
            except Exception:
                logger.exception("lost.not_looked")

    async def look(self) -> int:
        """Ask for the end of what is lost; of how many. Raises BrokerUnavailable."""
        if not self._follower.readiness().ready:
            return 0
        found = await self._overdue()
        if not found:
            return 0
        lost = (await self._lost(found))[:ASKED_AT_ONCE]
        if not lost:
            return 0
        # An outcome, or the record at another place, may stand in the log and not in the view.
        await self._follower.catch_up()
        still = set(overdue([one.entry for one in lost], {one.tp for one in lost}, now_ms()))
        asked = [one for one in lost if one in still]
        for one in asked:
            logger.warning(
                "lost.end_asked request=%s topic=%s partition=%d offset=%d: overdue, and perhaps delivered to nobody",
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
        live, found = list(self._view.known.live()), list[Overdue]()
        for start in range(0, len(live), SCANNED_AT_ONCE):
            found += overdue(live[start : start + SCANNED_AT_ONCE], owned, now_ms())
            await asyncio.sleep(0)
        return found

    async def _lost(self, found: Sequence[Overdue]) -> list[Overdue]:
        tps = list({one.tp for one in found})
        starts = await self._threads.metadata.run(admin.begin_offsets, self._kafka, tps)
        ends = await self._threads.metadata.run(admin.end_offsets, self._kafka, tps)
        lost = gone(found, starts, ends)
        entries = {one.entry for one in lost}
        return lost + passed_over((one for one in found if one.entry not in entries), now_ms())
