"""Names that other services use for the fields of a request, in its JSON form. One table. Pure.

`NAMES` maps each name to a field of ours and says how its value is read. Each name of the table, and each of our own,
is taken in snake_case, camelCase or with hyphens. `HOLDERS` names the objects in which a name may stand: the body
itself, `payload`, `parameters` and others. `TASK_NAMES` and `PRIORITY_NAMES` map values.
docs/reference/topics.md shows the same tables.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple, cast
from urllib.parse import quote

from penstock.schemas.errors import InvalidRequest, PenstockError, UnsupportedParameter
from penstock.schemas.finite_json import checked_value, shown_name
from penstock.schemas.json_records import object_in, written_object
from penstock.schemas.labels import LABEL_CHARS, NO_LABELS, Labels, label
from penstock.schemas.tasks import TASKS
from penstock.schemas.times import moment_ms
from penstock.schemas.topics import CLASS_PRIORITIES, HEADER_NAMES

Json = dict[str, Any]
Path = tuple[str | int, ...]
Key = tuple[str, str]

TASK_NAMES: dict[str, str] = {
    **dict.fromkeys(
        ("text", "chat", "chat_completion", "completion", "text_completion", "llm", "text2text", "text_generation"),
        "text_generation",
    ),
    **dict.fromkeys(("embed", "embedding", "embeddings", "text_embedding"), "embedding"),
    **dict.fromkeys(("image", "text_to_image", "text2image", "txt2img", "image_generation"), "image_generation"),
    **dict.fromkeys(("image_to_image", "image2image", "img2img", "image_edit", "image_editing"), "image_editing"),
    **dict.fromkeys(
        ("caption", "image_caption", "image_captioning", "image2text", "img2txt", "image_to_text"), "image_to_text"
    ),
    "image_processing": "image_processing",
    **dict.fromkeys(("summary", "summarize", "summarization"), "summarization"),
    **dict.fromkeys(("items", "conversation_items"), "conversation_items"),
}
MESSAGE_TYPES = ("request", "inference_request")
"""Values of `type` that say what the message is, and no task."""
PRIORITY_NAMES = {**CLASS_PRIORITIES, "normal": CLASS_PRIORITIES["medium"]}

_UNITS = {"": 1, "K": 10, "M": 20, "G": 30, "T": 40}
_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,6})?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)
_SCHEME = re.compile(r"(https?|file|data):", re.IGNORECASE)
_SEPARATORS = re.compile(r"(?<=[a-z0-9])[_-](?=[a-z0-9])")
LEAST_BYTES = 2**20
_DRAWING = frozenset({"negative_prompt", "width", "height", "inference_steps", "guidance_scale", "sampler", "strength"})
_REQUIREMENTS = frozenset({"vram_bytes", "cpu_memory_bytes"})
MAX_NAME_CHARS = 64
MAX_NAMES_BYTES = 4_096
MANY_NAMES = 1_000
"""No message has more in the objects that are read."""
MAX_DEPTH = 4
"""No holder lies deeper."""


def folded(name: str) -> str:
    """The same for `input_image`, `inputImage` and `input-image`."""
    if len(name) > MAX_NAME_CHARS:
        return name
    return name if name.isalnum() and name.islower() else _SEPARATORS.sub("", name.lower())


_TASKS = {folded(name): task for name, task in TASK_NAMES.items()}
_MESSAGE_TYPES = frozenset(map(folded, MESSAGE_TYPES))


def _task(value: Any) -> Any:
    known = _TASKS.get(folded(value)) if isinstance(value, str) else None
    if known is None:
        raise ValueError(f"one of {', '.join(TASK_NAMES)}")
    return known


def _priority(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    if value.isascii() and value.isdigit() and len(value) < 10:
        return int(value)
    if (known := PRIORITY_NAMES.get(value.lower())) is None:
        raise ValueError(f"an integer or one of {', '.join(PRIORITY_NAMES)}")
    return known


def _size(value: Any) -> int:
    """Bytes. Text has a unit, of which all are powers of 1,024; a number counts bytes, so a small one is a mistake."""
    if isinstance(value, int) and not isinstance(value, bool):
        if value == 0 or LEAST_BYTES <= value < 2**63:
            return value
    elif isinstance(value, str) and (match := _SIZE.fullmatch(value.strip())) and not value.strip()[-1].isdigit():
        size = int(float(match[1]) * 2 ** _UNITS[match[2].upper()])
        if size < 2**63:
            return size
    raise ValueError('a size with its unit, as "8GB", or a number of bytes')


def _text(value: Any) -> Any:
    """An integer as text, for ids."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _label(value: Any) -> str:
    text = str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value
    if not isinstance(text, str) or not 0 < len(text) <= LABEL_CHARS:
        raise ValueError(f"text of 1 to {LABEL_CHARS} characters")
    return text


