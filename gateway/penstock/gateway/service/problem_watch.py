"""Looks for problems again and again, so that each has a time since when it is there."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.common.clock import now_ms
from penstock.common.desired import Desired
from penstock.common.labels import OTHER
from penstock.gateway.dead_letters.index import LetterIndex
from penstock.gateway.dead_letters.letters import LetterCount
from penstock.gateway.limits.allowances import Allowances
from penstock.gateway.service.dependencies import Tried
from penstock.gateway.service.disks import Disk, look_at
from penstock.gateway.service.facts import Facts
from penstock.gateway.service.model_orders import ModelOrders
from penstock.gateway.service.problem import Action, Found, SinceBook
from penstock.gateway.service.problems import problems, summary
from penstock.schemas.errors import PenstockError

logger = logging.getLogger(__name__)

EVERY_S = 1.0
READ_EVERY_S = 3.0
"""Dead letters are counted so often."""
ORDERS_EVERY_S = 30.0
"""Orders are read from Kafka so often, and whenever a worker has followed another one."""
LETTERS_MS = 3_600_000
NAMED_BY_PRODUCERS = frozenset({"model_unknown"})
"""Problems whose subject any producer chooses: as a label it would make series without a bound."""
NOT_PUBLIC = frozenset({"kafka_away", "disk_low"})
"""Problems whose subject is an address or a path: `/metrics` takes no key."""
NAMED_BY_POOL = frozenset({"pool_without_worker", "nothing_runs"})
"""Problems whose subject is the pool."""


class ProblemWatch:
    """Runs on the event loop."""

    def __init__(
        self,
        facts: Facts,
        orders: ModelOrders,
        letters: LetterIndex,
        tried: Callable[[], list[Tried]],
        allowances: Allowances,
        folder: Path,
    ) -> None:
        """`tried`: the dependencies with their last results. `folder`: where the gateway's files are."""
        self._facts, self._orders, self._letters = facts, orders, letters
        self._tried, self._allowances, self._folder = tried, allowances, folder
        self._ordered: Sequence[Desired] | None = None
        self._lettered: Sequence[LetterCount] = ()
        self._disk: Disk | None = None
        self._since = SinceBook()
        self._shown: list[tuple[Found, int]] = []
        self._pools: Set[str | None] = {None}
        """Those that models and workers name. Producers may name others."""
        self._summary = ""
        self._followed: frozenset[int | None] = frozenset()
        self._orders_due = 0.0

    async def run(self) -> None:
        await asyncio.gather(self._read(), self._look_again())

    def to_json(self) -> dict[str, Any]:
        """The problems of the last look, at most `EVERY_S` ago, and one sentence."""
        found = [one.to_json(seen_ms) for one, seen_ms in self._shown]
        return {"object": "problems", "summary": self._summary, "data": found}

    def counts(self) -> Mapping[tuple[str, str, str], int]:
        """How many problems the last look found, by (problem, subject, pool); an empty text stands for none."""
        return Counter(self._labels(one) for one, _ in self._shown)

    def _labels(self, one: Found) -> tuple[str, str, str]:
        """A pool that no model and no worker names is `other`, as in the metrics of queues."""
        pool = one.pool or "" if one.pool in self._pools else OTHER
        if one.problem in NAMED_BY_POOL:
            return one.problem, pool, pool
        return one.problem, "" if one.problem in NAMED_BY_PRODUCERS | NOT_PUBLIC else one.subject or "", pool

    def look(self) -> None:
        """Judge what is known now. A fault of the judgement is a problem beside those of the last look: none ends."""
        try:
            self._look()
        except Exception as error:
            logger.exception("problems.not_judged")
            doctor = Action(label="report it, with the log of this gateway", command="penstock logs gateway")
            cause = f"the gateway could not judge the state of the system: {type(error).__name__}"
            found = Found(problem="not_judged", affects="this list, which stays as it was", cause=cause, action=doctor)
            former = [one for one, _ in self._shown if one.problem != found.problem]
            self._shown = self._since.note([found, *former], now_ms())
            self._summary = "1 problem" if not former else f"{len(self._shown)} problems"

    def _look(self) -> None:
        moment = self._facts.moment()
        limits = {tenant: self._allowances.limits_of(tenant).outstanding for tenant in moment.tenants}
        seen = replace(
            moment,
            tried=self._tried(),
            orders=self._ordered,
            letters=self._lettered,
            limits=limits,
            disk=self._disk,
            unauthenticated_per_s=self._allowances.unauthenticated_per_s(),
        )
        before = {one.key for one, _ in self._shown}
        self._pools = {None, *(one.pool for one in (*seen.liveness.models, *seen.workers))}
        self._shown = self._since.note(problems(seen), seen.now_ms)
        self._summary = summary(seen, [one for one, _ in self._shown])
        now = {one.key for one, _ in self._shown}
        for word, changed in (("began", now - before), ("ended", before - now)):
            for problem, subject, pool in sorted(changed):
                logger.info("problem.%s problem=%s subject=%.100r pool=%s", word, problem, subject, pool)

    async def _look_again(self) -> None:
        while True:
            self.look()
            await asyncio.sleep(EVERY_S)

    async def _read(self) -> None:
        while True:
            await self.read()
            await asyncio.sleep(READ_EVERY_S)

    async def read(self) -> None:
        """Read orders, dead letters and the disk once. What cannot be read stays as it was."""
        try:
            self._lettered = await asyncio.to_thread(self._letters.recent, now_ms() - LETTERS_MS)
        except sqlite3.Error as error:
            logger.warning("problems.letters_unread error=%s", error)
        try:
            self._disk = await asyncio.to_thread(look_at, self._folder)
        except OSError as error:
            logger.warning("problems.disk_unread error=%s", error)
        followed = frozenset(one.observed_revision for one in self._facts.live_workers())
        if followed == self._followed and time.monotonic() < self._orders_due:
            return
        try:
            self._ordered = await self._orders.ordered()
            self._followed, self._orders_due = followed, time.monotonic() + ORDERS_EVERY_S
        except PenstockError as error:
            logger.debug("problems.orders_unread error=%s", error)
