"""Which models no live worker moves, judged from what workers last said of themselves. Pure; times are passed in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from penstock.schemas.records import ModelInfo, WorkerState

_SERVING = "running"
_MODEL_LOST = "failed"
ModelId = tuple[str, str | None]
"""(model, pool)"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Liveness:
    """A judgement of one moment."""

    live_workers: int
    silent_workers: tuple[str, ...]
    """Workers that were heard of and are late."""
    without_worker: frozenset[ModelId]
    models: tuple[ModelInfo, ...]
    lost: Mapping[ModelId, str | None] = field(default_factory=dict[ModelId, str | None])
    """Of those without one, which a live worker could not load, and why, as it tells."""

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
            return self._told(self.without_worker)
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
            return self._told(fitting)
        return None

    def _told(self, models: Iterable[ModelId]) -> str:
        named = sorted(set(models), key=lambda one: (one[0], one[1] or ""))
        nobody = sorted({name for name, pool in named if (name, pool) not in self.lost})
        told = [f"no live worker has {', '.join(nobody)}"] if nobody else []
        for name, pool in named:
            if (name, pool) in self.lost:
                why = self.lost[name, pool]
                told.append(f"{name} could not be loaded" + (f" ({why})" if why else ""))
        return "; ".join(told)


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
    without = frozenset((model.model, model.pool) for model in known) - served
    lost = {(state.model, worker.pool): state.reason for worker in live for state in worker.models}
    return Liveness(
        live_workers=len(live),
        silent_workers=tuple(sorted(silent)),
        without_worker=without,
        models=known,
        lost={model: why for model, why in lost.items() if model in without},
    )