def _image(value: Any) -> Any:
    """A reference of an image's URL, or of the absolute path of a file on the worker's machine."""
    if isinstance(value, dict):
        given = cast("Json", value)
        return _image(given["path"]) if given.keys() == {"path"} and isinstance(given["path"], str) else given
    if isinstance(value, str) and _SCHEME.match(value):
        return {"url": value}
    if isinstance(value, str) and value.startswith("/"):
        return {"url": f"file://{quote(value, errors='surrogatepass')}"}
    raise ValueError("a URL, the absolute path of a file, or an object")


def _told_time(value: Any) -> int:
    """By the sender's clock, for information: a number that is no time is the nearest one."""
    return moment_ms(value, bounded=False)


class Alias(NamedTuple):
    """A name, the field that it stands for, and how its value is read. `read` raises ValueError: what it must be."""

    name: str
    field: str
    read: Callable[[Any], Any] = lambda value: value


NAMES: tuple[Alias, ...] = (
    Alias("request_id", "request_id", _text),
    Alias("id", "request_id", _text),
    Alias("task_id", "request_id", _text),
    Alias("task", "task", _task),
    Alias("type", "task", _task),
    Alias("model_profile.model_name", "model"),
    Alias("model_name", "model"),
    Alias("requirements.vram", "requirements.vram_bytes", _size),
    Alias("requirements.cpu_memory", "requirements.cpu_memory_bytes", _size),
    Alias("priority", "priority", _priority),
    Alias("user_id", "user_id", _text),
    Alias("session_id", "session_id", _text),
    Alias("stream_response", "stream"),
    Alias("timestamp", "created_at", _told_time),
    Alias("submitted_at", "created_at", _told_time),
    Alias("correlation_id", "metadata.correlation_id", _label),
    Alias("version", "metadata.version", _label),
    Alias("result_bucket", "output.store"),
    Alias("steps", "payload.inference_steps"),
    Alias("num_inference_steps", "payload.inference_steps"),
    Alias("cfg_scale", "payload.guidance_scale"),
    Alias("max_new_tokens", "payload.max_tokens"),
    Alias("max_completion_tokens", "payload.max_tokens"),
    Alias("image", "payload.image", _image),
    Alias("input_image", "payload.image", _image),
    Alias("image_url", "payload.image", _image),
    Alias("image_path", "payload.image", _image),
    Alias("mask", "payload.mask", _image),
    Alias("mask_url", "payload.mask", _image),
    Alias("mask_path", "payload.mask", _image),
    Alias("operation", "payload.operations[0].op"),
)
HOLDERS: dict[Key, str] = {
    ("", "payload"): "",
    ("", "parameters"): "",
    ("", "modelprofile"): "modelprofile",
    ("", "requirements"): "requirements",
    ("modelprofile", "requirements"): "requirements",
}
"""The objects whose names are read, by the one around them. Names in `payload` and `parameters` are as in the body."""


_TASK, _TYPE = ("", "task"), ("", "type")


class _Target(NamedTuple):
    path: Path
    field: str
    """The path as our own documentation writes it."""
    read: Callable[[Any], Any] = lambda value: value


def _target(field: str, read: Callable[[Any], Any] = lambda value: value) -> _Target:
    parts = re.findall(r"[^.\[\]]+", field)
    return _Target(tuple(int(part) if part.isdigit() else part for part in parts), field, read)


@cache
def _own_names(task: str) -> frozenset[str]:
    """The fields of a task's payload. Pydantic is imported here, not before the first body comes."""
    from penstock.schemas.bodies import json_schema, request_type

    defs = json_schema(request_type(task))["$defs"]
    return next(frozenset(schema["properties"]) for name, schema in defs.items() if name.endswith("Payload"))


