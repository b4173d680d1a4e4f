"""Which models there are: the records of workers as callers see them, and whether one can do what is asked of it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from penstock.common.engine_kinds import KINDS
from penstock.gateway.service.model_states import NAMED_MODELS, best_states, named, public_model
from penstock.gateway.view.fleet import KnownModels
from penstock.gateway.view.liveness import ModelId
from penstock.schemas.errors import ContextLengthExceeded, InvalidRequest, ModelNotFound, UnsupportedParameter
from penstock.schemas.message_parts import image_parts
from penstock.schemas.payloads import only_remote
from penstock.schemas.records import InferenceRequest, ModelInfo, WorkerState
from penstock.schemas.tasks import BUILT_TASKS, needs_model

ALL_TASKS = "all"
TOOL_TASKS = frozenset({"image_processing"})
"""Tasks of tools: `imaging` and upscalers. Clients that let a person choose a model for a chat do not list them."""
LEAST_WINDOW = 512
"""No model has a smaller one; most answers are shorter, and nothing is looked for."""


def model_or_refusal(models: Iterable[ModelInfo], request: InferenceRequest) -> tuple[str | None, ModelNotFound | None]:
    """The id of a request's model, as `find_model`, and why there is none.

    A caller who may not ask is refused before anything of what there is: so the refusal is raised later.
    """
    try:
        if not needs_model(request.task):
            return None, None
        return find_model(models, request.task, request.model, request.pool), None
    except ModelNotFound as error:
        return None, error


def find_model(models: Iterable[ModelInfo], task: str, name: str | None, pool: str | None) -> str | None:
    """The id that `name` (an id or alias) stands for in a pool; None if it is left to the workers.

    Raises ModelNotFound when workers have reported their models and none of them fits. Before any has, a request waits:
    what the configuration of this process declares need not be all that there is.
    """
    known = [model for model in models if model.pool == pool]
    fitting = [model for model in known if task in model.tasks]
    told = any(model.worker_id for model in known)
    if name is None and told and not fitting:
        served = ", ".join(sorted({one for model in known for one in model.tasks})) or "none"
        where = "" if pool is None else f" of the pool {pool}"
        raise ModelNotFound(f"no model{where} does {task}; tasks that are served: {served}", param="model")
    if name is None:
        return fitting[0].model if len({model.model for model in fitting}) == 1 else None
    for model in fitting:
        if name == model.model or name in model.aliases:
            return model.model
    if not told:
        return None
    there = named({model.model for model in fitting})
    if any(name == model.model or name in model.aliases for model in known):
        raise ModelNotFound(f"the model `{name}` does not do {task}; {there}", param="model")
    raise ModelNotFound(f"the model `{name}` does not exist; for {task} {there}", param="model")


def check_abilities(known: KnownModels, request: InferenceRequest) -> None:
    """Refuse what no model that may serve the request can do, as far as workers report them, and agree.

    Raises UnsupportedParameter for fields that none of them knows, and ContextLengthExceeded for an answer that is
    longer than the window. What a gateway cannot know yet, the engine refuses.
    """
    serving = _serving(known.models, request)
    if any((one.model, one.pool) in known.unsure for one in serving):
        return
    _check_sees(serving, request)
    payload = request.payload
    longest: int = payload.get("max_tokens") or 0
    if next(only_remote(request.task, payload, request.extra), None) is None and longest <= LEAST_WINDOW:
        return
    if not serving:
        return
    unknown = {
        model.model: None
        if _passes_on(model.engine)
        else next(only_remote(request.task, payload, request.extra, model.engine or ""), None)
        for model in serving
    }
    if None not in unknown.values():
        names = ", ".join(sorted(unknown)[:NAMED_MODELS])
        param = next(iter(unknown.values()))
        raise UnsupportedParameter(
            f"{param} is not supported by {names}: only models that a remote server runs know it", param=param
        )
    windows = {model.model: model.context_window for model in serving}
    if all(window is not None and longest > window for window in windows.values()):
        name, window = max(windows.items(), key=lambda item: item[1] or 0)
        raise ContextLengthExceeded(
            f"payload.max_tokens is {longest}; the window of {name} holds {window} tokens, prompt and answer together",
            param="payload.max_tokens",
            details={"need": longest, "capacity": window, "unit": "tokens"},
        )


def _passes_on(engine: str) -> bool:
    """Whether it passes on whatever OpenAI's protocol has; a kind of a newer release does not."""
    kind = KINDS.get(engine)
    return kind is not None and kind.openai


def _check_sees(serving: Sequence[ModelInfo], request: InferenceRequest) -> None:
    """Refuse a chat with images for models that read text alone. Raises UnsupportedParameter."""
    place = next(image_parts(request.payload), None)
    if place is None or request.task != "text_generation":
        return
    if serving and not any("image_to_text" in one.tasks for one in serving):
        names = ", ".join(sorted({one.model for one in serving})[:NAMED_MODELS])
        raise UnsupportedParameter(f"{place} is an image, and {names} reads text alone", param=place)


def _serving(models: Iterable[ModelInfo], request: InferenceRequest) -> list[ModelInfo]:
    """Those that may serve the request, as workers report them."""
    return [
        one
        for one in models
        if one.worker_id
        and one.pool == request.pool
        and request.task in one.tasks
        and (request.model is None or request.model == one.model or request.model in one.aliases)
    ]


def public_models(
    models: Iterable[ModelInfo],
    without_worker: Collection[ModelId] = (),
    workers: Iterable[WorkerState] = (),
) -> list[dict[str, Any]]:
    """OpenAI's model objects with Penstock's facts beside, one per id and pool, sorted; the common pool's come first.

    Models `without_worker` are not available: requests for them are accepted, and wait.
    """
    best = best_states(workers)
    return [
        public_model(one, best.get((one.model, one.pool)), available=(one.model, one.pool) not in without_worker)
        for one in sorted(models, key=lambda one: (one.model, one.pool or ""))
    ]


def of_task(models: Iterable[dict[str, Any]], task: str | None) -> list[dict[str, Any]]:
    """The public models that do a task. ALL_TASKS: all of them. None: those that do more than TOOL_TASKS.

    Raises InvalidRequest for no task.
    """
    if task not in (None, ALL_TASKS, *BUILT_TASKS):
        raise InvalidRequest(f"task must be {ALL_TASKS} or one of {', '.join(BUILT_TASKS)}", param="task")
    if task == ALL_TASKS:
        return list(models)
    if task is None:  # a worker that has reported no tasks yet may have any
        return [one for one in models if not one["tasks"] or set(one["tasks"]) - TOOL_TASKS]
    return [one for one in models if task in one["tasks"]]
