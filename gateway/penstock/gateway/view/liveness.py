"""Which models no live worker moves, judged from what workers last said of themselves. Pure; times are passed in."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from penstock.schemas.records import ModelInfo, WorkerState

_SERVING = "running"
_MODEL_LOST = "failed"


@dataclass(frozen=True, kw_only=True, slots=True)
class Liveness:
    """A judgement of one moment. A model is told by (id, pool)."""

    live_workers: int
    silent_workers: tuple[str, ...]
    """Workers that were heard of and are late."""
    without_worker: frozenset[tuple[str, str | None]]
    models: tuple[ModelInfo, ...]

    @property
    def names_without_worker(self) -> list[str]:
        return sorted({model for model, _ in self.without_worker})

    @property
    def degraded(self) -> str | None:
        """Why requests would wait for a worker; None if none would."""
        if self.live_workers == 0:
            late = f": {', '.join(self.silent_workers)} stopped reporting" if self.silent_workers else ""
            return f"no worker is alive{late}"
        if self.without_worker:
            return f"no live worker has {', '.join(self.names_without_worker)}"
        return None

    def awaits_worker(self, task: str, model: str | None, pool: str | None) -> str | None:
        """Why a request of this kind cannot begin now, if it is for want of a worker."""
        if self.live_workers == 0:
            return self.degraded
        fitting = [
            (known.model, known.pool)
            for known in self.models
            if task in known.tasks and known.pool == pool and (model is None or model in (known.model, *known.aliases))
        ]
        if fitting and self.without_worker.issuperset(fitting):
            return f"no live worker has {', '.join(sorted({name for name, _ in fitting}))}"
        return None


def judge(workers: Iterable[WorkerState], models: Iterable[ModelInfo], now_ms: int, late_ms: int) -> Liveness:
    """A worker lives if it serves and said so within `late_ms`; it has the models that it could load."""
    live: list[WorkerState] = []
    silent: list[str] = []
    for worker in workers:
        if now_ms - worker.updated_at > late_ms:
            silent.append(worker.worker_id)
        elif worker.state == _SERVING:
            live.append(worker)
    served = {(state.model, worker.pool) for worker in live for state in worker.models if state.state != _MODEL_LOST}
    known = tuple(models)
    return Liveness(
        live_workers=len(live),
        silent_workers=tuple(sorted(silent)),
        without_worker=frozenset((model.model, model.pool) for model in known) - served,
        models=known,
    )
