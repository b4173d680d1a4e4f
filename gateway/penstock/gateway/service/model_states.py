"""How models stand: what workers told of them, and what operators want, put together. Pure."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from penstock.common.model_entry import parse_entry
from penstock.gateway.view.liveness import ModelId
from penstock.schemas.desired import CLASS, MODEL, desired_key
from penstock.schemas.errors import InvalidRequest, ModelNotFound
from penstock.schemas.records import DesiredState, ModelInfo, ModelState, WorkerState
from penstock.schemas.times import rfc3339

Json = dict[str, Any]
NAMED_MODELS = 10
"""So many models are named to a caller who asked for another one."""
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
    """OpenAI's model object with Penstock's facts beside. What its workers said last goes before its own record."""
    shown = model if best is None else best
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
    """A default as it was; workers of earlier releases tell plain text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def admin_models(
    models: Iterable[ModelInfo],
    workers: Collection[WorkerState],
    wishes: Mapping[str, DesiredState],
    without_worker: Collection[ModelId],
) -> list[Json]:
    """Every model as operators see it, by pool and id: with its engines, and what is wanted. Removed ones are left out.

    Those that were added and that no worker has told of yet are there too.
    """
    best = best_states(workers)
    infos: dict[ModelId, ModelInfo] = {(one.model, one.pool): one for one in models}
    served = infos.keys() - set(without_worker)
    for wish in wishes.values():
        if wish.kind == MODEL and wish.entry is not None and (wish.name, wish.pool) not in infos:
            added = _added(wish)
            if added is not None:
                infos[wish.name, wish.pool] = added
    shown: list[Json] = []
    for (name, pool), info in sorted(infos.items(), key=lambda item: (item[0][1] or "", item[0][0])):
        wish = wishes.get(desired_key(MODEL, name, pool))
        if wish is not None and wish.removed:
            continue
        shown.append(
            {
                **public_model(info, best.get((name, pool)), available=(name, pool) in served),
                "engine": info.engine,
                "priority": info.priority,
                "pinned": _pinned(info, wish),
                "paused": wish is not None and wish.paused,
                "max_batch_size": info.max_batch_size,
                "weights_bytes": info.weights_bytes,
                "revision": info.revision,
                "desired": None if wish is None else desired_json(wish),
                "replicas": [
                    {"worker_id": worker.worker_id, **state.to_dict()}
                    for worker in sorted(workers, key=lambda one: one.worker_id)
                    if worker.pool == pool
                    for state in worker.models
                    if state.model == name
                ],
            }
        )
    return shown


def _pinned(info: ModelInfo, wish: DesiredState | None) -> bool:
    return info.pinned if wish is None or wish.pinned is None else wish.pinned


def desired_json(wish: DesiredState) -> Json:
    """What is wanted, as callers see it."""
    return {
        "kind": wish.kind,
        "name": wish.name,
        "pool": wish.pool,
        "action": wish.action,
        "loaded": wish.loaded,
        "pinned": wish.pinned,
        "paused": wish.paused,
        "removed": wish.removed,
        "created_at": rfc3339(wish.created_at),
        "created_by": wish.created_by,
    }


def _added(wish: DesiredState) -> ModelInfo | None:
    """The facts of a model that is wanted, as its entry has them."""
    try:
        entry = parse_entry({**json.loads(wish.entry or ""), "id": wish.name, "pool": wish.pool})
    except (InvalidRequest, ValueError, TypeError):
        return None
    return ModelInfo(
        model=entry.id,
        tasks=entry.tasks,
        aliases=entry.aliases,
        pool=entry.pool,
        engine=entry.engine,
        defaults={name: json.dumps(value) for name, value in entry.payload_defaults().items()},
        state="absent",
        updated_at=wish.created_at,
        worker_id="",
        priority=entry.priority,
        pinned=entry.pinned,
        max_batch_size=entry.max_batch_size,
        reason="no worker has told of it yet",
        revision=entry.revision,
    )


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
    """The models that there are, in words."""
    names = sorted(models)
    more = f" and {len(names) - NAMED_MODELS} more" if len(names) > NAMED_MODELS else ""
    return f"there are {', '.join(names[:NAMED_MODELS])}{more}" if names else "there is none"


def paused_classes(wishes: Mapping[str, DesiredState]) -> list[Json]:
    """The classes of which nothing starts."""
    return [desired_json(wish) for wish in wishes.values() if wish.kind == CLASS and wish.paused]