@cache
def _own_fields() -> frozenset[str]:
    from penstock.schemas.refusals import FIELDS

    return frozenset({*FIELDS, *TASKS, "task", "payload", "request_id", "tenant", "created_at"})


@cache
def _targets() -> Mapping[Key, _Target]:
    """What a name stands for, by (holder, folded name): the names of the table, and our own in other spellings."""
    payload = {name for task in TASKS for name in _own_names(task)}
    found = {("", folded(name)): _target(f"payload.{name}") for name in payload}
    found |= {("", folded(name)): _target(name) for name in _own_fields() - {"payload", "requirements"}}
    for name in _REQUIREMENTS:
        found["requirements", folded(name)] = _target(f"requirements.{name}")
    for alias in NAMES:
        holder, _, name = alias.name.rpartition(".")
        found[folded(holder), folded(name)] = _target(alias.field, alias.read)
    return found


@cache
def _arguments() -> Mapping[str, _Target]:
    """The same of what the one `operation` of a body takes, by folded name."""
    from penstock.schemas.vision_bodies import ImageOperation

    names = ImageOperation.__annotations__.keys() - {"op", "image"}
    return {folded(name): _target(f"payload.operations[0].{name}") for name in names}


def translate(body: Mapping[str, Any], topic_kind: str | None = None) -> tuple[Json, dict[str, str]]:
    """The body under our names, and by field the name that it was given. The body itself stays as it is.

    `topic_kind` is that of the topic: text, image or embedding. With it the task may be missing where other names of
    the table are used. Raises InvalidRequest for two names of one field, for a value that cannot be read, and for more
    than `MANY_NAMES`; UnsupportedParameter for an unknown name in an object that only other services have.
    """
    if _is_own(body):
        return dict(body), {}
    reading = _Reading()
    for found in sorted(_read(body), key=lambda one: len(one.target.path)):
        reading.put(found)
    own, given = reading.own, reading.given
    if own.keys().isdisjoint(TASKS):
        own.setdefault("payload", {})
    if given and own.get("task") is None and (task := _task_of(own.get("payload"), topic_kind)) is not None:
        own["task"] = task
    return own, given


class Identity(NamedTuple):
    """Whose a body is, as far as it can be read; the values are not checked."""

    request_id: Any = None
    tenant: Any = None
    callback_url: Any = None
    labels: Labels = NO_LABELS


_IDENTITY = ("request_id", "tenant", "callback_url", "user_id", "session_id", "metadata.correlation_id")


@cache
def _identity_names() -> Mapping[str, str]:
    """The fields of an identity by their names; the first is the one that counts."""
    others = {alias.name: alias.field for alias in NAMES if alias.field in _IDENTITY}
    return {**{name: name for name in _IDENTITY[:-1]}, **others}


def _spellings(name: str) -> tuple[str, str, str]:
    first, *others = name.split("_")
    return name, name.replace("_", "-"), first + "".join(map(str.title, others))


def identity(body: Json) -> Identity:
    """That of a body that is no valid request, read as that of a valid one.

    Of one with more names than any message has the usual spellings alone are looked up: its names are not walked.
    """
    try:
        given = {key[1]: value for key, _, _, value in _walk(with_payload(body)) if key[0] == "" and value is not None}
        named = [(field, given.get(folded(name))) for name, field in _identity_names().items()]
    except PenstockError:
        named = _looked_up(body)
    found: dict[str, Any] = {}
    for field, value in named:
        if value is not None:
            found.setdefault(field, value)
    metadata = body.get("metadata")
    if isinstance(metadata, dict):
        found.setdefault("metadata.correlation_id", cast("Json", metadata).get("correlation_id"))
    request_id, tenant, url, *labels = (_legible(found.get(field)) for field in _IDENTITY)
    return Identity(request_id, tenant, url, Labels(*map(label, labels)))


def _looked_up(body: Json) -> list[tuple[str, Any]]:
    holders: list[Any] = [body, written_object(body.get("payload"))[0]]
    holders += [one.get("parameters") for one in holders if isinstance(one, dict)]
    objects = [cast("Json", one) for one in holders if isinstance(one, dict)]
    names = _identity_names().items()
    return [(field, one.get(text)) for name, field in names for text in _spellings(name) for one in objects]


