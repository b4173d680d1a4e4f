"""One seed from its first request to the end of its last webhook."""

from __future__ import annotations

import asyncio
import hashlib
import traceback
from collections.abc import Coroutine, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from typing import Any
from unittest.mock import patch

from penstock.common.background import on_faults
from penstock.gateway.webhooks import dispatcher
from simulation.truth import Violation
from simulation.virtual import run_virtually
from simulation.webhooks.checks import Checks
from simulation.webhooks.group import SESSION_S, Group, Process
from simulation.webhooks.plan import Plan, Request, draw
from simulation.webhooks.world import Topics, event_of

HEAD_S = 120.0
"""After the last request, faults happen no more."""


@dataclass(slots=True)
class Outcome:
    """What came of a seed."""

    plan: Plan
    violation: str | None
    digest: str
    calls: int
    faults: int

    @property
    def kind(self) -> str:
        return (self.violation or "").split(":")[0]


class Cluster:
    """Everything of one seed."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.checks = Checks(plan)
        self.topics = self.checks.topics = Topics(plan, self.checks)
        self.group = Group(self.topics)
        self.processes: list[Process] = []
        self.faults = 0
        self._lives = 0
        self._tasks: list[asyncio.Task[None]] = []

    async def run(self) -> None:
        plan = self.plan
        on_faults(asyncio.get_running_loop(), self.checks.process_failed)
        for _ in range(plan.senders):
            await self._start_process()
        for request in plan.requests:
            self._spawn(self._request(request))
        for name in sorted(plan.faults):
            self._spawn(self._mischief(name, Random(f"{plan.seed}/{name}")))
        await self._until(plan.span_s + HEAD_S + plan.give_up_s + 4_000.0)
        self.checks.at_end()

    async def _until(self, end_s: float) -> None:
        """Until then, or nothing is left to do."""
        loop = asyncio.get_running_loop()
        while loop.time() < end_s and not self._is_quiet():
            await asyncio.sleep(self.plan.give_up_s / 500)
            if self.checks.violation is not None:
                raise Violation(self.checks.violation)
            for process in self.processes:
                if process.dispatcher.work.over.done() and not process.gone:
                    raise Violation(f"over: {process.name}: {process.dispatcher.work.over.result()}")
            for task in self._tasks:
                if task.done():
                    task.result()

    def _is_quiet(self) -> bool:
        return asyncio.get_running_loop().time() > self.plan.span_s + HEAD_S and all(
            key in self.checks.settled for key in self.topics.outcomes
        )

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(asyncio.get_running_loop().create_task(work))

    async def _start_process(self) -> None:
        self._lives += 1
        process = Process(f"p{self._lives}", self.group, self.plan, self.topics, self.checks)
        self.processes.append(process)
        await self.group.join(process)

    # -- requests

    async def _request(self, request: Request) -> None:
        """Chunks, and an outcome; at times one that does not count, of a worker that has lost its partition."""
        rng = Random(f"{self.plan.seed}/{request.number}")
        await asyncio.sleep(request.at_s)
        epoch, attempt = 1, 1
        if request.runs_s:
            self._append(request, "chunk", epoch, attempt)
            if rng.random() < 0.4:
                epoch += 1
                self._append(request, "chunk", epoch, attempt)
                if rng.random() < 0.6:  # its first worker lives on for a while
                    self._append(request, "terminal", epoch - 1, attempt, "failed")
            await asyncio.sleep(rng.uniform(0.0, request.runs_s))
        self.topics.append_other(rng)
        self._append(request, "terminal", epoch, attempt, rng.choice(["completed", "failed", "expired"]))
        if rng.random() < 0.2:
            await asyncio.sleep(rng.uniform(0.0, 5.0))
            self._append(request, "terminal", epoch + 1, attempt, "failed")

    def _append(self, request: Request, kind: str, epoch: int, attempt: int, status: str | None = None) -> None:
        self.topics.append_result(request, event_of(request, kind, epoch, attempt, self.topics.now_ms(), status))

    # -- faults

    async def _mischief(self, name: str, rng: Random) -> None:
        times = sorted(rng.uniform(0.5, self.plan.span_s + 30.0) for _ in range(rng.randint(1, 4)))
        loop = asyncio.get_running_loop()
        for at in times:
            await asyncio.sleep(max(0.0, at - loop.time()))
            well = [one for one in self.processes if not one.gone and not one.cut and one in self.group.members]
            if not well:
                continue
            self.faults += 1
            began = loop.time()
            self.checks.disturbed.append((began, float("inf")))
            await getattr(self, f"_{name}")(rng, rng.choice(well))
            self.checks.disturbed[self.checks.disturbed.index((began, float("inf")))] = (began, loop.time() + 20.0)

    async def _kill(self, rng: Random, process: Process) -> None:
        await process.kill()
        self._spawn(self._expire(process))
        await asyncio.sleep(rng.uniform(0.1, 5.0))
        await self._start_process()
        await asyncio.sleep(SESSION_S)

    async def _expire(self, process: Process) -> None:
        await asyncio.sleep(SESSION_S)
        if process.cut or process.gone:
            await self.group.leave(process)

    async def _cut(self, rng: Random, process: Process) -> None:
        process.cut, process.cut_at_s = True, asyncio.get_running_loop().time()
        self._spawn(self._expire(process))
        await asyncio.sleep(rng.choice([3.0, 9.0, 12.0, 30.0]))
        process.cut, process.cut_at_s = False, asyncio.get_running_loop().time()
        if not process.gone:
            await self.group.heal(process)

    async def _restart(self, rng: Random, process: Process) -> None:
        await process.end()
        await self._start_process()

    async def _broker_away(self, rng: Random, process: Process) -> None:
        self.group.broker_away = True
        await asyncio.sleep(rng.uniform(1.0, 15.0))
        self.group.broker_away = False

    async def _erase(self, rng: Random, process: Process) -> None:
        ended = sorted(key for key, one in self.topics.outcomes.items() if one.offset is not None)
        if ended:
            key, at_ms = rng.choice(ended), self.topics.now_ms()
            self.topics.erased.append((key, at_ms))
            for one in list(self.processes):
                asyncio.get_running_loop().call_later(rng.uniform(0.0, 0.5), one.erased, key, at_ms)


@contextmanager
def _scaled(plan: Plan) -> Generator[None]:
    """A dispatcher looks twice a second: over a day of virtual time so often is enough."""
    with patch.object(dispatcher, "IDLE_S", max(0.5, plan.give_up_s / 2_000)):
        yield


def run(seed: int) -> Outcome:
    """Simulate a seed. Whatever goes wrong in the product or breaks a promise is in the outcome."""
    plan, made = draw(seed), list[Cluster]()

    async def whole() -> None:
        made.append(Cluster(plan))
        await made[0].run()

    violation: str | None = None
    try:
        with _scaled(plan):
            run_virtually(Random(f"{seed}/loop"), lambda _: whole())
    except Violation as error:
        violation = str(error)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        violation = f"{type(error).__name__}: {error} ({where.name} in {where.filename.rsplit('/', 1)[-1]})"
    cluster = made[0]
    violation = cluster.checks.violation or violation
    digest = hashlib.blake2b(repr([*cluster.topics.deliveries.items()]).encode(), digest_size=12).hexdigest()
    return Outcome(plan, violation, digest, sum(cluster.checks.calls.values()), cluster.faults)
