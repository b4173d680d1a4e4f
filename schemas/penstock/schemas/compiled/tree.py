"""An Avro schema as a tree: named types are in the places that refer to them, and what nobody reads is left out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, cast

PRIMITIVES = frozenset({"null", "boolean", "int", "long", "float", "double", "string", "bytes"})
_NAMED = frozenset({"record", "error", "enum", "fixed"})


class Unsupported(Exception):
    """The generated code does not do this. fastavro decodes it."""


class UnsafeSchema(ValueError):
    """Nobody should read by this schema: a few bytes could cost any time, memory or stack."""


def schema_tree(text: str) -> Any:
    """The tree of a schema: primitives as text, unions as lists, all else as dictionaries.

    Raises UnsafeSchema for a type within itself and for lists of items without bytes (a count of 2^62 would be
    believed), and ValueError, TypeError, KeyError, AttributeError or RecursionError for what is no schema.
    """
    return _tree(json.loads(text), "", {}, ())


def _tree(schema: Any, space: str, named: dict[str, Any], above: tuple[str, ...]) -> Any:
    if isinstance(schema, list):
        return [_tree(branch, space, named, above) for branch in cast("list[Any]", schema)]
    if isinstance(schema, str):
        return schema if schema in PRIMITIVES else _referred(schema, space, named, above)
    kind = schema["type"]
    if kind in _NAMED:
        return _definition(schema, kind, space, named, above)
    if kind == "array":
        return {"type": "array", "items": _with_bytes(_tree(schema["items"], space, named, above))}
    if kind == "map":
        return {"type": "map", "values": _tree(schema["values"], space, named, above)}
    return _tree(kind, space, named, above)


def _referred(name: str, space: str, named: Mapping[str, Any], above: tuple[str, ...]) -> Any:
    full = name if "." in name or not space else f"{space}.{name}"
    full = full if full in named else name
    if full in above:
        raise UnsafeSchema(f"{name} holds itself")
    return named[full]


def _definition(
    schema: Mapping[str, Any], kind: str, space: str, named: dict[str, Any], above: tuple[str, ...]
) -> dict[str, Any]:
    name = str(schema["name"])
    space = name.rpartition(".")[0] or str(schema.get("namespace", space))
    full = name if "." in name or not space else f"{space}.{name}"
    node: dict[str, Any] = {"type": "record" if kind == "error" else kind, "name": full.rpartition(".")[2]}
    named[full] = node
    if kind == "fixed":
        node["size"] = int(schema["size"])
        if node["size"] < 0:
            raise UnsafeSchema("a negative size")
    elif kind == "enum":
        node["symbols"] = [str(symbol) for symbol in schema["symbols"]]
        node["default"] = schema.get("default")
    else:
        inside = (*above, full)
        fields = cast("list[dict[str, Any]]", schema["fields"])
        node["fields"] = [{**field, "type": _tree(field["type"], space, named, inside)} for field in fields]
        node["least"] = sum(least_bytes(field["type"]) for field in node["fields"])
    return node


def _with_bytes(schema: Any) -> Any:
    if least_bytes(schema) == 0:
        raise UnsafeSchema("a list of items without bytes")
    return schema


def least_bytes(schema: Any) -> int:
    """The fewest bytes that a value can have."""
    if isinstance(schema, list):
        return 1
    if isinstance(schema, str):
        return {"null": 0, "float": 4, "double": 8}.get(schema, 1)
    if schema["type"] == "record":
        return schema["least"]
    return schema["size"] if schema["type"] == "fixed" else 1


def optional(schema: Any) -> tuple[Any, int] | None:
    """(the other type, the number of its branch) of a union of null and one more, else None."""
    if not isinstance(schema, list) or len(cast("list[Any]", schema)) != 2 or "null" not in schema:
        return None
    branches = cast("list[Any]", schema)
    at = 1 if branches[0] == "null" else 0
    return None if branches[at] == "null" else (branches[at], at)