def _legible(value: Any) -> Any:
    try:
        return _text(value)
    except ValueError:  # more digits than are made into text
        return None


def named(error: PenstockError, given: Mapping[str, str]) -> PenstockError:
    """The same error, of the names that the caller used for the fields."""
    param = error.param
    if param is None or not given:
        return error
    fields = [field for field in given if param == field or param.startswith((f"{field}.", f"{field}["))]
    shown, message = param, error.message
    if fields:
        field = max(fields, key=len)
        shown = given[field] + param[len(field) :]
        message = message.replace(param, shown, 1)
    for field in sorted(given.keys() - {param}, key=len, reverse=True):
        if "." in field:  # others are words that a sentence may have
            message = re.sub(rf"(?<![\w.]){re.escape(field)}(?![\w])", lambda _, name=given[field]: name, message)
    return type(error)(
        message, param=shown, details=error.details, retry_after_s=error.retry_after_s, cause=error.cause
    )


@contextmanager
def naming(given: Mapping[str, str]) -> Generator[None]:
    """Errors that leave this block have the names that the caller used."""
    try:
        yield
    except PenstockError as error:
        raise named(error, given) from error


def names_in(value: bytes, headers: Iterable[tuple[str, bytes | None]] = ()) -> dict[str, str]:
    """By field the name that the sender of a record used: the header of a record that was moved has them."""
    text = next((content for name, content in headers if name == HEADER_NAMES and content), None)
    try:
        if text is not None:
            return {field: str(name) for field, name in (object_in(text[:MAX_NAMES_BYTES]) or {}).items()}
        body = object_in(value)
        return {} if body is None else translate(with_payload(body))[1]
    except PenstockError:
        return {}


def _is_own(body: Mapping[str, Any]) -> bool:
    """Whether there is nothing to translate."""
    task, payload, requirements = body.get("task"), body.get("payload"), body.get("requirements")
    if not isinstance(task, str) or task not in TASKS or not body.keys() <= _own_fields():
        return False
    if isinstance(body.get("priority"), str):
        return False
    if isinstance(requirements, dict) and not requirements.keys() <= _REQUIREMENTS:
        return False
    if any(isinstance(body.get(name), int) for name in ("request_id", "user_id", "session_id")):
        return False
    if not isinstance(payload, dict):
        return payload is None
    fields = cast("Json", payload)
    if not fields.keys() <= _own_names(task):
        return False
    images = (fields[name] for name in ("image", "mask") if name in fields)
    return all(image is None or (isinstance(image, dict) and "path" not in image) for image in images)


def with_payload(body: Json) -> Json:
    """The same, its payload an object if it was written as text. Raises InvalidRequest."""
    if not isinstance(body.get("payload"), str) or (payload := written_object(body["payload"])[0]) is None:
        return body
    return {**body, "payload": checked_value(payload, "payload", "payload")}


class _Found(NamedTuple):
    target: _Target
    shown: str
    """The field as the caller wrote it."""
    value: Any


def _walk(body: Mapping[str, Any]) -> list[tuple[Key, str, str, Any]]:
    """(holder and folded name, name, the field as the caller wrote it, value) of all names that are read.

    Raises InvalidRequest for more names than any message has.
    """
    found: list[tuple[Key, str, str, Any]] = []
    names = 0
    open_holders = [(iter(body.items()), "", "")]
    while open_holders:
        items, where, shown = open_holders[-1]
        for name, value in items:
            if (names := names + 1) > MANY_NAMES:
                raise InvalidRequest(f"the body and what belongs to it have more than {MANY_NAMES} names")
            key = where, folded(name)
            inner = HOLDERS.get(key)
            place = shown + shown_name(name)
            if inner is not None and isinstance(value, dict) and len(open_holders) < MAX_DEPTH:
                open_holders.append((iter(cast("Json", value).items()), inner, f"{place}."))
                break
            found.append((key, name, place, value))
        else:
            open_holders.pop()
    return found


