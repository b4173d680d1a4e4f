"""Which models no live worker moves, judged from what workers last said of themselves. Pure; times are passed in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from penstock.common.file_differences import file_differences
from penstock.gateway.view.fleet import SERVING, STOPPED
from penstock.schemas.errors import InsufficientCapacity
from penstock.schemas.records import ModelInfo, ModelState, WorkerState

_MODEL_LOST = "failed"
ModelId = tuple[str, str | None]
"""(model, pool)"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Liveness:
    """A judgement of one moment."""

    live_workers: int
    silent_workers: tuple[str, ...]
    """Workers that were heard of and are late, but for those that stopped in order."""
    without_worker: frozenset[ModelId]
    models: tuple[ModelInfo, ...]
    lost: Mapping[ModelId, str | None] = field(default_factory=dict[ModelId, str | None])
    """Of those without one, which a live worker could not load, and why, as it reports."""
    pools: frozenset[str | None] = frozenset()
    """Those with a live worker; None is the common one."""
    causes: Mapping[ModelId, str] = field(default_factory=dict[ModelId, str])
    """Of those that could not be loaded, what made the load fail. For operators alone."""
    codes: Mapping[ModelId, str] = field(default_factory=dict[ModelId, str])
    """The same as the code of an error."""
    file_differences: tuple[str, ...] = ()
    """Where the files of the live workers of a pool differ: some of their requests wait or take a detour."""

    @property
    def names_without_worker(self) -> list[str]:
        return sorted({model for model, _ in self.without_worker})

    @property
    def degraded(self) -> str | None:
        """Why requests would wait for a worker; None if none would."""
        return self._degraded({})

    @property
    def degraded_for_operators(self) -> str | None:
        """The same with what made loads fail."""
        return self._degraded(self.causes)

    def _degraded(self, causes: Mapping[ModelId, str]) -> str | None:
        if self.live_workers == 0:
            late = f": {', '.join(self.silent_workers)} stopped reporting" if self.silent_workers else ""
            return f"no worker is alive{late}"
        if self.without_worker:
            return self._reason(self.without_worker, causes)
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
        if not fitting:
            return self.empty_pool(pool)
        return self._reason(fitting, {}) if self.without_worker.issuperset(fitting) else None

    def empty_pool(self, pool: str | None) -> str | None:
        """That no live worker is in this pool; None if one is."""
        if pool in self.pools:
            return None
        return f"no live worker is in {'the common pool' if pool is None else f'the pool {pool}'}"

    def _reason(self, models: Iterable[ModelId], causes: Mapping[ModelId, str]) -> str:
        named = sorted(set(models), key=lambda one: (one[0], one[1] or ""))
        nobody = sorted({name for name, pool in named if (name, pool) not in self.lost})
        reasons = [f"no live worker has {', '.join(nobody)}"] if nobody else []
        for name, pool in named:
            if (name, pool) in self.lost:
                why = ": ".join(filter(None, (self.lost[name, pool], causes.get((name, pool)))))
                reasons.append(f"{name} could not be loaded" + (f" ({why})" if why else ""))
        return "; ".join(reasons)


def judge(workers: Iterable[WorkerState], models: Iterable[ModelInfo], now_ms: int, late_ms: int) -> Liveness:
    """A worker lives if it serves and said so within `late_ms`; it has the models that it could load."""
    live: list[WorkerState] = []
    silent: list[str] = []
    for worker in workers:
        if now_ms - worker.updated_at > late_ms:
            silent += [worker.worker_id] if worker.state != STOPPED else []
        elif worker.state == SERVING:
            live.append(worker)
    served = {(state.model, worker.pool) for worker in live for state in worker.models if state.state != _MODEL_LOST}
    known = tuple(models)
    without = frozenset((model.model, model.pool) for model in known) - served
    lost = _lost(live)
    return Liveness(
        live_workers=len(live),
        silent_workers=tuple(sorted(silent)),
        without_worker=without,
        models=known,
        pools=frozenset(worker.pool for worker in live),
        lost={model: state.reason for model, state in lost.items() if model in without},
        file_differences=tuple(file_differences(live)),
        causes={model: state.cause for model, state in lost.items() if model in without and state.cause},
        codes={model: state.code for model, state in lost.items() if model in without and state.code},
    )


def _lost(live: Iterable[WorkerState]) -> dict[ModelId, ModelState]:
    """One state of each model, whatever the order of the workers: that it is too large is said if all say so."""
    states = [(worker, state) for worker in live for state in worker.models]
    states.sort(key=lambda one: (one[1].code != InsufficientCapacity.code, one[0].worker_id, one[1].replica))
    return {(state.model, worker.pool): state for worker, state in states}
