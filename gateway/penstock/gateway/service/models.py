"""Which models there are: the records of workers as callers see them, and whether one can do what is asked of it."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from penstock.schemas.errors import ContextLengthExceeded, ModelNotFound, UnsupportedParameter
from penstock.schemas.payloads import only_remote
from penstock.schemas.records import InferenceRequest, ModelInfo

NAMED_MODELS = 10
"""So many models are named to a caller who asked for another one."""
REMOTE = frozenset({"remote", "managed"})
"""The kinds of engines that pass on whatever OpenAI's protocol has."""
LEAST_WINDOW = 512
"""No model has a smaller one; most answers are shorter, and nothing is looked for."""


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
    there = _named(fitting)
    if any(name == model.model or name in model.aliases for model in known):
        raise ModelNotFound(f"the model `{name}` does not do {task}; {there}", param="model")
    raise ModelNotFound(f"the model `{name}` does not exist; for {task} {there}", param="model")


def _named(models: Iterable[ModelInfo]) -> str:
    names = sorted({model.model for model in models})
    more = f" and {len(names) - NAMED_MODELS} more" if len(names) > NAMED_MODELS else ""
    return f"there are {', '.join(names[:NAMED_MODELS])}{more}" if names else "there is none"


def unknown_model(models: Iterable[ModelInfo], name: str) -> ModelNotFound:
    """The error for a name that no model has, whatever its task."""
    return ModelNotFound(f"the model `{name}` does not exist; {_named(models)}", param="model")


def check_abilities(models: Iterable[ModelInfo], request: InferenceRequest) -> None:
    """Refuse what no model that may serve the request can do, as far as workers have told of them.

    Raises UnsupportedParameter for fields that only remote models know, and ContextLengthExceeded for an answer that is
    longer than the window. What a gateway cannot know yet, the engine refuses.
    """
    payload = request.payload
    longest: int = payload.get("max_tokens") or 0
    remote = next(only_remote(payload, request.extra), None)
    if remote is None and longest <= LEAST_WINDOW:
        return
    serving = [
        model
        for model in models
        if model.pool == request.pool
        and request.task in model.tasks
        and (request.model is None or request.model == model.model or request.model in model.aliases)
    ]
    if not serving:
        return
    if remote is not None and all(model.engine not in REMOTE for model in serving):
        names = ", ".join(sorted({model.model for model in serving})[:NAMED_MODELS])
        raise UnsupportedParameter(
            f"{remote} is not supported by {names}: only models that a remote server runs know it", param=remote
        )
    windows = {model.model: model.context_window for model in serving}
    if all(window is not None and longest > window for window in windows.values()):
        name, window = max(windows.items(), key=lambda item: item[1] or 0)
        raise ContextLengthExceeded(
            f"payload.max_tokens is {longest}; the window of {name} holds {window} tokens, prompt and answer together",
            param="payload.max_tokens",
            details={"need": longest, "capacity": window, "unit": "tokens"},
        )


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