def _read(body: Mapping[str, Any]) -> Iterator[_Found]:
    """The fields of a body, their values read. Raises as `translate`."""
    found = _walk(body)
    given = {key for key, _, _, value in found if value is not None}
    named_tasks = (_task_or_none(value) for key, _, _, value in found if key in (_TASK, _TYPE))
    task = next(filter(None, named_tasks), None)
    arguments = _arguments() if task == "image_processing" and ("", "operation") in given else {}
    for key, name, shown, value in found:
        if key == _TYPE and _is_kind(value, beside_task=_TASK in given):
            continue
        target = arguments.get(key[1]) if key[0] == "" else None
        target = target or _targets().get(key)
        if key == ("", "conversationid") and task == "summarization" and "." in shown:
            target = _target("payload.conversation_id")  # the conversation that it only reads
        if target is None:
            yield from _unknown(key, name, shown, value)
        elif value is not None:
            try:
                yield _Found(target, shown, target.read(value))
            except ValueError as error:
                raise InvalidRequest(f"{shown} must be {error}", param=shown) from None


def _unknown(key: Key, name: str, shown: str, value: Any) -> Iterator[_Found]:
    """Left where it is for the checks that follow, if our own bodies have such a place."""
    if key in HOLDERS:
        if value is not None:
            raise InvalidRequest(f"{shown} must be an object", param=shown)
    elif shown == shown_name(name):
        yield _Found(_Target((name,), shown), shown, value)
    elif shown == f"payload.{shown_name(name)}":
        yield _Found(_Target(("payload", name), shown), shown, value)
    else:
        raise UnsupportedParameter(f"{shown} is not supported", param=shown)


class _Reading:
    """A body under our names, as it grows."""

    def __init__(self) -> None:
        self.own: dict[Any, Any] = {}
        self.given: dict[str, str] = {}
        self._shown: dict[Path, str] = {}

    def put(self, found: _Found) -> None:
        """Raises InvalidRequest where the field has a value already."""
        (path, field, _), shown, value = found
        holder = self._holder(path, shown)
        if holder.get(path[-1]) is not None:
            first, second = self._shown.get(path, field), shown
            if second == field:
                first, second = second, first
            raise InvalidRequest(f"{first} and {second} name the same field: give one of them", param=second)
        holder[path[-1]] = dict(cast("Json", value)) if isinstance(value, dict) else value
        self._shown[path] = shown
        if shown != field:
            self.given[field] = shown
        if field in ("payload.image", "payload.mask") and isinstance(value, dict) and "url" in value:
            self.given[f"{field}.url"] = shown

    def _holder(self, path: Path, shown: str) -> dict[Any, Any]:
        """The object that holds the last part of the path; made where it is missing."""
        holder: Any = self.own
        for place, part in enumerate(path[:-1]):
            if isinstance(part, int):
                holder = holder[part]
                continue
            kind = list if isinstance(path[place + 1], int) else dict
            if kind is list and (first := self._shown.get(path[: place + 1])) is not None:
                raise InvalidRequest(f"{first} and {shown} name the same field: give one of them", param=shown)
            inner: Any = holder.setdefault(part, [{}] if kind is list else {})
            if not isinstance(inner, kind):
                raise InvalidRequest(f"{part} must be an object, for {shown} belongs there", param=str(part))
            holder = cast("Any", inner)
        return holder


def _task_or_none(value: Any) -> str | None:
    return _TASKS.get(folded(value)) if isinstance(value, str) else None


def _is_kind(value: Any, *, beside_task: bool) -> bool:
    """Whether a `type` says what kind of message it is, and names no task."""
    if not isinstance(value, str):
        return False
    return folded(value) in _MESSAGE_TYPES or (beside_task and _task_or_none(value) is None)


def _task_of(payload: Any, topic_kind: str | None) -> str | None:
    """What a body without a task asks for on this topic; None if it could be several things."""
    has = cast("Json", payload).keys() if isinstance(payload, dict) else frozenset[str]()
    if topic_kind == "embedding":
        return "embedding"
    if topic_kind == "text":
        return "summarization" if "text" in has else "text_generation"
    if "operations" in has:
        return "image_processing"
    draws = not _DRAWING.isdisjoint(has)
    if "image" in has:
        return "image_editing" if draws else None if "prompt" in has else "image_to_text"
    if draws or topic_kind == "image":
        return "image_generation"
    tasks = {"messages": "text_generation", "prompt": "text_generation", "input": "embedding", "text": "summarization"}
    return next((task for name, task in tasks.items() if name in has), None)
