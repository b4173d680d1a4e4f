"""`[[models]]` entries of the model lists that other inference managers read (`ModelConfig` as JSON). Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, cast

from penstock.common.engine_kinds import IMAGE_FIELDS, KINDS
from penstock.common.model_entry import ModelEntry, check_names, parse_entry
from penstock.schemas.aliases import TASK_NAMES, folded, translate
from penstock.schemas.errors import PenstockError
from penstock.schemas.tasks import TASKS

Json = dict[str, Any]
MIB = 2**20
NAMES = (
    "model_id", "model_type", "model_path", "api_endpoint", "vram_required_mb", "loading_time_sec", "priority",
    "max_batch_size", "parameters",
)  # fmt: skip
ENGINES = {
    "text_generation": "text", "summarization": "text", "embedding": "embedding", "image_generation": "diffusers",
    "image_editing": "diffusers", "image_to_text": "vision", "image_processing": "upscaling",
}  # fmt: skip
"""The engine of a model's files, by its task."""
_TASKS = {folded(name): task for name, task in TASK_NAMES.items()}
_NAMES = {folded(name): name for name in NAMES}


class Imported(NamedTuple):
    """Entries as `penstock.toml` has them, and a line about each field that has no counterpart."""

    entries: list[Json]
    notes: list[str]


def imported(models: list[Any]) -> Imported:
    """What can be said of the models in `[[models]]`. A model that cannot be served is left out, with a note."""
    entries: list[Json] = []
    notes: list[str] = []
    for number, model in enumerate(models):
        label = f"model {number + 1}"
        try:
            given = _object(model)
            fields = {_NAMES.get(folded(name), name): value for name, value in given.items()}
            if len(fields) < len(given):
                raise ValueError("it names a field twice")
            label = str(fields.get("model_id") or label)
            entry, left = _entry(fields)
            check_names([*map(parse_entry, entries), parse_entry(entry)])
        except (PenstockError, ValueError, OverflowError) as error:
            notes.append(f"{label}: left out: {error}")
            continue
        entries.append(entry)
        notes += [f"{label}: {line}" for line in left]
    return Imported(entries, notes)


def _entry(fields: Json) -> tuple[Json, list[str]]:
    """Raises PenstockError, ValueError for a model that cannot be served."""
    task = _TASKS.get(folded(str(fields.get("model_type"))))
    if task is None:
        raise ValueError(f"model_type is {fields.get('model_type')!r}; it must be one of {', '.join(TASK_NAMES)}")
    entry: Json = {"id": fields.get("model_id"), **_engine(fields, task), "tasks": [task]}
    parse_entry(entry)
    notes: list[str] = []
    for name, field, value in _fields(fields, entry["engine"], task):
        if field is None:
            notes.append(f"{name} has no counterpart: {value}")
            continue
        whole = {**entry, field: {**entry.get(field, {}), **value} if isinstance(value, dict) else value}
        if field == "defaults" and entry["engine"] == "remote" and TASKS[task].output == "images":
            _name_at_server(whole, name.removeprefix("parameters."), value)
        try:
            parse_entry(whole)
        except PenstockError as error:
            notes.append(f"{name} has no counterpart: {error}")
        else:
            entry = whole
    return entry, notes


def _name_at_server(entry: Json, name: str, defaults: Json) -> None:
    """Add that the server calls these defaults by the name that they have in the list."""
    if names := {field: name for field in defaults if field in IMAGE_FIELDS}:
        options = entry.get("options", {})
        entry["options"] = {**options, "image_fields": {**options.get("image_fields", {}), **names}}


def _engine(fields: Mapping[str, Any], task: str) -> Json:
    endpoint, path = fields.get("api_endpoint"), fields.get("model_path")
    if endpoint:
        if task not in KINDS["remote"].tasks:
            raise ValueError(f"api_endpoint: the engine remote does not do {task}; give the model's files")
        return {"source": endpoint, "engine": "remote"}
    if task == "image_processing" and not path:
        return {"source": "pillow", "engine": "imaging"}
    if not path:
        raise ValueError("it has neither model_path nor api_endpoint")
    return {"source": path, "engine": ENGINES[task]}


def _fields(fields: Mapping[str, Any], engine: str, task: str) -> Iterator[tuple[str, str | None, Any]]:
    """(their field, ours or None, the value or why there is none)."""
    for name, value in fields.items():
        if value is None or name in ("model_id", "model_type", "api_endpoint"):
            continue
        match name:
            case "model_path":
                if fields.get("api_endpoint"):
                    yield name, None, "the model is served at its api_endpoint"
            case "vram_required_mb" if not KINDS[engine].local:
                if value:
                    yield name, None, "a remote model takes no memory here"
            case "vram_required_mb":
                if value:
                    yield name, "vram_bytes", int(value * MIB) if type(value) in (int, float) else value
            case "loading_time_sec":
                if value:
                    yield name, None, "workers measure how long a load takes"
            case "priority" | "max_batch_size":
                yield name, name, value
            case "parameters":
                yield from _defaults(_object(value, name), task)
            case _:
                yield name, None, f"there is no such field; the fields are {', '.join(ModelEntry.model_fields)}"


def _defaults(parameters: Json, task: str) -> Iterator[tuple[str, str | None, Any]]:
    for name, value in parameters.items():
        if value is None:
            continue
        try:
            own, _ = translate({"task": task, "parameters": {name: value}})
        except PenstockError as error:
            yield f"parameters.{name}", None, str(error)
            continue
        payload = own.get("payload")
        if not payload:
            yield f"parameters.{name}", None, "it is no field of a payload"
        else:
            yield f"parameters.{name}", "defaults", payload


def _object(value: Any, name: str = "a model") -> Json:
    if not isinstance(value, dict):
        raise ValueError(f"{name} must be an object")
    return cast("Json", value)
