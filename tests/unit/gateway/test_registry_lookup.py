"""Looking a schema up by its text: what counts as the same, and that the work is bounded."""

from __future__ import annotations

import json
import sys
from types import FrameType
from typing import Any

import pytest

from kit.refusals import refused
from penstock.gateway.routes import registry
from penstock.gateway.routes.registry import RegistryError, Released, SchemaBody, look_up, register, releases

ALL = [released for versions in releases().values() for released in versions]
SUBJECT = "penstock.v1.ResultEvent"
each_release = pytest.mark.parametrize("released", ALL, ids=lambda released: f"{released.subject}-{released.version}")


def lookup_of(subject: str, text: str) -> dict[str, Any]:
    return look_up(subject, SchemaBody(schema=text))


def as_java_sends(schema: Any) -> Any:
    """Types wrapped in objects, strings marked as Java's, docs left out."""
    if isinstance(schema, dict):
        kept: dict[str, Any] = schema
        return {key: value if key == "default" else as_java_sends(value) for key, value in kept.items() if key != "doc"}
    if isinstance(schema, list):
        items: list[Any] = schema
        return [as_java_sends(item) for item in items]
    return {"type": "string", "avro.java.string": "String"} if schema == "string" else schema


@each_release
def test_each_release_is_found_as_it_is_and_as_clients_write_it(released: Released) -> None:
    schema = json.loads(released.text)
    full = {**schema, "name": f"{schema['namespace']}.{schema['name']}"}
    del full["namespace"]
    for sent in (schema, full, as_java_sends(schema), {"type": schema}):
        assert lookup_of(released.subject, json.dumps(sent, indent=4))["version"] == released.version


@each_release
def test_what_differs_is_another(released: Released) -> None:
    schema = json.loads(released.text)
    fields = schema["fields"]
    others: list[Any] = [
        {**schema, "fields": [*fields[:-1], {**fields[-1], "name": "other"}]},
        {**schema, "fields": [*fields[:-1], {**fields[-1], "default": "other"}]},
        {**schema, "fields": [*fields[:-1], {**fields[-1], "type": {"type": "array", "items": "bytes"}}]},
        {**schema, "fields": [*fields, fields[0]]},
        {**schema, "fields": {}},
        {**schema, "namespace": "other"},
        [schema],
        "string",
        None,
    ]
    for other in others:
        with refused(RegistryError, error_code=40403):
            lookup_of(released.subject, json.dumps(other))


@pytest.mark.parametrize("text", ["", '{"type": ' * 100 + '"string"' + "}" * 100, "[" * 20_000, "{"], ids=range(4))
def test_a_text_that_is_no_schema_or_nested_too_deeply_is_invalid(text: str) -> None:
    with refused(RegistryError, error_code=42201):
        lookup_of(SUBJECT, text)


def test_the_work_is_bounded_by_the_releases_and_not_by_what_is_sent() -> None:
    schema = json.loads(releases()[SUBJECT][0].text)
    lookup_of(SUBJECT, json.dumps(schema))
    calls = 0

    def count(frame: FrameType, event: str, _: Any) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_code.co_filename == registry.__file__

    for sent in ([1] * 10_000, {**schema, "fields": [{"a": 1}] * 2_000}, {**schema, "name": ["a"] * 5_000}):
        sys.setprofile(count)
        try:
            with pytest.raises(RegistryError):
                lookup_of(SUBJECT, json.dumps(sent))
        finally:
            sys.setprofile(None)
    assert 0 < calls < 500


@pytest.mark.parametrize(
    ("topic", "record"),
    [
        ("inference.request.medium", "InferenceRequest"),
        ("team-inference.image.request", "InferenceRequest"),
        ("inference.embedding.request.coder", "InferenceRequest"),
        ("inference.result", "ResultEvent"),
        ("team-inference.status", "StatusEvent"),
        ("inference.dlq", "DeadLetter"),
        ("conversation.trip", "ConversationMessage"),
        ("conversations.acme.trip", "ConversationMessage"),
    ],
)
def test_the_subject_of_a_topic_is_that_of_its_record(topic: str, record: str) -> None:
    """A serializer with default settings registers its schema under `<topic>-value`."""
    for released in releases()[f"penstock.v1.{record}"]:
        subject = f"{topic}-value"
        assert register(subject, SchemaBody(schema=released.text)) == {"id": released.schema_id}
        found = lookup_of(subject, released.text)
        assert (found["subject"], found["id"]) == (subject, released.schema_id)


OWN = json.dumps({"type": "record", "name": "Mine", "fields": [{"name": "prompt", "type": "string"}]})


@pytest.mark.parametrize(
    ("subject", "words"),
    [
        ("inference.request.low-value", "subjects/penstock.v1.InferenceRequest/versions/latest"),
        (SUBJECT, f"subjects/{SUBJECT}/versions/latest"),
        ("orders-value", "GET /registry/subjects lists"),
        ("inference.request.low-key", "GET /registry/subjects lists"),
    ],
)
def test_a_schema_of_ones_own_is_refused_with_the_one_to_use(subject: str, words: str) -> None:
    with pytest.raises(RegistryError, match="read-only mode") as caught:
        register(subject, SchemaBody(schema=OWN))
    assert caught.value.error_code == 42205
    assert words in str(caught.value)
