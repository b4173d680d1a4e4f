"""Names that other services use for the fields of a request, in JSON on request topics. One table. Pure.

`NAMES` maps each name to a field of ours and says how its value is read; `TASK_NAMES` and `PRIORITY_NAMES` map values.
docs/reference/topics.md shows the same tables.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime
from typing import Any, NamedTuple, cast

from penstock.schemas.errors import InvalidRequest, PenstockError
from penstock.schemas.labels import CORRELATION_ID, LABEL_CHARS, Labels, label
from penstock.schemas.topics import CLASS_PRIORITIES

Json = dict[str, Any]
Path = tuple[str, ...]

TASK_NAMES: dict[str, str] = {
    **dict.fromkeys(
        ("text", "chat", "chat_completion", "completion", "text_completion", "llm", "text_generation"),
        "text_generation",
    ),
    **dict.fromkeys(("embed", "embedding", "embeddings", "text_embedding"), "embedding"),
    **dict.fromkeys(("image", "text_to_image", "txt2img", "image_generation"), "image_generation"),
    **dict.fromkeys(("image_to_image", "img2img", "image_edit", "image_editing"), "image_editing"),
    **dict.fromkeys(("caption", "image_caption", "image_captioning", "image_to_text"), "image_to_text"),
    "image_processing": "image_processing",
    **dict.fromkeys(("summary", "summarize", "summarization"), "summarization"),
    **dict.fromkeys(("items", "conversation_items"), "conversation_items"),
}
PRIORITY_NAMES = {**CLASS_PRIORITIES, "normal": CLASS_PRIORITIES["medium"]}

_UNITS = {"": 1, "K": 10, "M": 20, "G": 30, "T": 40}
_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,6})?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)
LEAST_BYTES = 2**20


def _task(value: Any) -> Any:
    known = TASK_NAMES.get(re.sub(r"[^a-z0-9]+", "_", value.lower())) if isinstance(value, str) else None
    if known is None:
        raise ValueError(f"one of {', '.join(TASK_NAMES)}")
    return known


def _priority(value: Any) -> Any:
    if not isinstance(value, str):
        return value
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


def _time_ms(value: Any) -> int:
    """Milliseconds since the epoch of an RFC 3339 time (UTC if it names no offset), or of a number: s, ms, µs or ns."""
    problem = ValueError("an RFC 3339 time, or seconds or milliseconds since the epoch")
    try:
        if isinstance(value, str) and not value.replace(".", "", 1).isdecimal():
            at = datetime.fromisoformat(value if re.search(r"(Z|[+-]\d\d:?\d\d)$", value) else f"{value}+00:00")
            milliseconds = at.timestamp() * 1000
        elif isinstance(value, bool):
            raise problem
        else:
            milliseconds = float(value) * 1000  # seconds, unless they would lie beyond the year 5138
            while 1e14 <= milliseconds < math.inf:
                milliseconds /= 1000
        if not 0 < milliseconds < 1e14:
            raise problem
        return int(milliseconds)
    except (ValueError, TypeError, OverflowError):
        raise problem from None


def _label(value: Any) -> str:
    text = str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value
    if not isinstance(text, str) or not 0 < len(text) <= LABEL_CHARS:
        raise ValueError(f"text of 1 to {LABEL_CHARS} characters")
    return text


class Alias(NamedTuple):
    """A name, the field that it stands for, and how its value is read. `read` raises ValueError: what it must be."""

    name: str
    field: str
    read: Callable[[Any], Any] = lambda value: value


NAMES: tuple[Alias, ...] = (
    Alias("requestId", "request_id"),
    Alias("task_id", "request_id"),
    Alias("type", "task", _task),
    Alias("modelProfile.modelName", "model"),
    Alias("payload.model", "model"),
    Alias("modelProfile.requirements.vram", "requirements.vram_bytes", _size),
    Alias("modelProfile.requirements.cpuMemory", "requirements.cpu_memory_bytes", _size),
    Alias("priority", "priority", _priority),
    Alias("userId", "user_id"),
    Alias("sessionId", "session_id"),
    Alias("conversationId", "conversation_id"),
    Alias("payload.conversation_id", "conversation_id"),
    Alias("streamResponse", "stream"),
    Alias("callbackUrl", "callback_url"),
    Alias("callbackStatuses", "callback_statuses"),
    Alias("timestamp", "created_at", _time_ms),
    Alias("submitted_at", "created_at", _time_ms),
    Alias("correlation_id", "metadata.correlation_id", _label),
    Alias("correlationId", "metadata.correlation_id", _label),
    Alias("version", "metadata.version", _label),
    Alias("prompt", "payload.prompt"),
    Alias("messages", "payload.messages"),
    Alias("input", "payload.input"),
    Alias("text", "payload.text"),
    Alias("payload.steps", "payload.inference_steps"),
)
_PATHS: tuple[tuple[Path, Path, Alias], ...] = tuple(
    (tuple(alias.name.split(".")), tuple(alias.field.split(".")), alias) for alias in NAMES
)
_TOP = frozenset(path[0] for path, _, _ in _PATHS if len(path) == 1) | {"modelProfile"}
_IN_PAYLOAD = frozenset(path[1] for path, _, _ in _PATHS if path[0] == "payload")


def translate(body: Mapping[str, Any], topic_kind: str | None = None) -> tuple[Json, dict[str, str]]:
    """The body under our names, and by field the name that it was given. The body itself stays as it is.

    `topic_kind` is that of the topic: text, image or embedding. With it the task may be missing where other names of
    the table are used. Raises InvalidRequest for two names of one field, and for a value that cannot be read.
    """
    if not _may_have_aliases(body):
        return dict(body), {}
    own, given = _copied(body), dict[str, str]()
    # A summary names the conversation that it reads in its payload.
    task = own.get("task") or _task_or_none(own.get("type"))
    for path, target, alias in _PATHS:
        if alias.name == "payload.conversation_id" and task == "summarization":
            continue
        value = _taken(own, path)
        if value is None:
            continue
        first = given.get(alias.field) or (alias.field if _value(own, target) is not None else None)
        if first is not None:
            raise InvalidRequest(f"{first} and {alias.name} name the same field: give one of them", param=alias.name)
        try:
            read = alias.read(value)
        except ValueError as error:
            raise InvalidRequest(f"{alias.name} must be {error}", param=alias.name) from None
        _put(own, target, read, alias.name)
        if alias.name != alias.field:
            given[alias.field] = alias.name
    if given and own.get("task") is None and (found := _task_of(own, topic_kind)) is not None:
        own["task"] = found
    return own, given


def identity(body: Mapping[str, Any]) -> tuple[Any, Any, Labels]:
    """(request_id, callback_url, labels) of a body that is no valid request, as far as they can be read."""
    found = _copied(body)
    for path, target, alias in _PATHS:
        if len(path) == 1 and alias.name != alias.field and _value(found, target) is None:
            with suppress(InvalidRequest):
                _put(found, target, found.get(alias.name), alias.name)
    user_id, session_id = label(found.get("user_id")), label(found.get("session_id"))
    labels = Labels(user_id, session_id, label(_value(found, ("metadata", CORRELATION_ID))))
    return found.get("request_id"), found.get("callback_url"), labels


def named(error: PenstockError, given: Mapping[str, str]) -> PenstockError:
    """The same error, of the name that the caller used for the field."""
    param = error.param
    field = next(
        (field for field in given if param == field or (param or "").startswith((f"{field}.", f"{field}["))), None
    )
    if param is None or field is None:
        return error
    shown = given[field] + param[len(field) :]
    message = error.message.replace(param, shown, 1)
    return type(error)(message, param=shown, details=error.details, retry_after_s=error.retry_after_s)


def _may_have_aliases(body: Mapping[str, Any]) -> bool:
    if not _TOP.isdisjoint(body):
        return True
    payload = body.get("payload")
    return isinstance(payload, dict) and not _IN_PAYLOAD.isdisjoint(cast("Json", payload))


def _copied(body: Mapping[str, Any]) -> Json:
    """A copy of the objects that lie on the paths of the table; lists and texts are shared."""
    copy = dict(body)
    for name in ("payload", "metadata", "requirements", "modelProfile"):
        if isinstance(copy.get(name), dict):
            copy[name] = dict(copy[name])
    profile = copy.get("modelProfile")
    if isinstance(profile, dict) and isinstance(cast("Json", profile).get("requirements"), dict):
        profile["requirements"] = dict(cast("Json", profile)["requirements"])
    return copy


def _value(body: Json, path: Path) -> Any:
    found: Any = body
    for part in path:
        if not isinstance(found, dict):
            return None
        found = cast("Json", found).get(part)
    return found


def _taken(body: Json, path: Path) -> Any:
    """The value, which is removed with the objects that are empty without it."""
    holders: list[Json] = [body]
    for part in path[:-1]:
        inner: Any = holders[-1].get(part)
        if not isinstance(inner, dict):
            return None
        holders.append(cast("Json", inner))
    value = holders[-1].pop(path[-1], None)
    for depth in range(len(holders) - 1, 0, -1):
        if not holders[depth] and path[0] != "payload":
            del holders[depth - 1][path[depth - 1]]
    return value


def _put(body: Json, path: Path, value: Any, name: str) -> None:
    holder = body
    for part in path[:-1]:
        inner: Any = holder.get(part)
        if inner is None:
            inner = holder[part] = {}
        if not isinstance(inner, dict):
            raise InvalidRequest(f"{part} must be an object, for {name} belongs there", param=part)
        holder = cast("Json", inner)
    holder[path[-1]] = value


def _task_or_none(value: Any) -> str | None:
    try:
        return _task(value)
    except ValueError:
        return None


def _task_of(body: Json, topic_kind: str | None) -> str | None:
    """What a body without a task asks for on this topic; None if it could be several things."""
    payload: Any = body.get("payload")
    has = cast("Json", payload).keys() if isinstance(payload, dict) else frozenset[str]()
    if topic_kind is None:  # a queue of a bridge holds requests of every task
        return "text_generation" if "messages" in has else "embedding" if "input" in has else None
    if topic_kind == "embedding":
        return "embedding"
    if topic_kind == "text":
        return "summarization" if "text" in has else "text_generation"
    return "image_generation" if topic_kind == "image" and "image" not in has else None
