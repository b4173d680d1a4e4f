"""One seed: operators ask at gateways that are killed, until one redrive ends undisturbed."""

from __future__ import annotations

import asyncio
import traceback
from dataclasses import dataclass
from random import Random
from unittest.mock import patch

from penstock.gateway.dead_letters.index import LetterFilter
from penstock.gateway.limits.callers import Caller
from penstock.gateway.service import redriving
from penstock.gateway.service.redriving import Chosen, Redriving
from penstock.schemas.errors import PenstockError
from simulation.redrives.world import Gateway, Key, Topics, new_index
from simulation.truth import Violation
from simulation.virtual import run_virtually

OPERATOR = Caller(tenant="operators")


@dataclass(slots=True)
class Outcome:
    """What came of a seed."""

    seed: int
    violation: str | None
    requests: list[str]
    kills: int

    @property
    def kind(self) -> str:
        return (self.violation or "").split(":")[0]


class Operators:
    """Each asks at the gateway, which is killed at times while it works; the next one may have an empty index."""

    def __init__(self, seed: int) -> None:
        self._rng = rng = Random(f"{seed}/redrives")
        self._strict = rng.random() < 0.7
        self._kills = rng.choice([0.0, 0.5, 0.9])
        self.kills = 0
        self.topics = Topics(
            rng, strict=self._strict, away=rng.choice([0.0, 0.0, 0.2]), fails=rng.choice([0.0, 0.0, 0.5, 1.0])
        )
        self.most = rng.choice([2, 5, redriving.MOST])
        """Letters of one call."""
        for number in range(rng.randint(1, 24)):
            readable = rng.random() < 0.85
            for _ in range(1 + (rng.random() < 0.2)):  # a worker died between its letter and its commit
                self.topics.add_letter(number, readable=readable)
        self._index = new_index()

    async def run(self) -> None:
        rng = self._rng
        for _ in range(rng.randint(1, 6)):
            if self._strict:
                await self._ask()
            else:
                await asyncio.gather(self._ask(), self._ask())
        self.topics.away = 0.0
        known = set(self.topics.places)
        await self._redrive(Gateway(self.topics, self._index), None)
        await self._at_end(known)

    async def _ask(self) -> None:
        """One call after another, each continued until nothing is left, and its gateway's death."""
        rng, index = self._rng, self._index
        if not self._strict or rng.random() < 0.2:
            index = new_index()
        gateway = Gateway(self.topics, index)
        work = self._redrive(gateway, rng.choice([None, None, 100.0]))
        if self._strict and rng.random() < 0.2:
            work = self._purge(gateway)
        task = asyncio.get_running_loop().create_task(work)
        lives_s = rng.uniform(0.0, 0.15) if rng.random() < self._kills else None
        await asyncio.wait({task}, timeout=lives_s)
        if not task.done():
            self.kills += 1
            task.cancel()  # and with it all that it gathers
        try:
            await task
        except (asyncio.CancelledError, PenstockError):
            return

    async def _redrive(self, gateway: Gateway, rate: float | None) -> None:
        after, handled, most = None, 0, None
        while True:
            done = await gateway.redriving.redrive(OPERATOR, Chosen(after=after), rate=rate, dry_run=False, again=False)
            most = most or self.topics.count()
            handled += len(done.requests) + len(done.skipped)
            if self.topics.violation is not None:
                raise self.topics.violation  # the product took it for a letter that cannot be run again
            if handled > most:
                raise Violation(f"endless: {handled} letters are handled, and there were {most} after the first call")
            if not done.remaining:
                return
            after = str(done.cursor)

    async def _purge(self, gateway: Gateway) -> None:
        some = [place for places in self.topics.places.values() for place in places]
        chosen = self._rng.sample(some, min(len(some), 3))
        ids = [f"{partition}/{offset}" for partition, offset in chosen]
        await gateway.redriving.purge(OPERATOR, Chosen(ids=ids), dry_run=False)

    async def _at_end(self, known: set[Key]) -> None:
        """`known`: the letters that were there when the last redrive began."""
        gateway = Gateway(self.topics, new_index())
        rows, _ = await gateway.redriving.page(LetterFilter(), after=None, limit=1_000, newest_first=False)
        for row in rows:
            key = (row.tenant or "", row.request_id or "")
            run_as = self.topics.run_as.get(key, set())
            if key in self.topics.runnable and run_as != {row.redriven_as} - {None}:
                raise Violation(f"unmarked: {row.place} is said to run as {row.redriven_as}, and runs as {run_as}")
            if row.place in self.topics.purged:
                raise Violation(f"purged: {row.place} is listed")
        listed = {row.place for row in rows}
        for key, places in self.topics.places.items():
            left = set(places) - self.topics.purged
            if not left <= listed:
                raise Violation(f"forgotten: the letters of {key} are not listed")
            if left and key in self.topics.runnable & known and not self.topics.run_as[key]:
                raise Violation(f"forgotten: {key} was not run again")
        if self.topics.violation is not None:
            raise self.topics.violation  # it came while its task was cancelled


def run(seed: int) -> Outcome:
    """Simulate a seed. Whatever goes wrong in the product or breaks a promise is in the outcome."""
    operators, violation = Operators(seed), None
    try:
        with patch.object(Redriving, "_trim"), patch.object(redriving, "MOST", operators.most):
            run_virtually(Random(f"{seed}/loop"), lambda _: operators.run())
    except Violation as error:
        violation = str(error)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        violation = f"{type(error).__name__}: {error} ({where.name} in {where.filename.rsplit('/', 1)[-1]})"
    return Outcome(seed, violation, [one.request_id for one in operators.topics.requests], operators.kills)
