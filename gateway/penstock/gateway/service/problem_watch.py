"""Looks for problems again and again, so that each has a time since when it is there."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from penstock.common.clock import now_ms
from penstock.common.desired import Desired
from penstock.gateway.dead_letters.index import LetterIndex
from penstock.gateway.dead_letters.letters import LetterCount
from penstock.gateway.limits.limits import Limits
from penstock.gateway.service.dependencies import Tried
from penstock.gateway.service.facts import Facts
from penstock.gateway.service.model_orders import ModelOrders
from penstock.gateway.service.problems import Found, SinceBook, problems, summary
from penstock.schemas.errors import PenstockError

logger = logging.getLogger(__name__)

EVERY_S = 1.0
READ_EVERY_S = 3.0
"""Orders and dead letters are read so often: on threads, and orders from Kafka."""
LETTERS_MS = 3_600_000


class ProblemWatch:
    """Runs on the event loop."""

    def __init__(
        self,
        facts: Facts,
        orders: ModelOrders,
        letters: LetterIndex,
        tried: Callable[[], list[Tried]],
        limits_of: Callable[[str], Limits],
    ) -> None:
        """`tried`: the dependencies with their last results."""
        self._facts, self._orders, self._letters = facts, orders, letters
        self._tried, self._limits_of = tried, limits_of
        self._ordered: Sequence[Desired] | None = None
        self._lettered: Sequence[LetterCount] = ()
        self._since = SinceBook()
        self._shown: list[tuple[Found, int]] = []
        self._summary = ""

    async def run(self) -> None:
        """Look until cancelled."""
        await asyncio.gather(self._read(), self._look_again())

    def to_json(self) -> dict[str, Any]:
        """The problems of the last look, at most `EVERY_S` ago, and one sentence."""
        found = [one.to_json(seen_ms) for one, seen_ms in self._shown]
        return {"object": "problems", "summary": self._summary, "data": found}

    def look(self) -> None:
        """Judge what is known now."""
        moment = self._facts.moment()
        work = self._facts.outstanding()
        limits = {tenant: (count, self._limits_of(tenant).outstanding) for tenant, count in work.items()}
        outstanding = {tenant: (count, limit) for tenant, (count, limit) in limits.items() if limit}
        seen = replace(
            moment, tried=self._tried(), orders=self._ordered, letters=self._lettered, outstanding=outstanding
        )
        found = problems(seen)
        before = {(one.problem, one.subject) for one, _ in self._shown}
        self._shown, self._summary = self._since.note(found, seen.now_ms), summary(seen, found)
        now = {(one.problem, one.subject) for one in found}
        for word, changed in (("began", now - before), ("ended", before - now)):
            for problem, subject in sorted(changed, key=str):
                logger.info("problem.%s problem=%s subject=%s", word, problem, subject)

    async def _look_again(self) -> None:
        while True:
            self.look()
            await asyncio.sleep(EVERY_S)

    async def _read(self) -> None:
        while True:
            await self.read()
            await asyncio.sleep(READ_EVERY_S)

    async def read(self) -> None:
        """Read orders and dead letters once. What cannot be read stays as it was: the probe of orders tells of it."""
        try:
            self._lettered = await asyncio.to_thread(self._letters.recent, now_ms() - LETTERS_MS)
        except sqlite3.Error as error:
            logger.warning("problems.letters_unread error=%s", error)
        try:
            self._ordered = await self._orders.ordered()
        except PenstockError as error:
            logger.debug("problems.orders_unread error=%s", error)
