"""How models stand: what workers report of them, and what operators ordered, put together. Pure."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from penstock.common.desired import Desired
from penstock.common.model_entry import ModelEntry
from penstock.common.orders import changes, entry_of
from penstock.gateway.view.declared import declared_model
from penstock.gateway.view.liveness import ModelId
from penstock.schemas.desired import MODEL, desired_key
from penstock.schemas.errors import InvalidRequest, ModelNotFound
from penstock.schemas.records import DesiredState, ModelInfo, ModelState, WorkerState
from penstock.schemas.times import rfc3339

Json = dict[str, Any]
NO_WORKER = "no live worker serves it"
NAMED_MODELS = 10
"""So many models are named to a caller who asked for another one."""
_OF_THE_MODEL = frozenset({"tasks", "aliases", "abilities", "entry"})
_BEST_FIRST = ("ready", "draining", "loading", "unloading", "absent", "failed")


def best_states(workers: Iterable[WorkerState]) -> dict[ModelId, ModelState]:
    """Of each model the replica that serves best, or will soonest, among these workers."""
    best: dict[ModelId, ModelState] = {}
    for worker in workers:
        for state in worker.models:
            known = best.get((state.model, worker.pool))
            if known is None or _rank(state.state) < _rank(known.state):
                best[state.model, worker.pool] = state
    return best


def _rank(state: str) -> int:
    return _BEST_FIRST.index(state) if state in _BEST_FIRST else len(_BEST_FIRST)


def public_model(model: ModelInfo, best: ModelState | None, *, available: bool) -> Json:
    """OpenAI's model object with Penstock's facts beside. What its live workers report goes before its own record.

    The record keeps the state that a worker had last: without a live worker it says nothing of now.
    """
    shown: ModelInfo | ModelState = model if best is None else best
    if best is None and not available and model.worker_id:
        shown = replace(model, state="absent", reason=NO_WORKER, progress=None)
    return {
        "id": model.model,
        "object": "model",
        "created": model.updated_at // 1000,
        "owned_by": "penstock",
        "aliases": model.aliases,
        "tasks": model.tasks,
        "pool": model.pool,
        "state": shown.state,
        "reason": shown.reason,
        "progress": shown.progress,
        "load_seconds": shown.load_seconds or model.load_seconds,
        "context_window": model.context_window,
        "max_output_tokens": model.max_output_tokens,
        "dimensions": model.dimensions,
        "defaults": {name: _value(text) for name, text in model.defaults.items()},
        "available": available,
    }


def _value(text: str) -> Any:
    """A default as it was; workers of earlier releases report plain text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


@dataclass(frozen=True, slots=True)
class Observation:
    """How far the live workers of a pool have followed the orders."""

    revision: int | None
    """The least that one of them has observed; None without a worker, or while one has observed nothing."""
    waiting_workers: list[str]
    """Those that have not observed the order that is asked for."""

    def includes(self, revision: int) -> bool:
        """Whether there are workers, and all of them have observed the order of this revision."""
        return self.revision is not None and self.revision >= revision


def observing_topic(workers: Iterable[WorkerState], topic_id: str | None) -> list[WorkerState]:
    """The workers, of which those that follow another topic of orders have observed nothing of this one.

    A topic that was deleted and made anew gives the same offsets to other orders. Workers of earlier releases do not
    say which topic they follow, and are believed.
    """
    return [
        one if one.observed_topic_id in (None, topic_id) else replace(one, observed_revision=None) for one in workers
    ]


def not_following(
    workers: Iterable[WorkerState], orders: Iterable[Desired], topic_id: str | None, now_ms: int, late_ms: int
) -> list[str]:
    """The live `workers` that have not observed an order within `late_ms` of it, or of their own start."""
    due = max((one.revision for one in orders if now_ms - one.state.created_at > late_ms), default=None)
    return sorted(
        worker.worker_id
        for worker in observing_topic(workers, topic_id)
        if due is not None
        and now_ms - worker.started_at > late_ms
        and (worker.observed_revision is None or worker.observed_revision < due)
    )


def observation(workers: Iterable[WorkerState], pool: str | None, revision: int | None) -> Observation:
    """What the live `workers` of a pool have observed; `revision` is that of the order that is asked for, if any."""
    observed = {worker.worker_id: worker.observed_revision for worker in workers if worker.pool == pool}
    known = [one for one in observed.values() if one is not None]
    waiting = sorted(name for name, one in observed.items() if revision is not None and (one is None or one < revision))
    return Observation(min(known) if known and len(known) == len(observed) else None, waiting)


def order_json(workers: Iterable[WorkerState], pool: str | None, revision: int) -> Json:
    """Which live workers of the pool have observed the order of this revision."""
    found = observation(workers, pool, revision)
    return {
        "object": "order",
        "revision": revision,
        "pool": pool,
        "observed": found.includes(revision),
        "observed_revision": found.revision,
        "waiting_workers": found.waiting_workers,
    }


