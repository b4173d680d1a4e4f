"""The history of a request: what came of its attempts, with it from its first failure on to its outcome."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from penstock.processors.core.effects import AttemptEnded, Effect
from penstock.processors.core.fleet.lane import Lanes
from penstock.processors.core.fleet.ledger import Ledger
from penstock.processors.core.fleet.replica import Replica
from penstock.processors.core.requests.explaining import Explainer
from penstock.processors.core.work.work import Run, Work, WorkKey
from penstock.schemas.errors import PenstockError
from penstock.schemas.histories import extended
from penstock.schemas.records import Attempt, AttemptError, AttemptHistory, AttemptMemory
from penstock.schemas.texts import shortened

MOST_CHARS = 300
"""Of the message of an error."""


@dataclass(eq=False)
class Histories:
    """`_earlier` gives the attempts of a request that the crash journal knows."""

    _lanes: Lanes
    _ledger: Ledger
    _explainer: Explainer
    _emit: Callable[[Effect], None]
    _worker_id: str | None
    _earlier: Callable[[WorkKey, str], AttemptHistory | None]

    def begin(self, work: Work, brought: AttemptHistory | None) -> None:
        """A new request: `brought` came with it, for it is the repeat of one that got a dead letter."""
        earlier = self._earlier(work.first_key, work.request_id)
        work.history = brought if earlier is None else extended(brought, earlier.attempts, earlier.dropped)

    def failed(self, work: Work, error: PenstockError, now: float) -> None:
        """The run of the request has ended without an output."""
        run = work.run
        if run is None or run.noted:
            return
        attempt = self._attempt(work, run, error, now)
        work.history = extended(work.history, [attempt])
        self._emit(AttemptEnded(work.first_key, work.request_id, attempt))

    def ended(self, work: Work, error: PenstockError | None, now: float) -> None:
        """The request ends with its run. A history that is empty until here stays so: the outcome says it all."""
        run = work.run
        if work.history is not None and run is not None and not run.noted:
            work.history = extended(work.history, [self._attempt(work, run, error, now)])

    def _attempt(self, work: Work, run: Run, error: PenstockError | None, now: float) -> Attempt:
        run.noted = True
        replica = self._lanes[work.lane].replicas.get(run.replica)
        began = run.preparing_since if run.run_at is None else run.run_at
        return Attempt(
            attempt=work.attempt,
            worker_id=self._worker_id,
            device=None if replica is None else replica.device,
            error=None if error is None else AttemptError(code=error.code, message=shortened(str(error), MOST_CHARS)),
            started_at=self._explainer.wall_ms(began),
            ended_at=self._explainer.wall_ms(now),
            memory=None if replica is None else self._memory(replica),
        )

    def _memory(self, replica: Replica) -> AttemptMemory | None:
        device = replica.device
        if device is None:
            return None
        foreign = self._ledger.foreign_bytes(device)
        return AttemptMemory(
            engine_bytes=replica.measured_bytes,
            limit_bytes=self._ledger.limit_bytes(device),
            reserved_bytes=self._ledger.reserved_bytes(device),
            measured_bytes=self._ledger.measured_bytes(device) + foreign,
            foreign_bytes=foreign,
        )
