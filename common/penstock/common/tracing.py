"""Spans as values: trace contexts, ids that two processes can derive alike, names of attributes. Pure but for new ids.

Spans are described after the fact, with both times. `telemetry` exports them.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import field
from hashlib import blake2b
from typing import Literal, NamedTuple

from penstock.common.outgoing import is_traceparent
from penstock.schemas.fixed import fixed
from penstock.schemas.records import InferenceRequest, Place

Kind = Literal["internal", "server", "client", "producer", "consumer"]
Value = str | int | float | bool | list[str]
Attributes = dict[str, Value]

# OpenTelemetry's semantic conventions: messaging, GenAI, HTTP.
SYSTEM, KAFKA = "messaging.system", "kafka"
OPERATION = "messaging.operation.type"
DESTINATION = "messaging.destination.name"
PARTITION = "messaging.destination.partition.id"
OFFSET = "messaging.kafka.offset"
GROUP = "messaging.consumer.group.name"
ERROR_TYPE = "error.type"
METHOD, ROUTE, STATUS_CODE = "http.request.method", "http.route", "http.response.status_code"
SERVER_ADDRESS = "server.address"
GEN_AI_OPERATION = "gen_ai.operation.name"
REQUEST_MODEL, RESPONSE_MODEL = "gen_ai.request.model", "gen_ai.response.model"
INPUT_TOKENS, OUTPUT_TOKENS = "gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens"
FINISH_REASONS = "gen_ai.response.finish_reasons"
CONVERSATION = "gen_ai.conversation.id"
INPUT, OUTPUT = "gen_ai.input.messages", "gen_ai.output.messages"
# Penstock's own.
REQUEST_ID, TENANT, TASK = "penstock.request_id", "penstock.tenant", "penstock.task"
CLASS, PRIORITY = "penstock.priority_class", "penstock.priority"
ATTEMPT, EPOCH, WORKER, DEVICE = "penstock.attempt", "penstock.epoch", "penstock.worker_id", "penstock.device"
STATUS, LOST = "penstock.status", "penstock.lost"
REASON = "penstock.waiting_reason"
RELATION = "penstock.relation"
"""Of a link: `retry_of`, `continues`, `turn_after` or `batch`."""
FIRST_TOKEN = "gen_ai.first_token"
"""An event of a run."""


class SpanContext(NamedTuple):
    """What names a span across processes."""

    trace_id: int
    span_id: int
    sampled: bool = True

    @property
    def traceparent(self) -> str:
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{'01' if self.sampled else '00'}"

    def child(self, span_id: int | None = None) -> SpanContext:
        """A span of the same trace, under a new id unless one is given."""
        return SpanContext(self.trace_id, span_id or new_id(64), self.sampled)


class Link(NamedTuple):
    context: SpanContext
    relation: str


class Event(NamedTuple):
    name: str
    at_ns: int
    attributes: Attributes = {}  # noqa: RUF012  (nobody changes it)


@fixed
class Span:
    """A span that has ended. Times are nanoseconds since the epoch. `error`: why it failed."""

    name: str
    context: SpanContext
    parent: SpanContext | None
    start_ns: int
    end_ns: int
    kind: Kind = "internal"
    attributes: Attributes = field(default_factory=dict[str, Value])
    links: tuple[Link, ...] = ()
    events: tuple[Event, ...] = ()
    error: str | None = None


def context_of(traceparent: str | bytes | None) -> SpanContext | None:
    """The context of a W3C header; None for one that is not well-formed."""
    text = traceparent.decode("ascii", "replace") if isinstance(traceparent, bytes) else traceparent
    if text is None or not is_traceparent(text):
        return None
    _, trace_id, span_id, flags = text.split("-")[:4]
    return SpanContext(int(trace_id, 16), int(span_id, 16), bool(int(flags, 16) & 1))


def new_id(bits: int) -> int:
    """Ids must differ, not be secret. The bit that is always set keeps them from being 0, which is no id."""
    return random.getrandbits(bits) | 1


def derived_id(bits: int, *parts: object) -> int:
    """The same for the same parts, in every process: a worker can name the span of another one that died."""
    digest = blake2b("\n".join(map(str, parts)).encode("utf-8", "replace"), digest_size=bits // 8)
    return int.from_bytes(digest.digest(), "big") | 1


def request_attributes(request: InferenceRequest) -> Attributes:
    """What names a request."""
    found: Attributes = {REQUEST_ID: request.request_id, TENANT: request.tenant, TASK: request.task}
    if request.model is not None:
        found[REQUEST_MODEL] = request.model
    if request.conversation_id is not None:
        found[CONVERSATION] = request.conversation_id
    return found


def send_span(
    context: SpanContext,
    parent: SpanContext | None,
    place: Place,
    times_ns: tuple[int, int],
    attributes: Mapping[str, Value],
    *,
    links: tuple[Link, ...] = (),
    error: str | None = None,
) -> Span:
    """A record on its way to Kafka, until it was acknowledged. Its offset is negative if the broker did not say."""
    where: Attributes = {SYSTEM: KAFKA, OPERATION: "send", DESTINATION: place.topic}
    if place.offset >= 0:
        where |= {PARTITION: str(place.partition), OFFSET: place.offset}
    return Span(
        name=f"send {place.topic}",
        kind="producer",
        context=context,
        parent=parent,
        start_ns=times_ns[0],
        end_ns=times_ns[1],
        attributes={**where, **attributes},
        links=links,
        error=error,
    )
