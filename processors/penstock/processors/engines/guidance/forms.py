"""Which form an answer must have, as a grammar in llguidance's Lark: for `response_format` and for forced calls. Pure.

Between the parts of JSON stands what Python's `json.dumps` writes, and no more: small models fall into endless white
space where any is allowed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from penstock.schemas.errors import InvalidRequest, TooLarge
from penstock.schemas.finite_json import loads_finite, shown_name

Json = dict[str, Any]

MAX_SCHEMA_BYTES = 64 * 1024
MAX_DEPTH = 64
"""Levels of lists and objects in a schema: what reads them recurs, and a deep one would overflow its stack."""
_BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Keywords whose value has schemas by name."""
_VALUES = frozenset({"enum", "const", "default", "examples"})
_NAMES = re.compile(r"\^(?:([\w -]+)|\((?:\?:)?([\w -]+(?:\|[\w -]+)*)\))\$")
"""Patterns that are names: `^a$`, `^(a|b)$`."""
_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "lenient": False}


@dataclass(frozen=True, slots=True)
class SchemaPart:
    """A schema of a request, and the field that it is in."""

    schema: Json
    param: str
    strict: bool

    def rule(self, passed_over: Container[str] = ()) -> str:
        """Raises as `json_rule`."""
        return json_rule(self.schema, self.param, strict=self.strict, passed_over=passed_over)


def response_schema(response_format: Mapping[str, Any] | None) -> SchemaPart | None:
    """What `response_format` asks for; None when any text will do. Raises InvalidRequest."""
    kind = (response_format or {}).get("type", "text")
    if response_format is None or kind == "text":
        return None
    if kind == "json_object":
        return SchemaPart({"type": "object"}, "payload.response_format", strict=True)
    param = "payload.response_format.json_schema"
    given = _object(response_format.get("json_schema"), param)
    schema = given.get("schema")
    if schema is None:
        schema = {"type": "object"}
    if not isinstance(schema, dict):
        raise InvalidRequest(f"{param}.schema must be an object", param=f"{param}.schema")
    return SchemaPart(cast("Json", schema), f"{param}.schema", strict=given.get("strict") is not False)


def json_rule(schema: Json, param: str, *, strict: bool = True, passed_over: Container[str] = ()) -> str:
    """The Lark expression of JSON that fits a schema.

    Not `strict`: keywords that cannot be enforced are passed over, and patterns that are among `passed_over`.
    Raises InvalidRequest, TooLarge.
    """
    check_depth(schema, param)
    schema = _enforceable(schema, () if strict else passed_over)
    options = {**_OPTIONS, "lenient": not strict, "coerce_one_of": not strict}
    text = json.dumps({**schema, "x-guidance": options}, ensure_ascii=False)
    if len(text.encode(errors="surrogatepass")) > MAX_SCHEMA_BYTES:
        raise TooLarge(f"{param} has more than {MAX_SCHEMA_BYTES} bytes", param=param)
    return f"%json {text}"


def patterns_of(schema: Any, place: str) -> Iterator[tuple[str, str]]:
    """(place, pattern) of all regular expressions in a schema."""
    if isinstance(schema, dict) and isinstance(pattern := cast("Json", schema).get("pattern"), str):
        yield f"{place}.pattern", pattern
    for name, inner, is_pattern in _subschemas(schema):
        below = f"{place}{name}"
        if is_pattern is not None:
            yield below, is_pattern
        yield from patterns_of(inner, below)


def _subschemas(schema: Any) -> Iterator[tuple[str, Any, str | None]]:
    """(place, subschema, the pattern that stands for its name)"""
    if isinstance(schema, list):
        yield from ((f"[{n}]", inner, None) for n, inner in enumerate(cast("list[Any]", schema)))
    for name, inner in cast("Json", schema).items() if isinstance(schema, dict) else ():
        if name in _BY_NAME and isinstance(inner, dict):
            for key, one in cast("Json", inner).items():
                yield f".{name}.{shown_name(key)}", one, key if name == "patternProperties" else None
        elif name not in _VALUES:
            yield f".{shown_name(name)}", inner, None


def _enforceable(schema: Any, passed_over: Container[str]) -> Any:
    """The schema without these patterns, and patterns that are names as the properties that they are.

    llguidance offers a further property where only such a pattern could name it, and there is none.
    """
    if isinstance(schema, list):
        return [_enforceable(inner, passed_over) for inner in cast("list[Any]", schema)]
    if not isinstance(schema, dict):
        return schema
    made: Json = {}
    any_name = False
    for name, inner in cast("Json", schema).items():
        if name == "pattern" and isinstance(inner, str) and inner in passed_over:
            continue
        if name in _BY_NAME and isinstance(inner, dict):
            named = cast("Json", inner)
            kept = [key for key in named if name != "patternProperties" or key not in passed_over]
            made[name] = {key: _enforceable(named[key], passed_over) for key in kept}
            any_name = any_name or len(kept) < len(named)
        else:
            made[name] = inner if name in _VALUES else _enforceable(inner, passed_over)
    if any_name:  # which properties are additional is not known without the pattern
        made.pop("additionalProperties", None)
    return _with_names(made)


def _with_names(made: Json) -> Json:
    patterns, known = made.get("patternProperties"), made.get("properties", {})
    if not isinstance(patterns, dict) or not isinstance(known, dict):
        return made  # whatever is wrong, llguidance refuses it
    named = cast("Json", patterns)
    for pattern in list(named):
        if (names := _NAMES.fullmatch(pattern)) is None:
            continue
        inner, made["properties"] = named.pop(pattern), known
        for key in (names[1] or names[2]).split("|"):
            known[key] = {"allOf": [known[key], inner]} if key in known else inner
    return {name: value for name, value in made.items() if name != "patternProperties" or value}


def check_depth(value: Any, param: str) -> None:
    """Raises InvalidRequest for a value of too many levels. Not by recursion."""
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for one in level
            if isinstance(one, dict | list)
            for inner in (one.values() if isinstance(one, dict) else one)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
        ]
        if not level:
            return
    raise InvalidRequest(f"{param} has more than {MAX_DEPTH} levels", param=param, details={"max_depth": MAX_DEPTH})


def _object(value: Any, param: str) -> Json:
    """An object, or its JSON text, as the records carry it."""
    try:
        found: Any = loads_finite(value) if isinstance(value, str) else value
    except ValueError as error:
        raise InvalidRequest(f"{param} is no JSON that can be read", param=param) from error
    if not isinstance(found, dict):
        raise InvalidRequest(f"{param} must be an object", param=param)
    return found  # pyright: ignore[reportUnknownVariableType]
