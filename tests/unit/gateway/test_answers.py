"""The documented answers name all that the records hold: generated clients know no more."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

import pytest

from penstock.gateway.routes.answers import MadeImage, Result

EVENT = json.loads((files("penstock.schemas") / "avro" / "ResultEvent.avsc").read_text())
OUTPUTS = ("text_generation", "embedding", "image_generation", "conversation_items")
"""The fields of a ResultEvent that hold outputs. Other tasks use one of them."""


def record_in(schema: Any) -> dict[str, Any]:
    """The record in a field's type: of a union, or of an array."""
    inner = next(one for one in schema if one != "null") if isinstance(schema, list) else schema
    return inner if inner["type"] == "record" else record_in(inner["items"])


def names(record: dict[str, Any]) -> set[str]:
    return {field["name"] for field in record["fields"]}


@pytest.mark.parametrize("output", OUTPUTS)
def test_a_result_has_each_field_of_an_output(output: str) -> None:
    (schema,) = (field["type"] for field in EVENT["fields"] if field["name"] == output)
    assert names(record_in(schema)) <= Result.model_fields.keys()


def test_an_image_has_each_field_of_its_record() -> None:
    (schema,) = (field["type"] for field in EVENT["fields"] if field["name"] == "image_generation")
    (images,) = record_in(schema)["fields"]
    assert names(record_in(images["type"])) == MadeImage.model_fields.keys()
