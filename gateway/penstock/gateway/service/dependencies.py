"""Background probes of what a gateway depends on beside its topics; `/readyz` shows the last results."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from penstock.common.artifacts import ArtifactStore
from penstock.common.artifacts.configured import TENANT, try_store
from penstock.common.clock import now_ms
from penstock.common.tasks import set_within
from penstock.gateway.threads import Threads
from penstock.schemas.errors import PenstockError

logger = logging.getLogger(__name__)

ANSWER_S = 3.0
"""A probe that takes longer counts as failed."""
RETRY_S = 5.0
"""The longest pause after a failed probe."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a dependency cannot be used. Show `cause` to operators only: it can name hosts and paths."""

    text: str
    cause: str | None = None


@dataclass(frozen=True, slots=True)
class Tried:
    """The last result of one dependency; `checked_at_ms` is None before the first."""

    name: str
    checked_at_ms: int | None = None
    problem: Problem | None = None


Probe = Callable[[], Awaitable[Problem | None]]


class Dependencies:
    """Runs on the event loop: one probe per dependency, one at a time each."""

    def __init__(
        self, probes: Mapping[str, Probe], every_s: float, *, retry_s: float = RETRY_S, answer_s: float = ANSWER_S
    ) -> None:
        self._probes = dict(probes)
        self._every_s, self._retry_s, self._answer_s = every_s, min(every_s, retry_s), answer_s
        self._results = {name: Tried(name) for name in probes}
        self._due = {name: asyncio.Event() for name in probes}

    def results(self) -> list[Tried]:
        return list(self._results.values())

    def probe_now(self, name: str) -> None:
        """Do not wait for the next round."""
        self._due[name].set()

    async def run(self) -> None:
        await asyncio.gather(*(self._watch(name, probe) for name, probe in self._probes.items()))

    async def _watch(self, name: str, probe: Probe) -> None:
        while True:
            running = asyncio.ensure_future(probe())
            try:
                while not (await asyncio.wait({running}, timeout=self._answer_s))[0]:
                    self._note(name, Problem(f"the probe of {name} has no answer within {self._answer_s:g} s"))
                problem = running.result()
            except Exception as error:
                problem = Problem(f"the probe of {name} failed", f"{type(error).__name__}: {error}")
            finally:
                running.cancel()
            self._note(name, problem)
            await set_within(self._due[name], self._every_s if problem is None else self._retry_s)
            self._due[name].clear()

    def _note(self, name: str, problem: Problem | None) -> None:
        if problem != self._results[name].problem:
            if problem is None:
                logger.info("dependency.usable name=%s", name)
            else:
                logger.warning("dependency.not_usable name=%s reason=%s cause=%s", name, problem.text, problem.cause)
        self._results[name] = Tried(name, now_ms(), problem)


def artifact_probe(store: ArtifactStore, threads: Threads) -> Probe:
    """Writes, reads and deletes one artifact."""
    artifact_id = str(uuid.uuid4())

    async def probe() -> Problem | None:
        try:
            await threads.artifacts.run_for(TENANT, try_store, store, artifact_id)
        except PenstockError as error:
            return Problem("the artifact store cannot be used", error.message)
        return None

    return probe
