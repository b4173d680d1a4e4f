"""Nested JSON schemas for tests of guided answers: any number of different ones, the same each time."""

from __future__ import annotations

from random import Random
from typing import Any

Schema = dict[str, Any]

_NAMES = ("name", "age", "city", "tags", "size", "owner", "notes", "state", "parts", "price")


def nested_schemas(count: int) -> list[Schema]:
    """Objects of two to four levels with every kind of value; all lists and texts are bounded."""
    return [{**_object(Random(number), 2 + number % 3), "title": f"schema {number}"} for number in range(count)]


def _object(random: Random, levels: int) -> Schema:
    names = random.sample(_NAMES, random.randint(2, 4))
    # The first goes down, so that each schema is as deep as it is said to be.
    properties = {name: _value(random, levels - 1, deep=place == 0 and levels > 1) for place, name in enumerate(names)}
    required = names if random.random() < 0.7 else names[:2]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _value(random: Random, levels: int, *, deep: bool) -> Schema:
    if deep:
        inner = _object(random, levels)
        return inner if random.random() < 0.5 else {"type": "array", "items": inner, "minItems": 1, "maxItems": 2}
    kinds: list[Schema] = [
        {"type": "string", "maxLength": random.randint(4, 16)},
        {"type": "integer", "minimum": -5, "maximum": random.randint(10, 5000)},
        {"type": "number", "minimum": 0, "maximum": 100, "multipleOf": 0.5},
        {"type": "boolean"},
        {"enum": random.sample(["red", "green", "blue", 1, None, True], 3)},
        {"const": random.choice(["fixed", 7])},
        {"type": ["integer", "null"], "minimum": 0, "maximum": 9},
        {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
        {"anyOf": [{"type": "string", "pattern": "^[A-Z]{2}-[0-9]{2,4}$"}, {"type": "boolean"}]},
        {"type": "string", "format": "date"},
    ]
    return random.choice(kinds)
