"""The names within fields of OpenAI's bodies that are read, or have no effect wherever they stand; all others are
unknown, and `other_fields` decides about them as about those of the body.

Of messages of assistants and tools the names are judged, and not what stands within these (docs/decisions/0062).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, cast

from pydantic import BaseModel

from penstock.gateway.openai.history import ECHOED, KNOWN_IN_MESSAGES

Json = dict[str, Any]
Names = Mapping[str, Any]
"""The names of an object, each with the `Known` of what is below it, or with a list of values: it has no effect with
these, and is unknown with others."""
Known: TypeAlias = Names | Callable[[Json], Names | None] | None
"""Of an object, or of each object of a list. None: nothing there is judged. A function chooses by the object."""


class Unknown(NamedTuple):
    """A name that is not known, in the object that has it."""

    fields: Json
    name: str
    accepted: Sequence[Any]
    """The values with which it has no effect."""
    path: tuple[str | int, ...]
    """Of the object. The path of a name is made into text only where it is reported."""


_HISTORY = ("assistant", "tool", "function")
_MARKS = dict.fromkeys(ECHOED)
_TEXT = {"text": None, **_MARKS}
_PARTS: Mapping[Any, Names] = {
    "text": _TEXT,
    "input_text": _TEXT,
    "image_url": {"image_url": {"url": None, "detail": None}, **_MARKS},
    "input_image": {**dict.fromkeys(("image_url", "file_id", "detail")), **_MARKS},
}
_FUNCTION = {**dict.fromkeys(("name", "description", "parameters", "strict")), **_MARKS}
_SCHEMA = dict.fromkeys(("name", "description", "schema", "strict", "$schema"))
_NAMED = {"type": None, "name": None}


def _by_type(kinds: Mapping[Any, Names]) -> Callable[[Json], Names | None]:
    """Objects of other types are refused by their type."""

    def known(value: Json) -> Names | None:
        kind = value.get("type")
        return kinds.get(kind) if kind is None or isinstance(kind, str) else None

    return known


_JUDGED = {**dict.fromkeys(KNOWN_IN_MESSAGES), "content": _by_type(_PARTS)}
_READ = dict.fromkeys(KNOWN_IN_MESSAGES)


def _message(message: Json) -> Names:
    return _READ if message.get("role") in _HISTORY else _JUDGED


def item_names(item: Json) -> Names | None:
    """Calls, their answers and thoughts are history too."""
    return None if item.get("type") not in (None, "message") or item.get("role") == "assistant" else _JUDGED


_TOOL = {"function": _FUNCTION, **_MARKS}
IN_TEXT: Mapping[str, Known] = {
    "stream_options": {},
    "prompt_cache_options": {**dict.fromkeys(("comparison_response_id", "mode", "ttl")), "prewarm": (False,)},
}
IN_CHAT: Mapping[str, Known] = {
    **IN_TEXT,
    "messages": _message,
    "tools": _by_type({None: _TOOL, "function": _TOOL}),
    "tool_choice": _by_type({"function": {"type": None, "function": _FUNCTION}}),
    "response_format": {"type": None, "schema": None, "json_schema": _SCHEMA},
}
IN_RESPONSE: Mapping[str, Known] = {
    **IN_TEXT,
    "conversation": {"id": None},
    "input": item_names,
    "reasoning": {"context": ("auto",), "mode": ("standard",)},
    "text": {"format": {"type": None, **_SCHEMA}},
    "tool_choice": _by_type({"function": _NAMED}),
    "tools": _by_type(
        {"function": {**_FUNCTION, "async": (False,), "allowed_callers": (["direct"],), "defer_loading": (False,)}}
    ),
}


def unknown_in(value: Any, known: Known, path: tuple[str | int, ...]) -> Iterator[Unknown]:
    """What is not known in the value at `path`, one by one. Each may be taken out before the next is asked for."""
    if isinstance(value, list):
        for number, item in enumerate(cast("list[Any]", value)):
            if isinstance(item, dict):  # no field has lists in a list
                yield from unknown_in(item, known, (*path, number))
        return
    if isinstance(value, BaseModel):  # it has names of its own, and keeps the others apart
        fields, others = dict(value), value.model_extra or {}
    elif isinstance(value, dict):
        fields = others = cast("Json", value)
    else:
        return
    names = known(fields) if callable(known) else known
    if names is None:
        return
    for name in [name for name in others if isinstance(names.get(name, ()), Sequence)]:
        yield Unknown(others, name, names.get(name, ()), path)
    for name, below in names.items():
        if below is not None and not isinstance(below, Sequence) and name in fields:
            yield from unknown_in(fields[name], below, (*path, name))
