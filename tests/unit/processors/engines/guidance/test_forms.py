"""Grammars of answers: what is asked for becomes a rule, and what cannot be one is refused before anything compiles."""

import json
from typing import Any

import pytest

from penstock.processors.engines.guidance.forms import MAX_DEPTH, response_schema
from penstock.schemas.errors import InvalidRequest, TooLarge

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}


def form(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": json.dumps({"name": "s", "schema": schema, **more})}


def rule_of(response_format: dict[str, Any] | None) -> str | None:
    asked = response_schema(response_format)
    return None if asked is None else asked.rule()


def options(rule: str | None) -> dict[str, Any]:
    return json.loads(rule.removeprefix("%json "))["x-guidance"]


def test_any_text_needs_no_rule() -> None:
    assert rule_of(None) is None
    assert rule_of({"type": "text"}) is None


def test_json_has_no_free_white_space_and_callers_cannot_change_that() -> None:
    told = options(rule_of(form({**SCHEMA, "x-guidance": {"lenient": True, "whitespace_flexible": True}})))
    assert told == {
        "whitespace_flexible": False,
        "item_separator": ", ",
        "key_separator": ": ",
        "lenient": False,
        "coerce_one_of": False,
    }
    assert options(rule_of({"type": "json_object"}))["lenient"] is False


def test_only_what_is_said_not_to_be_strict_is_lenient() -> None:
    assert options(rule_of(form(SCHEMA, strict=True)))["lenient"] is False
    assert options(rule_of(form(SCHEMA, strict=False)))["lenient"] is True


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("response_format", "kind", "param"),
    [
        ({"type": "json_schema", "json_schema": "{"}, InvalidRequest, "payload.response_format.json_schema"),
        ({"type": "json_schema", "json_schema": "[]"}, InvalidRequest, "payload.response_format.json_schema"),
        (form([1]), InvalidRequest, "payload.response_format.json_schema.schema"),
        (form(nested(MAX_DEPTH)), InvalidRequest, "payload.response_format.json_schema.schema"),
        (form({"enum": ["x" * 70_000]}), TooLarge, "payload.response_format.json_schema.schema"),
        ({"type": "json_schema", "json_schema": "[" * 5000}, InvalidRequest, "payload.response_format.json_schema"),
    ],
)
def test_what_cannot_be_a_rule(response_format: dict[str, Any], kind: type[Exception], param: str) -> None:
    with pytest.raises(kind) as caught:
        rule_of(response_format)
    assert getattr(caught.value, "param", None) == param