def admin_models(
    models: Iterable[ModelInfo],
    workers: Collection[WorkerState],
    desired: Mapping[str, Desired] | None,
    without_worker: Collection[ModelId],
) -> list[Json]:
    """Every model as operators see it, by pool and id: with its engines, and what was ordered. Removed ones are left
    out. Those that were added and that no worker has reported yet are there too. `workers` are those that live.

    Without `desired` the orders are unknown: the models that workers report, `paused` null.
    """
    orders = {} if desired is None else desired
    best = best_states(workers)
    infos: dict[ModelId, ModelInfo] = {(one.model, one.pool): one for one in models}
    served = infos.keys() - set(without_worker)
    for ordered in orders.values():
        state = ordered.state
        if state.kind == MODEL and (state.name, state.pool) not in infos:
            entry = entry_of(state)
            if entry is not None:
                found = observation(workers, state.pool, ordered.revision)
                infos[state.name, state.pool] = declared_model(
                    entry, state.created_at, _unreported(found, ordered.revision)
                )
    return [
        _admin_model(
            info,
            best.get(model),
            workers,
            ordered,
            available=model in served,
            paused=None if desired is None else ordered is not None and ordered.state.paused,
        )
        for model, info in sorted(infos.items(), key=lambda item: (item[0][1] or "", item[0][0]))
        if (ordered := orders.get(desired_key(MODEL, *model))) is None or not ordered.state.removed
    ]


def _admin_model(
    info: ModelInfo,
    best: ModelState | None,
    workers: Collection[WorkerState],
    ordered: Desired | None,
    *,
    available: bool,
    paused: bool | None,
) -> Json:
    state = None if ordered is None else ordered.state
    entry = None if state is None else entry_of(state)
    found = observation(workers, info.pool, None if ordered is None else ordered.revision)
    return {
        **public_model(info, best, available=available),
        "cause": None if best is None else best.cause,
        "engine": info.engine,
        "priority": info.priority,
        "pinned": _pinned(info, state, entry),
        "paused": paused,
        "preload": None if entry is None else entry.preload,
        "max_batch_size": info.max_batch_size,
        "weights_bytes": info.weights_bytes,
        "revision": info.revision,
        "desired": None if ordered is None else desired_json(ordered.state, ordered.revision),
        "observed_revision": found.revision,
        "waiting_workers": found.waiting_workers,
        "missing_on": sorted(
            worker.worker_id
            for worker in workers
            if worker.pool == info.pool and all(state.model != info.model for state in worker.models)
        ),
        "replicas": [
            {"worker_id": worker.worker_id, **_replica_json(state)}
            for worker in sorted(workers, key=lambda one: one.worker_id)
            if worker.pool == info.pool
            for state in worker.models
            if state.model == info.model
        ],
    }


def _replica_json(state: ModelState) -> Json:
    """What a worker reports of an engine, less what is the model's."""
    return {name: value for name, value in state.to_dict().items() if name not in _OF_THE_MODEL}


def _pinned(info: ModelInfo, state: DesiredState | None, entry: ModelEntry | None) -> bool:
    """The newest order counts, then the entry that was ordered, then what a worker reports."""
    if state is not None and state.pinned is not None:
        return state.pinned
    return info.pinned if entry is None else entry.pinned


def desired_json(state: DesiredState, revision: int) -> Json:
    """Desired state, and the revision of its newest order, as callers see it."""
    return {
        "kind": state.kind,
        "name": state.name,
        "pool": state.pool,
        "revision": revision,
        "action": state.action,
        "loaded": state.loaded,
        "pinned": state.pinned,
        "paused": state.paused,
        "removed": state.removed,
        "created_at": rfc3339(state.created_at),
        "created_by": state.created_by,
    }


def order_in_force_json(ordered: Desired) -> Json:
    """One order that is in force, with what it changes in words, and the entry of a model that was added."""
    entry = entry_of(ordered.state)
    shown: Json | None = None if entry is None else entry.model_dump(mode="json", exclude_defaults=True)
    if shown is not None and "headers" in (options := shown.get("options", {})):
        options["headers"] = dict.fromkeys(options["headers"], "***")  # keys of a remote server may stand there
    return {
        "object": "order_in_force",
        **desired_json(ordered.state, ordered.revision),
        "changes": changes(ordered.state),
        "entry": shown,
    }


def _unreported(found: Observation, revision: int) -> str:
    """Why no live worker reports a model that was added."""
    if found.includes(revision):
        return "the workers of its pool do not serve it: the log of each says why"
    if found.waiting_workers:
        return f"the order to add it is not observed yet by {', '.join(found.waiting_workers)}"
    return "no live worker is in its pool"


def find_one(models: Iterable[Json], name: str, pool: str | None) -> Json:
    """The model that an id or alias stands for; the common pool's when several pools have one and none is named.

    Raises ModelNotFound naming those that there are, InvalidRequest when several pools but the common one have it.
    """
    known = [model for model in models if pool is None or model["pool"] == pool]
    found = [model for model in known if model["id"] == name] or [m for m in known if name in m["aliases"]]
    common = [model for model in found if model["pool"] is None]
    if len(found) == 1 or common:
        return (common or found)[0]
    if found:
        pools = ", ".join(str(model["pool"]) for model in found)
        raise InvalidRequest(f"the model `{name}` is in the pools {pools}: name one of them", param="pool")
    there = named({model["id"] for model in known})
    raise ModelNotFound(f"the model `{name}` does not exist; {there}", param="model")


def named(models: Iterable[str]) -> str:
    names = sorted(models)
    more = f" and {len(names) - NAMED_MODELS} more" if len(names) > NAMED_MODELS else ""
    return f"there are {', '.join(names[:NAMED_MODELS])}{more}" if names else "there is none"
