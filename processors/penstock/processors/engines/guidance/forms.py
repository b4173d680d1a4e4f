"""Which form an answer must have, as a grammar in llguidance's Lark: for `response_format` and for forced calls. Pure.

Between the parts of JSON stands what Python's `json.dumps` writes, and no more: small models fall into endless white
space where any is allowed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from penstock.schemas.errors import InvalidRequest, TooLarge
from penstock.schemas.finite_json import loads_finite

Json = dict[str, Any]

MAX_SCHEMA_BYTES = 64 * 1024
MAX_DEPTH = 64
"""Levels of lists and objects in a schema: what reads them recurs, and a deep one would overflow its stack."""
_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "lenient": False}


def response_rule(response_format: Mapping[str, Any] | None) -> str | None:
    """The Lark expression of what `response_format` asks for; None when any text will do.

    Raises InvalidRequest, TooLarge.
    """
    kind = (response_format or {}).get("type", "text")
    if response_format is None or kind == "text":
        return None
    if kind == "json_object":
        return json_rule({"type": "object"}, "payload.response_format")
    param = "payload.response_format.json_schema"
    given = _object(response_format.get("json_schema"), param)
    schema = given.get("schema")
    if schema is None:
        schema = {"type": "object"}
    if not isinstance(schema, dict):
        raise InvalidRequest(f"{param}.schema must be an object", param=f"{param}.schema")
    return json_rule(schema, f"{param}.schema", strict=given.get("strict") is not False)  # pyright: ignore[reportUnknownArgumentType]


def json_rule(schema: Json, param: str, *, strict: bool = True) -> str:
    """The Lark expression of JSON that fits a schema. Not `strict`: keywords that cannot be enforced are passed over.

    Raises InvalidRequest, TooLarge.
    """
    check_depth(schema, param)
    options = {**_OPTIONS, "lenient": not strict, "coerce_one_of": not strict}
    text = json.dumps({**schema, "x-guidance": options}, ensure_ascii=False)
    if len(text.encode(errors="surrogatepass")) > MAX_SCHEMA_BYTES:
        raise TooLarge(f"{param} has more than {MAX_SCHEMA_BYTES} bytes", param=param)
    return f"%json {text}"


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
