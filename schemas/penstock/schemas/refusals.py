"""Bodies held to their types. What pydantic finds wrong is one of our errors: the field at fault in `param`, and what
it must be.

The import of pydantic takes a fifth of a second: nothing imports this module before the first body comes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import islice
from typing import Any, cast

from pydantic import ValidationError

from penstock.schemas.bodies import RequestFields, adapter, json_schema, request_type
from penstock.schemas.errors import InvalidRequest, PenstockError, UnsupportedParameter
from penstock.schemas.finite_json import below, shown_name
from penstock.schemas.payloads import lone_surrogate
from penstock.schemas.tasks import BUILT_TASKS

Loc = tuple[str | int, ...]
Schema = Mapping[str, Any]

MANY_NAMES = 100
"""How many unknown names of one object are looked at: telling each apart takes microseconds and kilobytes."""
DEPTH = 8
"""No type of a body lies deeper."""
BOUNDS = {"minimum": "at least", "maximum": "at most"}


FIELDS = tuple(RequestFields.__annotations__)
"""What a request may have beside its task and payload."""


def validated_request(task: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a request of a task that is built, as its type has them. Raises as `parse_request`."""
    kind = request_type(task)
    try:
        return adapter(kind).validate_python(fields)
    except ValidationError as error:
        problem = error
    if problem.error_count() > MANY_NAMES:
        # Lists stop at their first error, but each name that no body has is an error of its own.
        try:
            adapter(kind).validate_python(_with_few_names(fields, _names(kind), DEPTH))
        except ValidationError as error:
            problem = error
    raise refusal(problem, kind)


def prepare() -> None:
    """Make the validators and the schemas of their refusals."""
    for task in BUILT_TASKS:
        kind = request_type(task)
        adapter(kind)
        json_schema(kind)


def refusal(error: ValidationError, kind: Any, path: str = "") -> PenstockError:
    """The error for the first thing that is wrong. `kind` is the type that was validated, `path` where it stands."""
    problems = cast("Sequence[Mapping[str, Any]]", error.errors(include_url=False, include_context=False))
    problem = _deepest(problems)
    loc: Loc = tuple(problem["loc"])
    root = json_schema(kind)
    if problem["type"] == "extra_forbidden":
        param = below(_place(root, loc[:-1], path)[0], shown_name(str(loc[-1])))
        return UnsupportedParameter(f"{param} is not supported", param=param)
    param, schemas = _place(root, loc, path)
    if problem["type"] == "string_unicode":
        if not any(schema.get("type") == "object" for schema in schemas):
            return lone_surrogate(param)
        param = below(param, shown_name(str(problem["input"])))  # a name that no body has
        return UnsupportedParameter(f"{param} is not supported", param=param)
    wanted = " or ".join(dict.fromkeys(filter(None, map(described, schemas)))) or "of another form"
    if problem["type"] == "missing":
        return InvalidRequest(f"{param} is missing: it must be {wanted}", param=param)
    return InvalidRequest(
        f"{param or 'the body'} must {wanted if wanted[:6] == 'match ' else 'be ' + wanted}", param=param
    )


def _with_few_names(value: Any, known: frozenset[str], depth: int) -> Any:
    """The same, but of an object's names that no body has only the first ones: they are refused as all would be."""
    if depth and isinstance(value, dict):
        given = cast("dict[str, Any]", value)
        few = islice((name for name in given if name not in known), MANY_NAMES)
        names = [*(given.keys() & known), *few]
        return {name: _with_few_names(given[name], known, depth - 1) for name in names}
    if depth and isinstance(value, list):
        return [_with_few_names(item, known, depth - 1) for item in cast("list[Any]", value)]
    return value


@cache
def _names(kind: Any) -> frozenset[str]:
    """The names of all fields in a body of this type."""
    root = json_schema(kind)
    return frozenset(name for schema in (root, *root["$defs"].values()) for name in schema.get("properties", ()))


def _deepest(problems: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The first problem. Of a field with several forms, that of the form which fits best: its place is the longest."""
    first = problems[0]
    field = tuple(first["loc"][:-1])
    same = [problem for problem in problems if tuple(problem["loc"][: len(field)]) == field]
    if not field or first["loc"][-1] != "str":
        return first
    return max(same, key=lambda problem: len(problem["loc"]))


def _place(root: Schema, loc: Loc, path: str) -> tuple[str, list[Schema]]:
    """(the field as callers write it, the schemas of which it must fit one)."""
    here = [root]
    for part in loc:
        forms = list(_forms(root, here))
        if isinstance(part, int):
            here = [form["items"] for form in forms if "items" in form]
            path += f"[{part}]"
        elif inner := [form["properties"][part] for form in forms if part in form.get("properties", ())]:
            here = inner
            path = below(path, part)
        elif any(isinstance(form.get("additionalProperties"), dict) for form in forms):
            return path, [{"type": "object", "of": "texts"}]
        # else it is pydantic's name for one form of several
    return path, list(_forms(root, here))


def _forms(root: Schema, schemas: Sequence[Schema]) -> Iterator[Schema]:
    """Alternatives one by one, references followed, null left out."""
    for schema in schemas:
        if "$ref" in schema:
            yield from _forms(root, [root["$defs"][schema["$ref"].rpartition("/")[2]]])
        elif "anyOf" in schema:
            yield from _forms(root, schema["anyOf"])
        elif schema.get("type") != "null":
            yield schema


def described(schema: Schema) -> str:
    """What a value must be, in words; the reference has the same."""
    if "const" in schema:
        return str(schema["const"])
    if "enum" in schema:
        return "one of " + ", ".join(map(str, schema["enum"]))
    match schema.get("type"):
        case "integer":
            bounds = [f"{word} {schema[name]}" for name, word in BOUNDS.items() if name in schema]
            return " ".join(["an integer", *(["of", " and ".join(bounds)] if bounds else [])])
        case "number" if "exclusiveMinimum" in schema:
            return f"above {schema['exclusiveMinimum']:g} to {schema['maximum']:g}"
        case "number" if "minimum" in schema:
            return f"from {schema['minimum']:g} to {schema['maximum']:g}"
        case "string" if "pattern" in schema:
            return "match " + schema["pattern"].strip("^$")
        case "string" if "maxLength" in schema:
            return f"text of {schema.get('minLength', 0)} to {schema['maxLength']} characters"
        case "string":
            return "text"
        case "boolean":
            return "true or false"
        case "array" if "minItems" in schema:
            return f"a list of at least {schema['minItems']}"
        case "array":
            return "a list"
        case "object":
            return "an object of texts" if "of" in schema else "an object"
        case other:
            return str(other or "")
