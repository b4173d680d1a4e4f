"""Hypothesis strategies for whatever fits an Avro schema."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

from penstock.schemas.codec import schema_text
from penstock.schemas.records import Record

PLAIN: dict[str, st.SearchStrategy[Any]] = {
    "null": st.none(),
    "boolean": st.booleans(),
    "int": st.integers(-(2**31), 2**31 - 1),
    "long": st.integers(-(2**63), 2**63 - 1) | st.integers(1_600_000_000_000, 1_900_000_000_000),
    "float": st.floats(width=32, allow_nan=False),
    "double": st.floats(allow_nan=False),
    "string": st.text(max_size=12) | st.integers(500, 1_100).map(lambda size: "a" * size),
    "bytes": st.binary(max_size=12),
}


def values_of(schema: Any, named: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Whatever fits an Avro schema."""
    if isinstance(schema, list):
        return st.one_of([values_of(branch, named) for branch in schema])
    if isinstance(schema, str):
        if schema in PLAIN:
            return PLAIN[schema]
        definition = named[schema.rsplit(".", 1)[-1]]
        return st.deferred(lambda: values_of(definition, named))
    kind = schema["type"]
    if kind in ("record", "enum", "fixed"):
        named[schema["name"].rsplit(".", 1)[-1]] = schema
    if kind == "record":
        return st.fixed_dictionaries({f["name"]: values_of(f["type"], named) for f in schema["fields"]})
    if kind == "enum":
        return st.sampled_from(schema["symbols"])
    if kind == "fixed":
        return st.binary(min_size=schema["size"], max_size=schema["size"])
    if kind == "array":
        return st.lists(values_of(schema["items"], named), max_size=2)
    if kind == "map":
        return st.dictionaries(st.text(max_size=4), values_of(schema["values"], named), max_size=2)
    return values_of(kind, named)


def records_of(kind: type[Record]) -> st.SearchStrategy[Record]:
    """Whatever a record can hold."""
    return values_of(json.loads(schema_text(kind.__name__)), {}).map(kind.from_dict)
