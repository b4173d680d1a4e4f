"""Which models there are: the records of workers as callers see them, and the check of a model's name."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from penstock.schemas.errors import ModelNotFound
from penstock.schemas.records import ModelInfo


def find_model(models: Iterable[ModelInfo], task: str, name: str | None, pool: str | None) -> str | None:
    """The id that `name` (an id or alias) stands for in a pool; None if it is left to the workers.

    Raises ModelNotFound when workers have told their models and none of them fits. Before any has, a request waits.
    """
    known = [model for model in models if model.pool == pool]
    fitting = [model for model in known if task in model.tasks]
    if name is None:
        return fitting[0].model if len({model.model for model in fitting}) == 1 else None
    for model in fitting:
        if name == model.model or name in model.aliases:
            return model.model
    if not known:
        return None
    if any(name == model.model or name in model.aliases for model in known):
        raise ModelNotFound(f"the model `{name}` does not do {task}", param="model")
    raise ModelNotFound(f"the model `{name}` does not exist", param="model")


def public_models(models: Iterable[ModelInfo], without_worker: Collection[str] = ()) -> list[dict[str, Any]]:
    """OpenAI's model objects with Penstock's facts beside, one per id, sorted by it.

    Models `without_worker` are not available: requests for them are accepted, and wait.
    """
    newest: dict[str, ModelInfo] = {}
    for model in models:
        if model.model not in newest or model.updated_at >= newest[model.model].updated_at:
            newest[model.model] = model
    return [{**_public(newest[name]), "available": name not in without_worker} for name in sorted(newest)]


def _public(model: ModelInfo) -> dict[str, Any]:
    return {
        "id": model.model,
        "object": "model",
        "created": model.updated_at // 1000,
        "owned_by": "penstock",
        "aliases": model.aliases,
        "tasks": model.tasks,
        "pool": model.pool,
        "state": model.state,
        "context_window": model.context_window,
        "max_output_tokens": model.max_output_tokens,
        "dimensions": model.dimensions,
    }
