"""The topics of the AsyncAPI document and what is on them, of every installation and of a configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.gateway.queues.formats import ID_CHARACTERS
from penstock.gateway.queues.settings import QueueSection

Json = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class AvroMessage:
    """An Avro record, or the same as JSON if `schema` names a component."""

    record: str
    headers: tuple[str, ...] = ()
    schema: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class JsonMessage:
    summary: str
    payload: Json
    headers: tuple[str, ...] = ()


_EVENT = ("content-type", "ce_specversion", "ce_id", "ce_source", "ce_type")
_OF_REQUEST = ("traceparent", "penstock-attempt", "penstock-not-before")
_OF_OUTCOME = ("traceparent", "penstock-callback")
_ID = {"type": "string", "minLength": 1, "maxLength": ID_CHARACTERS}
_BODY = [{"type": "object"}, {"type": "string"}]
MESSAGES: Mapping[str, AvroMessage | JsonMessage] = {
    "request": AvroMessage(record="InferenceRequest", headers=(*_EVENT, *_OF_REQUEST)),
    "requestJson": AvroMessage(
        record="InferenceRequest", headers=("content-type", *_OF_REQUEST), schema="RequestOnKafka"
    ),
    "result": AvroMessage(record="ResultEvent", headers=_OF_OUTCOME),
    "status": AvroMessage(record="StatusEvent", headers=_OF_OUTCOME),
    "command": AvroMessage(record="ControlCommand", headers=_EVENT),
    "deadLetter": AvroMessage(record="DeadLetter"),
    "deadLetterAction": AvroMessage(record="DeadLetterAction", headers=("penstock-kind",)),
    "model": AvroMessage(record="ModelInfo"),
    "turn": AvroMessage(record="ConversationMessage"),
    "action": AvroMessage(record="AuditEvent", headers=_EVENT),
    "delivery": AvroMessage(record="WebhookDelivery"),
    "llmd": JsonMessage(
        summary="A message of llm-d's asynchronous processor.",
        headers=("traceparent",),
        payload={
            "type": "object",
            "required": ["id", "payload"],
            "properties": {
                "id": _ID,
                "deadline": {"type": ["string", "number", "null"], "description": "Unix seconds."},
                "payload": {"anyOf": _BODY, "description": "An OpenAI body, as an object, as text or as base64."},
            },
        },
    ),
    "llmdAnswer": JsonMessage(
        summary="The answer to a message of llm-d: a payload, or an error.",
        payload={
            "type": "object",
            "required": ["id"],
            "properties": {
                "id": _ID,
                "payload": {"anyOf": _BODY, "description": "OpenAI's answer, written as the body was."},
                "error": {"type": "string", "description": "Why there is no answer."},
            },
        },
    ),
    "outcome": JsonMessage(
        summary="The object of `GET /v1/requests/{id}`. For what is no valid request: its id and the error.",
        payload={
            "type": "object",
            "required": ["request_id", "status", "done", "result", "error"],
            "properties": {
                "request_id": {"type": "string"},
                "status": {"type": "string"},
                "done": {"type": "boolean"},
                "result": {"type": ["object", "null"]},
                "error": {"anyOf": [{"$ref": "#/components/schemas/ErrorFacts"}, {"type": "null"}]},
            },
        },
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Topic:
    """A channel on Kafka. `role`: that of `penstock topics acls` which sends (if received) or reads it, if it has one.

    `reply`: the channel of the answers.
    """

    name: str
    summary: str
    key: str
    messages: tuple[str, ...]
    role: str | None = None
    receives: bool = False
    reply: str | None = None
    parameters: tuple[str, ...] = ()


REQUESTS = ("request", "requestJson")
_REQUEST_ID = "The request id."
_LINE_OR_ID = "Key of the conversation, else the request id; null is taken without a conversation."
_TURN = "Request id, direction, number and epoch of a turn."


def _requests(name: str, summary: str, key: str = _LINE_OR_ID) -> Topic:
    return Topic(name=name, summary=summary, key=key, messages=REQUESTS, role="producer", receives=True, reply="result")


def _sent(role: str, name: str, summary: str, key: str, *messages: str, parameters: tuple[str, ...] = ()) -> Topic:
    return Topic(name=name, summary=summary, key=key, messages=messages, role=role, parameters=parameters)


TOPICS: Mapping[str, Topic] = {
    f"request{klass.title()}": _requests(f"inference.request.{klass}", f"Text requests of the priorities {priorities}.")
    for klass, priorities in {"high": "0 to 3", "medium": "4 to 7", "low": "8 and up"}.items()
} | {
    "requestImage": _requests("inference.image.request", "Requests that make, change or read images."),
    "requestEmbedding": _requests("inference.embedding.request", "Requests for embeddings.", _REQUEST_ID),
    "control": Topic(
        name="inference.control",
        summary="Cancel a request, or give it another priority.",
        key="Request id and kind, with a slash between them.",
        messages=("command",),
        role="producer",
        receives=True,
    ),
    "result": _sent(
        "results",
        "inference.result",
        "Chunks and previews of a request, then its one outcome. Fold them as the documentation says.",
        _REQUEST_ID,
        "result",
    ),
    "status": _sent("results", "inference.status", "Statuses of requests.", _REQUEST_ID, "status"),
    "deadLetters": _sent(
        "operator",
        "inference.dlq",
        "Records and requests that failed for good, and what was done with them.",
        "The request id; null if unknown.",
        *("deadLetter", "deadLetterAction"),
    ),
    "model": _sent("producer", "inference.model", "Served models.", "Id of the model.", "model"),
    "audit": _sent(
        "operator",
        "inference.audit",
        "Actions of operators: a record before each, and one with its outcome.",
        "Id of the action.",
        "action",
    ),
    "conversation": _sent(
        "conversations",
        "conversation.{conversation_id}",
        "Turns of a conversation of the tenant `default`.",
        _TURN,
        "turn",
        parameters=("conversation_id",),
    ),
    "conversationOfTenant": _sent(
        "conversations",
        "conversations.{tenant}.{conversation_id}",
        "Turns of a conversation of another tenant.",
        _TURN,
        "turn",
        parameters=("tenant", "conversation_id"),
    ),
    "conversationLog": _sent(
        "conversations",
        "inference.conversation.log",
        "Turns of all conversations, in the layout `sharded` of `topics.conversation_layout`.",
        "Key of the conversation, a slash, and the key of the turn.",
        "turn",
    ),
}
"""By channel, without the prefix."""
DELIVERIES = {
    "delivery": _sent(
        "operator", "inference.delivery", "What became of webhooks.", "Tenant, a slash, and the request id.", "delivery"
    )
}
"""Where webhooks are sent."""


def queue_topics(queues: Sequence[QueueSection]) -> dict[str, Topic]:
    """The topics of `[[queues]]`, which have no prefix. Queues may share a topic of answers."""
    made: dict[str, Topic] = {}
    for queue in queues:
        is_own = queue.format == "penstock"
        reply = None if queue.result_topic is None else f"answers-{queue.result_topic}"
        made[f"queue-{queue.topic}"] = Topic(
            name=queue.topic,
            summary="Messages of another system, in the format " + ("of Penstock." if is_own else "of llm-d."),
            key="Any, or null.",
            messages=REQUESTS if is_own else ("llmd",),
            receives=True,
            reply=reply,
        )
        if reply is not None and queue.result_topic is not None:
            answers = {*(made[reply].messages if reply in made else ()), "outcome" if is_own else "llmdAnswer"}
            made[reply] = Topic(
                name=queue.result_topic,
                summary="Answers to messages of queues. One may come twice, with the same id.",
                key="The id of the message or request.",
                messages=tuple(sorted(answers)),
            )
    return made
