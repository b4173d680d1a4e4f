"""One `[[models]]` table: how a model is declared, in a file, by `penstock models add` or over HTTP.

Here is what can be said of an entry without its files. Worker, gateway and command line hold it against the same rules.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, cast

from pydantic import BeforeValidator, Field, ValidationError, field_validator, model_validator

from penstock.common.configuration import Section
from penstock.common.durations import seconds
from penstock.common.engine_kinds import IMAGE_FIELDS, KINDS
from penstock.common.engine_options import wrong_option
from penstock.schemas.errors import InvalidRequest, PenstockError
from penstock.schemas.payloads import only_remote
from penstock.schemas.requests import parse_request
from penstock.schemas.tasks import BUILT_TASKS, TASKS, default_fields

PRIORITY = 5
"""The priority of a model that names none."""

_MOVED = {
    "device": "device", "dtype": "dtype", "quantization": "quantization", "adapters": "adapters", "window": "window",
    "trust_remote_code": "trust_remote_code", "slots": "max_batch_size", "defaults": "defaults",
}  # fmt: skip
"""Options that are fields of their own now, by the name that older configurations have for them."""
_MOVED_DEFAULTS = {
    "temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "default_max_tokens": "max_tokens",
}  # fmt: skip
"""Options of text models that are defaults now."""
NOT_OF_OPENAI = frozenset({*IMAGE_FIELDS, "previews"})
"""Fields of images that a remote server takes only if its entry says so. Previews it gives none."""


class RetriesSection(Section):
    """When a failed attempt runs again. Up to half of each wait is left out, by the request's id."""

    backoff: Literal["doubling", "fixed"] = "doubling"
    """doubling: each wait is twice the one before, up to `longest_s`; fixed: each is `first_s`."""
    first_s: float = Field(default=0.1, ge=0)
    """The first wait, in seconds."""
    longest_s: float = Field(default=10.0, ge=0)
    """The longest wait, in seconds. What a server asks for by Retry-After is waited for in any case, up to a minute."""


class Replicas(Section):
    """How many engines a model has on a worker."""

    min: int = Field(default=1, ge=1)
    """The number of replicas when it is loaded at all."""
    max: int = Field(default=1, ge=1)
    """Up to so many while all of them are busy and memory lies free."""

    @model_validator(mode="before")
    @classmethod
    def _number(cls, value: Any) -> Any:
        if isinstance(value, int) and not isinstance(value, bool):
            return {"min": value, "max": value}
        if isinstance(value, dict) and "min" in value and "max" not in value:
            return {**cast("dict[str, Any]", value), "max": value["min"]}
        return cast("Any", value)

    @model_validator(mode="after")
    def _ordered(self) -> Replicas:
        if self.max < self.min:
            raise ValueError(f"max is {self.max}, less than min, {self.min}")
        return self


_ENGINES = tuple(kind.name for kind in KINDS.values() if not kind.built_in)


