"""One seed: callers race under a few keys at gateways that are killed, until each key has been decided.

Some keys are of requests, others (`CLAIMED`) are claimed alone, as for conversations.
"""

from __future__ import annotations

import asyncio
import traceback
from collections import defaultdict
from dataclasses import dataclass
from random import Random
from typing import Any

from penstock.schemas.errors import BrokerUnavailable, IdempotencyKeyReused
from penstock.schemas.ids import idempotent_request_id
from penstock.schemas.records import InferenceRequest
from penstock.schemas.requests import content_hash, parse_request
from simulation.keys.world import Gateway, Topics
from simulation.truth import Violation
from simulation.virtual import run_virtually

CLAIMED = "claimed"
BODIES = ({}, {"conversation_id": "left"}, {"conversation_id": "right"}, {"priority": 9})


def body(number: int) -> InferenceRequest:
    """A request; those of different numbers differ in the text, and some in their topic or partition."""
    payload = {"messages": [{"role": "user", "content": f"{number}"}]}
    return parse_request(
        {"task": "text_generation", "model": "m", "payload": payload, **BODIES[number]}, tenant="t", now_ms=1
    )


@dataclass(slots=True)
class Outcome:
    """What came of a seed. `history`: what was answered to whom, in order."""

    seed: int
    violation: str | None
    history: list[tuple[str, int, str]]
    kills: int

    @property
    def kind(self) -> str:
        return (self.violation or "").split(":")[0]


class Callers:
    """Each sends one body under a key, again after a 503. Gateways are killed and replaced meanwhile."""

    def __init__(self, seed: int) -> None:
        self._rng = rng = Random(f"{seed}/keys")
        self.topics = Topics(rng, away=rng.choice([0.0, 0.0, 0.3]))
        self._gateways: list[tuple[Gateway, list[asyncio.Task[Any]]]] = []
        self._accepted: dict[str, set[int]] = defaultdict(set)
        self.history: list[tuple[str, int, str]] = []
        self.kills = 0

    async def run(self) -> None:
        rng = self._rng
        for _ in range(rng.randint(2, 3)):
            self._start(len(self._gateways))
        keys = [f"k{number}" for number in range(rng.randint(1, 3))] + [CLAIMED]
        callers = [self._call(key, rng.randrange(len(BODIES))) for key in keys for _ in range(rng.randint(2, 5))]
        killer = asyncio.get_running_loop().create_task(self._kill(rng.choice([0, 0, 3])))
        await asyncio.gather(*callers)
        killer.cancel()
        self.topics.away = 0.0
        for key in keys:
            await self._decide(key)
        if self.topics.violation is not None:
            raise self.topics.violation  # it came while its task was cancelled

    def _start(self, at: int) -> None:
        gateway = Gateway(self.topics)
        self._gateways[at:at] = [(gateway, [asyncio.get_running_loop().create_task(gateway.follow())])]

    async def _kill(self, times: int) -> None:
        for _ in range(times):
            await asyncio.sleep(self._rng.uniform(0.0, 0.1))
            at = self._rng.randrange(len(self._gateways))
            for task in self._gateways.pop(at)[1]:
                task.cancel()
            self._start(at)
            self.kills += 1

    async def _call(self, key: str, number: int) -> None:
        rng = self._rng
        await asyncio.sleep(rng.uniform(0.0, 0.05))
        for _ in range(4):
            gateway, tasks = rng.choice(self._gateways)
            work = asyncio.get_running_loop().create_task(self._ask(gateway, key, number))
            tasks.append(work)
            await asyncio.wait({work})
            if not work.cancelled() and work.result() != "503":
                return

    async def _ask(self, gateway: Gateway, key: str, number: int) -> str:
        answer = "202"
        try:
            if key == CLAIMED:
                await gateway.claim_key(key, number)
            else:
                await gateway.submit(body(number), key)
        except IdempotencyKeyReused:
            answer = "422"
        except BrokerUnavailable:
            answer = "503"
        else:
            self._accepted[key].add(number)
            if key == CLAIMED:
                if len(self._accepted[key]) > 1:
                    self.topics.broken(f"two_bodies: {self._accepted[key]} were accepted under {key}")
            elif self.topics.contents[("t", idempotent_request_id("t", key))] != content_hash(body(number)):
                self.topics.broken(f"other_body: the answer to body {number} of {key} is of another body")
        self.history.append((key, number, answer))
        return answer

    async def _decide(self, key: str) -> None:
        """Ask with each body, at a gateway that has just begun: one is accepted, the one that was before if any was."""
        self._start(0)
        for number in range(len(BODIES)):
            await self._ask(self._gateways[0][0], key, number)
        if len(self._accepted[key]) != 1:
            self.topics.broken(f"undecided: the bodies {self._accepted[key]} were accepted under {key}")
        if key != CLAIMED and ("t", idempotent_request_id("t", key)) not in self.topics.contents:
            self.topics.broken(f"undecided: no request of {key} stands on a topic")


def run(seed: int) -> Outcome:
    """Simulate a seed. Whatever goes wrong in the product or breaks a promise is in the outcome."""
    callers, violation = Callers(seed), None
    try:
        run_virtually(Random(f"{seed}/loop"), lambda _: callers.run())
    except Violation as error:
        violation = str(error)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        violation = f"{type(error).__name__}: {error} ({where.name} in {where.filename.rsplit('/', 1)[-1]})"
    return Outcome(seed, violation, callers.history, callers.kills)
