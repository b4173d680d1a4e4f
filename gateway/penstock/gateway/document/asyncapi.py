"""The AsyncAPI document: what other services send and read on Kafka's topics and on the WebSocket.

Topics that only Penstock's own processes use are no part of it. `receive` and `send` are Penstock's.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema

from penstock.gateway.document.asyncapi_topics import (
    DELIVERIES,
    MESSAGES,
    TOPICS,
    JsonMessage,
    Topic,
    queue_topics,
)
from penstock.gateway.document.openapi import REFERENCE
from penstock.gateway.queues.settings import QueueSection
from penstock.gateway.routes.socket_frames import CLIENT_FRAMES, SERVER_FRAMES
from penstock.gateway.routes.sockets import SUBPROTOCOL
from penstock.gateway.settings import GatewaySettings
from penstock.schemas.bodies import request_type
from penstock.schemas.codec import schema_text
from penstock.schemas.tasks import BUILT_TASKS
from penstock.schemas.topics import TopicNames, conversation_topic_config, topic_specs

VERSION = "1.0.0"
"""Of the contract. A change that breaks clients raises the first number; `asyncapi_changes` finds such changes."""
PARTITIONS, BROKERS = 64, 3
"""What the bindings show: the default of `topics.partitions`, and replication as with three brokers or more."""
AVRO = "application/vnd.apache.avro;version=1.9.0"
_LINE = 180
Json = dict[str, Any]

_TEXT: Json = {"type": "string"}
_HEADERS: dict[str, Json] = {
    "content-type": {**_TEXT, "description": "`application/avro` on what Penstock sends."},
    "ce_specversion": {**_TEXT, "description": "CloudEvents, binary mode."},
    "ce_id": {**_TEXT, "description": "The request id of a request, the key of other records."},
    "ce_source": _TEXT,
    "ce_type": _TEXT,
    "traceparent": {**_TEXT, "description": "W3C Trace Context. Results and statuses have that of their request."},
    "penstock-attempt": {"type": "string", "pattern": "^[0-9]+$", "description": "Number of the first attempt."},
    "penstock-not-before": {
        **_TEXT,
        "description": "It does not start before: RFC 3339, or seconds or milliseconds since the epoch.",
    },
    "penstock-callback": {**_TEXT, "format": "uri", "description": "The `callback_url` of the request."},
    "penstock-kind": {**_TEXT, "description": "Which action it is."},
}
_OF_THE_RECORD: dict[str, Json] = {
    "request_id": {
        "anyOf": [_TEXT, {"type": "integer"}, {"type": "null"}],
        "description": "Null: a UUIDv5 of topic, partition, offset and append time.",
    },
    "tenant": {"anyOf": [{**_TEXT, "pattern": "^[a-z0-9-]{1,63}$"}, {"type": "null"}]},
    "created_at": {"anyOf": [{**_TEXT, "format": "date-time"}, {"type": "number"}, {"type": "null"}]},
}
"""What a request in JSON may have on Kafka beside the fields of an HTTP body."""
_PARAMETERS = {
    "conversation_id": {"description": "`[A-Za-z0-9_-]{1,128}`"},
    "tenant": {"description": "`[a-z0-9-]{1,63}`, not `default`."},
}
_IN_THE_VALUE = {
    "schemaIdLocation": "payload",
    "schemaIdPayloadEncoding": "confluent",
    "schemaLookupStrategy": "RecordNameStrategy",
}
"""Where the id of the schema is."""
_REPLIES = {"submit": ("accepted", "error"), "ping": ("pong",)}
"""By frame of a client: the frames that answer it, if not only by `error`."""
_NEWS = ("status", "chunk", "restarted", "snapshot", "progress", "preview", "result", "error")

_SECURITY: dict[str, Json] = {
    "saslPlain": {"type": "plain"},
    "saslScram": {"type": "scramSha512"},
    "saslOauth": {
        "type": "oauth2",
        "description": "OAUTHBEARER, by client credentials.",
        "flows": {"clientCredentials": {"tokenUrl": "https://identity.example.com/token", "availableScopes": {}}},
    },
    "clientCertificate": {"type": "X509"},
    "bearer": {"type": "http", "scheme": "bearer", "description": "A key of `penstock keys create`."},
    "apiKey": {"type": "httpApiKey", "in": "header", "name": "x-api-key"},
    "ticket": {
        "type": "httpApiKey",
        "in": "query",
        "name": "ticket",
        "description": "Of `POST /v1/tickets`, for browsers.",
    },
}
_KAFKA_SECURITY = ("saslPlain", "saslScram", "saslOauth", "clientCertificate")
_SOCKET_SECURITY = ("bearer", "apiKey", "ticket")


def asyncapi(prefix: str = "", queues: Sequence[QueueSection] = (), *, webhooks: bool = False) -> Json:
    """The document for an installation whose own topics have this prefix.

    `queues`: its `[[queues]]`. `webhooks`: whether it sends any.
    """
    frames, schemas = _schemas()
    own = {**TOPICS, **(DELIVERIES if webhooks else {})}
    topics = {name: replace(one, name=prefix + one.name) for name, one in own.items()} | queue_topics(queues)
    used = {name for topic in topics.values() for name in topic.messages}
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "Penstock",
            "version": VERSION,
            "description": "Durable, prioritised inference on Apache Kafka: its topics and its WebSocket.\n\n"
            "Every Avro value is in the Confluent format: a zero byte, the schema's id in four bytes (big-endian), the "
            "Avro body. Gateways are a schema registry for these ids. Producers partition by murmur2. A pool has "
            "request topics of its own: the name, a dot and the name of the pool. Requests in JSON may also use the "
            "names of other services. Readers ignore fields, symbols and types of frames that they do not know.",
            "license": {"name": "Apache-2.0"},
        },
        "defaultContentType": "application/json",
        "servers": _servers(),
        "channels": {**_topic_channels(prefix, topics), "socket": _socket_channel()},
        "operations": {**_topic_operations(topics), **_socket_operations()},
        "components": {
            "messages": {**{name: _message(name, topics) for name in MESSAGES if name in used}, **frames},
            "schemas": schemas,
            "securitySchemes": _SECURITY,
        },
    }


def configured_asyncapi(settings: GatewaySettings) -> Json:
    """The document as a gateway with this configuration serves it to callers with a key."""
    webhooks = settings.webhooks.secret is not None or bool(settings.webhooks.secrets)
    return asyncapi(settings.kafka.topic_prefix, settings.queues, webhooks=webhooks)


def _servers() -> dict[str, Json]:
    bootstrap = {"default": "127.0.0.1:9092", "description": "`kafka.bootstrap_servers`"}
    gateway = {"default": "127.0.0.1:8000"}
    kafka: Json = {"host": "{bootstrap}", "variables": {"bootstrap": bootstrap}}
    socket: Json = {
        "host": "{gateway}",
        "variables": {"gateway": gateway},
        "security": _refs("bearer", "apiKey", "ticket"),
    }
    return {
        "kafka": {**kafka, "protocol": "kafka"},
        "kafkaSecure": {**kafka, "protocol": "kafka-secure", "security": _refs(*_KAFKA_SECURITY)},
        "gateway": {**socket, "protocol": "ws"},
        "gatewaySecure": {**socket, "protocol": "wss"},
    }


def _refs(*schemes: str) -> list[Json]:
    return [_ref("components", "securitySchemes", name) for name in schemes]


def _ref(*path: str) -> Json:
    return {"$ref": "#/" + "/".join(path)}


def _topic_channels(prefix: str, topics: Mapping[str, Topic]) -> dict[str, Json]:
    specs = topic_specs(TopicNames(prefix), partitions=PARTITIONS, brokers=BROKERS, shared_conversations=True)
    configs = {spec.name: (spec.partitions, spec.replication, spec.config) for spec in specs}
    made: dict[str, Json] = {}
    for channel, topic in topics.items():
        made[channel] = {
            "address": topic.name,
            "summary": topic.summary,
            "servers": [_ref("servers", name) for name in ("kafka", "kafkaSecure")],
            "messages": {name: _ref("components", "messages", name) for name in topic.messages},
        }
        if topic.parameters:
            made[channel]["parameters"] = {name: _PARAMETERS[name] for name in topic.parameters}
            configs[topic.name] = 1, 3, conversation_topic_config(brokers=BROKERS)
        if topic.name not in configs:
            continue  # a topic of another system
        partitions, replicas, config = configs[topic.name]
        retention = {"retention.ms": int(config["retention.ms"])} if "retention.ms" in config else {}
        made[channel]["bindings"] = {
            "kafka": {
                "partitions": partitions,
                "replicas": replicas,
                "topicConfiguration": {"cleanup.policy": config["cleanup.policy"].split(","), **retention},
                "bindingVersion": "0.5.0",
            }
        }
    return made


def _topic_operations(topics: Mapping[str, Topic]) -> dict[str, Json]:
    made: dict[str, Json] = {}
    for channel, topic in topics.items():
        action = "receive" if topic.receives else "send"
        operation = made[f"{action}{channel[0].upper()}{channel[1:]}"] = {
            "action": action,
            "channel": _ref("channels", channel),
            "summary": topic.summary,
        }
        if topic.role is not None:
            what = f"The role in `penstock topics acls --role {topic.role}`."
            operation["tags"] = [{"name": topic.role, "description": what}]
        operation["messages"] = [_ref("channels", channel, "messages", name) for name in topic.messages]
        if topic.reply is not None:
            operation["reply"] = {"channel": _ref("channels", topic.reply)}
    return made


def _message(name: str, topics: Mapping[str, Topic]) -> Json:
    """A message on Kafka."""
    message = MESSAGES[name]
    is_json = isinstance(message, JsonMessage) or message.schema is not None
    if isinstance(message, JsonMessage):
        title, summary, payload = name, message.summary, message.payload
    else:
        record = json.loads(schema_text(message.record))
        title, summary, payload = message.record, record["doc"], {"schemaFormat": AVRO, "schema": record}
        if message.schema is not None:
            summary = "A request as a JSON object; it begins with a brace."
            payload = _ref("components", "schemas", message.schema)
    keys = " ".join(dict.fromkeys(topic.key for topic in topics.values() if name in topic.messages))
    key = {"type": ["string", "null"] if "null" in keys else "string", "description": keys}
    return {
        "name": title,
        "summary": summary,
        "contentType": "application/json" if is_json else "application/avro",
        "headers": {"type": "object", "properties": {header: _HEADERS[header] for header in message.headers}},
        "payload": payload,
        "bindings": {"kafka": {"key": key, **({} if is_json else _IN_THE_VALUE), "bindingVersion": "0.5.0"}},
    }


def _socket_channel() -> Json:
    query = {"type": "object", "properties": {"ticket": _TEXT}}
    headers = {"type": "object", "properties": {"Sec-WebSocket-Protocol": {**_TEXT, "enum": [SUBPROTOCOL]}}}
    names = [_frame(kind) for kind in (*CLIENT_FRAMES, *SERVER_FRAMES)]
    return {
        "address": "/v1/ws",
        "summary": "Submit, follow and cancel requests; frames are JSON in text messages.",
        "servers": [_ref("servers", name) for name in ("gateway", "gatewaySecure")],
        "messages": {name: _ref("components", "messages", name) for name in names},
        "bindings": {"ws": {"method": "GET", "query": query, "headers": headers, "bindingVersion": "0.1.0"}},
    }


def _frame(kind: str) -> str:
    return f"{kind}Frame"


def _socket_operations() -> dict[str, Json]:
    channel = _ref("channels", "socket")

    def messages(kinds: Iterable[str]) -> list[Json]:
        return [_ref("channels", "socket", "messages", _frame(kind)) for kind in kinds]

    made: dict[str, Json] = {
        kind: {
            "action": "receive",
            "channel": channel,
            "messages": messages([kind]),
            "reply": {"channel": channel, "messages": messages(_REPLIES.get(kind, ("error",)))},
        }
        for kind in CLIENT_FRAMES
    }
    return {**made, "follow": {"action": "send", "channel": channel, "messages": messages(_NEWS)}}


class _Untitled(GenerateJsonSchema):
    """Titles made of names of fields say nothing."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def _schemas() -> tuple[dict[str, Json], dict[str, Json]]:
    """(the messages of frames, the components): by the types that validate requests and the fields of frames."""
    bodies = {task: request_type(task) for task in BUILT_TASKS}
    types: Mapping[str, Any] = {**CLIENT_FRAMES, **SERVER_FRAMES, **bodies}
    adapters = [(kind, "validation", TypeAdapter(model)) for kind, model in types.items()]
    by_key, found = TypeAdapter.json_schemas(cast("Any", adapters), ref_template=REFERENCE, schema_generator=_Untitled)
    components: dict[str, Json] = {
        name: {key: value for key, value in schema.items() if key != "title"} for name, schema in found["$defs"].items()
    }
    frames: dict[str, Json] = {}
    for kind in (*CLIENT_FRAMES, *SERVER_FRAMES):
        payload = by_key[kind, "validation"]
        name = payload["$ref"].rpartition("/")[2]
        frames[_frame(kind)] = {"name": kind, "summary": components[name]["description"], "payload": payload}
    components["SubmitFrame"]["properties"]["request"] = _ref("components", "schemas", "Request")
    own = [by_key[task, "validation"]["$ref"].rpartition("/")[2] for task in bodies]
    components["Request"] = {"anyOf": [_ref("components", "schemas", name) for name in own]}
    for name in own:
        body = components[name]
        components[f"{name}OnKafka"] = {**body, "properties": {**body["properties"], **_OF_THE_RECORD}}
    components["RequestOnKafka"] = {"anyOf": [_ref("components", "schemas", f"{name}OnKafka") for name in own]}
    return frames, dict(sorted(components.items()))


def document_text(value: Any, indent: int = 0) -> str:
    """JSON text with an element on a line where it fits, so that changes can be read."""
    flat = json.dumps(value, ensure_ascii=False)
    if indent + len(flat) <= _LINE or not isinstance(value, dict | list) or not value:
        return flat
    inner, margin = indent + 1, " " * (indent + 1)
    if isinstance(value, list):
        parts = [document_text(one, inner) for one in cast("list[Any]", value)]
        opens, closes = "[", "]"
    else:
        parts = [f"{json.dumps(name)}: {document_text(one, inner)}" for name, one in cast("Json", value).items()]
        opens, closes = "{", "}"
    return f"{opens}\n{margin}" + f",\n{margin}".join(parts) + f"\n{' ' * indent}{closes}"
