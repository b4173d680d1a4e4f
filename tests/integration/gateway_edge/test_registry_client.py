"""Confluent's own clients against the registry routes."""

from __future__ import annotations

import json
import uuid
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from confluent_kafka.schema_registry import (
    Schema,
    SchemaRegistryClient,
    header_schema_id_serializer,
    record_subject_name_strategy,
)
from confluent_kafka.schema_registry.avro import AvroDeserializer, AvroSerializer
from confluent_kafka.schema_registry.error import SchemaRegistryError
from confluent_kafka.serialization import MessageField, SerializationContext, SerializationError

from penstock.schemas.codec import SCHEMA_IDS, default_codec, schema_text
from penstock.schemas.records import ConversationMessage
from penstock.schemas.registry import MEDIA_TYPE

if TYPE_CHECKING:
    from .conftest import Server

MESSAGE = ConversationMessage(
    request_id="r1",
    tenant="default",
    conversation_id="c1",
    direction="in",
    role="user",
    content="hello",
    created_at=1_700_000_000_000,
)
SUBJECT = "penstock.v1.ConversationMessage"
CONTEXT = SerializationContext("conversation.c1", MessageField.VALUE)


@pytest.fixture
def registry(server: Server) -> SchemaRegistryClient:
    return SchemaRegistryClient({"url": server.url + "/registry"})


def test_the_stock_deserializer_reads_our_bytes(registry: SchemaRegistryClient) -> None:
    value = AvroDeserializer(registry)(default_codec().encode(MESSAGE), CONTEXT)  # pyright: ignore[reportCallIssue]
    assert isinstance(value, dict)
    assert (value["content"], value["role"], value["direction"]) == ("hello", "user", "in")


def test_the_stock_serializer_writes_bytes_that_we_read(registry: SchemaRegistryClient) -> None:
    serializer = AvroSerializer(
        registry,  # pyright: ignore[reportCallIssue]
        schema_text("ConversationMessage"),
        conf={"auto.register.schemas": False, "subject.name.strategy": record_subject_name_strategy},
    )
    data = serializer(MESSAGE.to_dict(), CONTEXT)
    assert data is not None
    assert default_codec().decode(data, ConversationMessage) == MESSAGE


def test_subjects_and_versions(registry: SchemaRegistryClient) -> None:
    assert SUBJECT in registry.get_subjects()
    assert registry.get_versions(SUBJECT) == list(range(1, len(SCHEMA_IDS["ConversationMessage"]) + 1))
    latest = registry.get_latest_version(SUBJECT)
    assert latest.schema_id == SCHEMA_IDS["ConversationMessage"][-1]
    assert latest.schema is not None
    assert latest.schema.schema_str is not None
    assert json.loads(latest.schema.schema_str)["name"] == "ConversationMessage"
    assert registry.get_version(SUBJECT, 1).version == 1
    assert registry.lookup_schema(SUBJECT, latest.schema).schema_id == latest.schema_id
    assert registry.register_schema(SUBJECT, latest.schema) == latest.schema_id
    assert registry.get_compatibility() == "FULL_TRANSITIVE"


def test_what_is_not_there_is_the_registrys_own_404(registry: SchemaRegistryClient) -> None:
    for call, code in [
        (lambda: registry.get_schema(99), 40403),
        (lambda: registry.get_latest_version("nobody"), 40401),
        (lambda: registry.get_version(SUBJECT, 999), 40402),
        (lambda: registry.lookup_schema(SUBJECT, Schema('"string"', "AVRO")), 40403),
        (lambda: registry.register_schema(SUBJECT, Schema('"string"', "AVRO")), 42205),
    ]:
        with pytest.raises(SchemaRegistryError) as caught:
            call()
        assert caught.value.error_code == code