class ModelEntry(Section):
    id: str = Field(min_length=1, max_length=200)
    """The name by which requests ask for the model."""
    source: str = Field(min_length=1)
    """A folder, a .gguf file or a hub id (owner/name); for `remote` the server's URL; for `managed` its command; for
    `noop` anything."""
    engine: str = Field(json_schema_extra={"enum": [*_ENGINES]})
    """What runs it."""
    tasks: list[str] = Field(default_factory=list[str])
    """The tasks that it serves, of those of its engine; none: the first of these, and of `text` both."""
    aliases: list[str] = Field(default_factory=list[str])
    """Other names for it."""
    pool: str | None = Field(default=None, pattern="^[A-Za-z0-9_-]{1,63}$")
    """Only workers of this pool serve it; null: every worker that reads this entry."""
    revision: str | None = None
    """The branch, tag or commit of a hub id; null: its main branch."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """The type of its weights in memory; null: float32 on a CPU, bfloat16 on a GPU."""
    quantization: Literal["int8", "nf4", "fp4"] | None = None
    """Weights in 8 or 4 bits, made by bitsandbytes as the model is loaded; that package must be installed."""
    adapters: list[str] = Field(default_factory=list[str])
    """LoRA adapters (folders or hub ids), merged into the weights in this order as the model is loaded."""
    device: str | None = None
    """`auto` (a GPU if there is one that can hold the model, else main memory), `cpu`, `cuda` (whichever GPU has
    room), `cuda:1`, …; null: `auto`. Engines that compute in main memory alone (imaging, managed) stay there."""
    replicas: Replicas = Field(default_factory=Replicas)
    """Engines of it on a worker: a number, or `{min, max}`."""
    vram_bytes: int | None = Field(default=None, ge=1)
    """Memory that one engine of it needs, in bytes; null: estimated from its files, then measured."""
    max_batch_size: int | None = Field(default=None, ge=1)
    """Requests that run together on one engine; null: as its engine has it."""
    window: int | None = Field(default=None, ge=2)
    """The longest prompt with its answer, in tokens; null: the model's own."""
    priority: int = Field(default=PRIORITY, ge=0)
    """Its weight when memory is short, and when a request names no model: 0 is given up last and chosen first."""
    pinned: bool = False
    """Never unloaded for another model."""
    preload: bool = True
    """Loaded when the worker starts, if memory lies free; else with the first request for it."""
    keep_alive: Annotated[float | None, BeforeValidator(seconds)] = None
    """Unloaded after so long without a request: seconds, or a text as `5m`; null: when others need its memory."""
    max_execution_s: float | None = Field(default=None, gt=0)
    """The longest run of a request for it, in seconds, in place of `worker.max_execution_s`; a request's own
    `execution_timeout_ms` can only shorten it."""
    max_attempts: int | None = Field(default=None, ge=1)
    """Attempts that may run of a request for it that sets no `max_attempts` of its own; null: until its deadline."""
    retries: RetriesSection | None = None
    """When a failed attempt of a request for it runs again: `{backoff, first_s, longest_s}`; null: as
    `worker.retries` says."""
    trust_remote_code: bool = False
    """Run the Python code that its folder brings. Weights are read from safetensors or GGUF in any case."""
    defaults: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Fields of the payload for requests that leave them out, as `{max_tokens = 256, temperature = 0.2}`."""
    options: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Options of its engine."""

    @model_validator(mode="before")
    @classmethod
    def _from_older(cls, value: Any) -> Any:
        """What stood in `options` in earlier releases, in the fields that it has now; without options that are null."""
        if not isinstance(value, dict) or not isinstance(cast("Any", value).get("options"), dict):
            return cast("Any", value)
        fields: dict[str, Any] = {**cast("dict[str, Any]", value)}
        options = {name: value for name, value in fields["options"].items() if value is not None}
        for old, new in _MOVED.items():
            if old in options:
                _move(fields, new, options.pop(old), old)
        if fields.get("engine") == "text":
            moved = {new: options.pop(old) for old, new in _MOVED_DEFAULTS.items() if old in options}
            if moved:
                fields["defaults"] = {**moved, **(fields.get("defaults") or {})}
        return {**fields, "options": options}

    @model_validator(mode="before")
    @classmethod
    def _tasks_of_its_engine(cls, value: Any) -> Any:
        """An entry without tasks serves the usual ones of its engine."""
        if not isinstance(value, dict):
            return value
        fields = cast("dict[str, Any]", value)
        kind = KINDS.get(str(fields.get("engine")))
        if kind is None or fields.get("tasks"):
            return fields
        return {**fields, "tasks": [*kind.tasks[: kind.usual]]}

    @field_validator("id")
    @classmethod
    def _plain(cls, value: str) -> str:
        return _plain_name(value)

    @field_validator("source")
    @classmethod
    def _holds_no_password(cls, value: str) -> str:
        """What shows entries, as commands, reports and logs, shows the source."""
        if re.match(r"\w+://[^/\s]*@", value):
            raise ValueError(
                "a URL with a user name or password is not taken: options.api_key_env, or options.headers with"
                ' {env = "NAME"}, reads them from a variable'
            )
        return value

    @field_validator("engine")
    @classmethod
    def _known_engine(cls, value: str) -> str:
        if value not in _ENGINES:
            raise ValueError(f"there is no engine {value}; there are {', '.join(_ENGINES)}")
        return value

    @field_validator("tasks")
    @classmethod
    def _served(cls, value: list[str]) -> list[str]:
        for task in value:
            if task not in BUILT_TASKS:
                raise ValueError(f"no engine serves the task {task}; there are {', '.join(BUILT_TASKS)}")
        return list(dict.fromkeys(value))

    @field_validator("aliases")
    @classmethod
    def _plain_aliases(cls, value: list[str]) -> list[str]:
        return [_plain_name(name) for name in value]

    @model_validator(mode="after")
    def _consistent(self) -> ModelEntry:
        kind = KINDS[self.engine]
        if unable := [task for task in self.tasks if task not in kind.tasks]:
            raise ValueError(f"the engine {kind.name} does not do {unable[0]}; it does {', '.join(kind.tasks)}")
        known = kind.all_options
        own = {name: value for name, value in self.options.items() if name in known or not kind.stands_in}
        if wrong := wrong_option(known, own):
            raise ValueError(f"{wrong} (model {self.id}, engine {kind.name})")
        check_names([self])
        self.payload_defaults()
        return self

    def payload_defaults(self) -> dict[str, Any]:
        """The defaults in a payload's normal form. Raises ValueError for what no request of its tasks could say."""
        known = frozenset[str]().union(*(default_fields(task) for task in self.tasks))
        for name in self.defaults:
            if name not in known:
                raise ValueError(
                    f"defaults.{name}: {' and '.join(self.tasks)} know {', '.join(sorted(known))} in defaults"
                )
        return {name: value for task in self.tasks for name, value in self._of_task(task).items() if value is not None}

    def _of_task(self, task: str) -> dict[str, Any]:
        mine = {name: value for name, value in self.defaults.items() if name in default_fields(task)}
        stub = TASKS[task].example
        try:
            request = parse_request(
                {"task": task, "payload": {**stub, **mine}}, tenant="default", request_id="defaults", now_ms=0
            )
        except PenstockError as error:
            raise ValueError(str(error).replace("payload.", "defaults.")) from error
        passes_on = KINDS[self.engine].openai
        if passes_on and TASKS[task].output == "images":
            taken: Mapping[str, str] = self.options.get("image_fields", {})
            for name in mine:
                if name in NOT_OF_OPENAI and name not in taken:
                    raise ValueError(f"defaults.{name}: the server is not known to take it (options.image_fields)")
        unknown = None if passes_on else next(only_remote(task, request.payload, {}, self.engine), None)
        if unknown is not None:
            raise ValueError(f"{unknown.replace('payload.', 'defaults.')} is known only to remote and managed models")
        return {name: request.payload.get(name) for name in mine}


