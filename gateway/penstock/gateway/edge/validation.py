"""What pydantic refuses, in our words: the field as the caller wrote it, and what it must be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, cast, get_args

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from pydantic_core.core_schema import ErrorType

from penstock.schemas.errors import InvalidRequest, UnsupportedParameter

M = TypeVar("M", bound=BaseModel)
Problem = Mapping[str, Any]
Path = tuple[str | int, ...]

NO_OBJECT = "the body is not a valid JSON object (is content-type: application/json set?)"
_BESIDE_BODIES = frozenset({"query", "path", "header"})
_WANTED = {
    "none_required": "null",
    **dict.fromkeys(("string_type", "string_sub_type"), "text"),
    "string_unicode": "text that UTF-8 can hold",
    **dict.fromkeys(("int_type", "int_parsing", "int_parsing_size", "int_from_float"), "a whole number"),
    **dict.fromkeys(("float_type", "float_parsing", "finite_number", "decimal_parsing"), "a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "true or false"),
    **dict.fromkeys(("list_type", "tuple_type", "set_type", "iterable_type"), "a list"),
    **dict.fromkeys(("dict_type", "mapping_type", "model_type", "model_attributes_type"), "an object"),
    "greater_than_equal": "at least {ge}",
    "greater_than": "more than {gt}",
    "less_than_equal": "at most {le}",
    "less_than": "less than {lt}",
    "multiple_of": "a multiple of {multiple_of}",
    "string_too_short": "text of at least {min_length} characters",
    "string_too_long": "text of at most {max_length} characters",
    "string_pattern_mismatch": "text that matches {pattern}",
}
"""By type of pydantic's error; the names in braces are those of its facts."""
_OF_PYDANTIC = frozenset[str](get_args(ErrorType))
"""Errors of other types are ours, and so are their messages."""


def invalid_from_validation(error: RequestValidationError | ValidationError, value: Any = None) -> InvalidRequest:
    """The first thing that is wrong, named by its field; the rejected input itself is never repeated.

    `value`: what was validated, where the error does not hold it. Pydantic names the forms of a union beside the fields
    on the way: only what the value has is shown.
    """
    if isinstance(error, RequestValidationError):
        value = error.body
    problems = [(_path(one, value), one) for one in cast("Sequence[Problem]", error.errors())]
    if not problems:
        return InvalidRequest("the request is not valid")
    # Of a field with several forms that one counts whose problem lies deepest: it fits best.
    field = problems[0][0][:1]
    same = [(path, one) for path, one in problems if path[:1] == field]
    path = max((path for path, _ in same), key=len)
    here = [one for at, one in same if at == path]
    param, first = _text_of(path), here[0]
    if first["type"] == "extra_forbidden":
        return UnsupportedParameter(f"{param} is not supported", param=param)
    if not path:
        return InvalidRequest(NO_OBJECT)
    if first["type"] == "missing":
        return InvalidRequest(f"{param} is missing", param=param)
    if first["type"] == "value_error" or first["type"] not in _OF_PYDANTIC:
        return InvalidRequest(f"{param}: {str(first['msg']).removeprefix('Value error, ')}", param=param)
    return InvalidRequest(f"{param} must be {' or '.join(dict.fromkeys(map(_wanted, here)))}", param=param)


def validated(kind: type[M], value: Any) -> M:
    """The value as this model. Raises InvalidRequest."""
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise invalid_from_validation(error, value) from None


def _wanted(problem: Problem) -> str:
    kind, facts = problem["type"], cast("Mapping[str, Any]", problem.get("ctx") or {})
    if kind in ("literal_error", "enum"):
        return str(facts["expected"]).replace("'", "")
    if kind in ("too_long", "too_short"):
        what = "list" if facts["field_type"] == "List" else "object"
        bound = f"at most {facts['max_length']}" if kind == "too_long" else f"at least {facts['min_length']}"
        return f"{'a' if what == 'list' else 'an'} {what} with {bound} entries"
    return _WANTED.get(kind, "of another form").format_map(facts)


def _path(problem: Problem, value: Any) -> Path:
    """Where it stands in what the caller sent."""
    parts: tuple[str | int, ...] = tuple(problem.get("loc", ()))
    if parts[:1] and parts[0] in _BESIDE_BODIES:
        return parts[1:2]
    if parts[:1] == ("body",) and not (isinstance(value, dict) and "body" in value):
        parts = parts[1:]
    found: list[str | int] = []
    for number, part in enumerate(parts):
        if isinstance(value, dict) and part in value:
            value = cast("dict[Any, Any]", value)[part]
        elif isinstance(value, list) and isinstance(part, int) and part < len(cast("list[Any]", value)):
            value = cast("list[Any]", value)[part]
        elif problem["type"] != "missing" or number < len(parts) - 1:
            continue  # a form of a union
        found.append(part)
    return tuple(found)


def _text_of(parts: Path) -> str:
    text = ""
    for part in parts:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text