def test_all_ids_resolve(server: Server) -> None:
    for ids in SCHEMA_IDS.values():
        for schema_id in ids:
            answer = httpx.get(f"{server.url}/registry/schemas/ids/{schema_id}")
            assert answer.headers["content-type"].startswith("application/vnd.schemaregistry.v1+json")
            assert json.loads(answer.json()["schema"])["namespace"] == "penstock.v1"
    assert httpx.get(f"{server.url}/registry/schemas/types").json() == ["AVRO"]


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("[" * 100_000, 42201),
        ("[" * 500 + "]" * 500, 40403),
        ('{"type":' * 300 + '"string"' + "}" * 300, 42201),
        ('{"type": "string"}', 40403),
        ("not json", 42201),
    ],
)
def test_odd_schemas_are_answered_as_a_registry_does(server: Server, text: str, code: int) -> None:
    # Short of the limit of bodies without a key.
    answer = httpx.post(f"{server.url}/registry/subjects/{SUBJECT}", json={"schema": text[:60_000]})
    assert (answer.status_code, answer.json()["error_code"]) == (code // 100, code)


@pytest.mark.parametrize(
    ("call", "code"),
    [
        ("GET /registry", 404),
        ("GET /registry/nothing/here", 404),
        ("POST /registry/compatibility/subjects/x/versions/latest", 404),
        ("DELETE /registry/subjects/x", 405),
        ("PUT /registry/config", 405),
        ("GET /registry/schemas/ids/abc", 40403),
        (f"GET /registry/schemas/ids/{10**30}", 40403),
        (f"GET /registry/schemas/guids/{uuid.UUID(int=7)}", 40403),
        (f"POST /registry/subjects/{SUBJECT}", 42201),
        (f"POST /registry/subjects/{SUBJECT} nothing", 400),
        (f"POST /registry/subjects/{SUBJECT} []", 42201),
        (f"POST /registry/subjects/{SUBJECT} {{}}", 42201),
        (f'POST /registry/subjects/{SUBJECT} {{"schema":1}}', 42201),
        (f"POST /registry/subjects/{SUBJECT} {'[' * 60_000}", 400),
        (f"POST /registry/subjects/{SUBJECT} {'x' * 70_000}", 413),
    ],
)
def test_whatever_is_refused_has_the_registrys_shape(server: Server, call: str, code: int) -> None:
    method, path, *content = call.split(" ")
    body = "".join(content).encode()
    answer = httpx.request(method, server.url + path, content=body or None, headers={"content-type": MEDIA_TYPE})
    assert answer.status_code == int(str(code)[:3]), answer.text
    assert answer.headers["content-type"] == MEDIA_TYPE
    assert (answer.json().keys(), answer.json()["error_code"]) == ({"error_code", "message"}, code)


def test_a_serializer_that_writes_ids_into_headers_stops_before_it_sends(registry: SchemaRegistryClient) -> None:
    """Schemas have no GUID here: a record with one in a header would only be refused later."""
    conf: dict[str, Any] = {"auto.register.schemas": False, "subject.name.strategy": record_subject_name_strategy}
    conf["schema.id.serializer"] = header_schema_id_serializer
    serializer = AvroSerializer(registry, schema_text("ConversationMessage"), conf=conf)  # pyright: ignore[reportCallIssue]
    context = SerializationContext(CONTEXT.topic, MessageField.VALUE, headers=[])
    with pytest.raises(SerializationError, match="GUID is not set"):
        serializer(MESSAGE.to_dict(), context)
    with pytest.raises(SchemaRegistryError, match="no GUIDs here") as caught:
        registry.get_schema_by_guid(str(uuid.UUID(int=7)))
    assert caught.value.error_code == 40403


def test_a_schema_as_java_sends_it_is_the_same_schema(registry: SchemaRegistryClient) -> None:
    """Java's clients write strings as objects with `avro.java.string`; that says how to hold them, not how to read."""

    def in_java(schema: object) -> object:
        if schema == "string":
            return {"type": "string", "avro.java.string": "String"}
        if isinstance(schema, list):
            return [in_java(one) for one in schema]
        if isinstance(schema, dict):
            return {
                key: in_java(value) if key in ("type", "fields", "items") else value for key, value in schema.items()
            }
        return schema

    text = json.dumps(in_java(json.loads(schema_text("ConversationMessage"))))
    assert "avro.java.string" in text
    assert registry.lookup_schema(SUBJECT, Schema(text, "AVRO")).schema_id == SCHEMA_IDS["ConversationMessage"][-1]