def _move(fields: dict[str, Any], new: str, value: Any, old: str) -> None:
    given = fields.get(new)
    if given is not None and given != value:
        raise ValueError(f"{new} is {given!r}, and options.{old}, its older name, is {value!r}: keep one of them")
    fields[new] = value


def _plain_name(name: str) -> str:
    if not name or not name.isprintable() or "@" in name or name != name.strip():
        raise ValueError(f"{name!r}: a model's name is printable text without @, and without spaces around it")
    return name


def check_names(entries: Sequence[ModelEntry]) -> None:
    """Raises ValueError when one name stands for two models that one worker could serve."""
    for pool in {entry.pool for entry in entries} or {None}:
        owners: dict[str, str] = {}
        for entry in entries:
            if entry.pool is not None and entry.pool != pool:
                continue
            for name in (entry.id, *entry.aliases):
                if name in owners:
                    raise ValueError(
                        f"two models are called {name} ({owners[name]} and {entry.id}); names and aliases must differ"
                    )
                owners[name] = entry.id


def served_by(entries: Iterable[ModelEntry], pool: str | None) -> list[ModelEntry]:
    """The entries that a worker of this pool serves, in their order."""
    return [entry for entry in entries if entry.pool is None or entry.pool == pool]


def parse_entry(fields: Any) -> ModelEntry:
    """An entry of its JSON form. Raises InvalidRequest, naming the first field that is wrong."""
    if not isinstance(fields, dict):
        raise InvalidRequest("a model must be an object with id, source and engine")
    try:
        return ModelEntry.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        named = re.match(r"Value error, ((?:defaults|options)\.\w+)", first["msg"])
        text = first["msg"].removeprefix("Value error, ")
        if first["type"] == "extra_forbidden":
            text = f"there is no such field; the fields are {', '.join(ModelEntry.model_fields)}"
        elif first["type"] == "missing":
            text = "is missing"
        raise InvalidRequest(
            f"{place}: {text}" if place else text, param=named[1] if named else place or None
        ) from error
