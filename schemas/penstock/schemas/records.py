"""The records on the topics as values that nobody changes, one class for each .avsc, with the same field names.

Times are milliseconds since the epoch. Enums travel as their text; a symbol of a newer release decodes to UNKNOWN.
Payloads and outputs are plain dictionaries with the fields of their Avro record.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from enum import StrEnum
from functools import cache
from inspect import isclass
from typing import Any, ClassVar, Self, TypeVar, cast, dataclass_transform, get_args, get_type_hints

T = TypeVar("T")


class Task(StrEnum):
    TEXT_GENERATION = "text_generation"
    EMBEDDING = "embedding"
    IMAGE_GENERATION = "image_generation"
    IMAGE_EDITING = "image_editing"
    IMAGE_TO_TEXT = "image_to_text"
    IMAGE_PROCESSING = "image_processing"
    SUMMARIZATION = "summarization"
    CONVERSATION_ITEMS = "conversation_items"
    UNKNOWN = "UNKNOWN"


class Status(StrEnum):
    ACCEPTED = "accepted"
    QUEUED = "queued"
    WAITING_FOR_MEMORY = "waiting_for_memory"
    LOADING_MODEL = "loading_model"
    RUNNING = "running"
    RETRYING = "retrying"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    DEAD_LETTERED = "dead_lettered"
    UNKNOWN = "UNKNOWN"


PAYLOAD_FIELDS: tuple[str, ...] = tuple(task.value for task in Task if task is not Task.UNKNOWN)

STATUS_RANKS: dict[str, int] = {
    "accepted": 0,
    # One rank for all that waits: what a request waits for changes to and fro, and the newest counts.
    "queued": 10,
    "waiting_for_memory": 10,
    "loading_model": 10,
    "running": 40,
    "retrying": 50,
    "completed": 100,
    "failed": 100,
    "cancelled": 100,
    "expired": 100,
    "dead_lettered": 100,
}


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(field,))
def record(cls: type[T]) -> type[T]:
    """A record class. Only the type checker holds it frozen: at run time each field of a frozen one costs a call."""
    return dataclass(kw_only=True, slots=True, unsafe_hash=True)(cls)


class Record:
    """What all records share: conversion to and from the plain dictionaries that Avro reads and writes."""

    __slots__ = ()
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    def to_dict(self) -> dict[str, Any]:
        """Fields by name, nested records as dictionaries. The values are shared, not copied."""
        kind = type(self)
        found = {name: getattr(self, name) for name in fields_of(kind)}
        for name in _records_in(kind):
            if (value := found[name]) is not None:
                found[name] = value.to_dict() if isinstance(value, Record) else [item.to_dict() for item in value]
        return found

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The record of a dictionary; fields that this release does not know are left out."""
        known = fields_of(cls)
        found = {name: value for name, value in values.items() if name in known}
        for name, kind in _records_in(cls).items():
            if (value := found.get(name)) is None or isinstance(value, kind):
                continue
            if isinstance(value, list):
                items = cast("list[Any]", value)
                found[name] = [item if isinstance(item, kind) else kind.from_dict(item) for item in items]
            else:
                found[name] = kind.from_dict(value)
        return cls(**found)

    @classmethod
    def nested_kind(cls, name: str) -> type[Record] | None:
        """The record that a field holds, alone or in a list; None for plain values and for payloads."""
        return _records_in(cls).get(name)


@cache
def _records_in(kind: type[Record]) -> Mapping[str, type[Record]]:
    """The fields that hold records, alone or in a list, by their annotations."""
    parts = {name: (hint, *get_args(hint)) for name, hint in get_type_hints(kind).items()}
    return {name: one for name, each in parts.items() for one in each if isclass(one) and issubclass(one, Record)}


@cache
def fields_of(kind: type[Record]) -> Mapping[str, None]:
    """The names of a record's fields in their order."""
    return {item.name: None for item in fields(cast(Any, kind))}


@record
class Place(Record):
    """Where a record stands."""

    topic: str
    partition: int
    offset: int


@record
class Origin(Record):
    """The first record of a request; its place in the log identifies the request for good."""

    topic: str
    partition: int
    offset: int
    append_time_ms: int


@record
class ErrorInfo(Record):
    """Why a request did not complete; `details` is a JSON object in text."""

    code: str
    message: str
    type: str
    param: str | None = None
    retryable: bool = False
    details: str | None = None


@record
class Usage(Record):
    """Counts of tokens and pixels."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0
    pixels: int | None = None


@record
class Timings(Record):
    """Where the time went, in milliseconds."""

    queued_ms: int = 0
    admission_ms: int = 0
    load_ms: int = 0
    run_ms: int = 0
    first_token_ms: int | None = None


@record
class AttemptError(Record):
    """Why an attempt did not complete."""

    code: str
    message: str


@record
class AttemptMemory(Record):
    """Memory of the device as an attempt ended, in bytes. `engine_bytes` is what was measured of its engine."""

    engine_bytes: int | None = None
    limit_bytes: int | None = None
    reserved_bytes: int | None = None
    measured_bytes: int | None = None
    foreign_bytes: int | None = None


@record
class Attempt(Record):
    """One attempt to run a request. `ended_at` is null if its worker was killed."""

    attempt: int
    worker_id: str | None = None
    device: str | None = None
    error: AttemptError | None = None
    started_at: int | None = None
    ended_at: int | None = None
    memory: AttemptMemory | None = None


@record
class AttemptHistory(Record):
    """The attempts of a request so far, oldest first. `dropped` counts older ones that are left out."""

    attempts: list[Attempt]
    dropped: int = 0


@record
class ContextLimits(Record):
    """How much of a conversation goes into the prompt: tokens, turns.

    `summary`: null for auto (a summary stands in for turns that do not fit), false for never, true for required.
    """

    max_tokens: int | None = None
    last_turns: int | None = None
    summary: bool | None = None


@record
class ContextHeld(Record):
    """What of its conversation a turn's prompt held, in turns. `summary_through` is an offset.

    `dropped_tokens`: about, foretold from their characters; None where nobody said.
    """

    turns: int
    summarized_turns: int = 0
    dropped_turns: int = 0
    summary_through: int | None = None
    dropped_tokens: int | None = None


@record
class Requirements(Record):
    """Memory in bytes that the caller knows to be needed."""

    vram_bytes: int | None = None
    cpu_memory_bytes: int | None = None


@record
class OutputSpec(Record):
    """Where artifacts go, and the form of images: png, jpeg or webp, quality 1 to 100, facts in the metadata."""

    store: str | None = None
    prefix: str | None = None
    format: str | None = None
    quality: int | None = None
    facts: bool | None = None


@record
class InputArtifact(Record):
    """Text of a payload that is kept beside Kafka, under the request's tenant (`penstock.schemas.large_inputs`)."""

    artifact_id: str
    size_bytes: int
    sha256: str


@record
class InferenceRequest(Record):
    """What a caller asks for; exactly one payload field is set, that of the task."""

    request_id: str
    task: str
    priority: int = 5
    model: str | None = None
    pool: str | None = None
    tenant: str = "default"
    user_id: str | None = None
    session_id: str | None = None
    conversation_id: str | None = None
    context: ContextLimits | None = None
    text_generation: dict[str, Any] | None = None
    embedding: dict[str, Any] | None = None
    image_generation: dict[str, Any] | None = None
    image_editing: dict[str, Any] | None = None
    image_to_text: dict[str, Any] | None = None
    image_processing: dict[str, Any] | None = None
    summarization: dict[str, Any] | None = None
    conversation_items: dict[str, Any] | None = None
    extra: dict[str, str] = field(default_factory=dict[str, str])
    stream: bool = False
    created_at: int
    ttl_ms: int | None = None
    execution_timeout_ms: int | None = None
    max_attempts: int = 0
    """0: as many as fit before its deadline."""
    requirements: Requirements | None = None
    output: OutputSpec | None = None
    callback_url: str | None = None
    callback_statuses: bool | None = None
    metadata: dict[str, str] = field(default_factory=dict[str, str])
    redriven_from: str | None = None
    """The request whose dead letter was run again as this one."""
    history: AttemptHistory | None = None
    """Attempts of the request that it was redriven from."""
    response_object: str | None = None
    """What OpenAI's response object repeats of its request, as JSON. None: no response is stored for it."""
    input_artifact: InputArtifact | None = None
    start_after: int | None = None
    """It does not start before this time."""

    @property
    def payload(self) -> dict[str, Any]:
        """The payload of the task; empty when the record has none."""
        if self.task not in PAYLOAD_FIELDS:
            return {}
        return getattr(self, self.task) or {}


@record
class ArtifactRef(Record):
    """Bytes that are kept beside Kafka, under the record's tenant."""

    artifact_id: str
    uri: str
    media_type: str
    size_bytes: int
    sha256: str


@record
class Preview(Record):
    """An image on its way: `image` has the fields of ImageOutput."""

    step: int
    steps: int
    image: dict[str, Any]


@record
class ResultEvent(Record):
    """A chunk, a preview or the one outcome of a request; readers fold them (`penstock.schemas.fold`)."""

    request_id: str
    tenant: str
    kind: str
    origin: Origin
    attempt: int
    epoch: int
    task: str
    created_at: int
    worker_id: str
    text: str | None = None
    token_ids: list[int] | None = None
    first_token_index: int | None = None
    text_offset: int | None = None
    status: str | None = None
    text_generation: dict[str, Any] | None = None
    embedding: dict[str, Any] | None = None
    image_generation: dict[str, Any] | None = None
    image_editing: dict[str, Any] | None = None
    image_to_text: dict[str, Any] | None = None
    image_processing: dict[str, Any] | None = None
    summarization: dict[str, Any] | None = None
    conversation_items: dict[str, Any] | None = None
    output_artifact: ArtifactRef | None = None
    finish_reason: str | None = None
    usage: Usage | None = None
    timings: Timings | None = None
    model: str | None = None
    device: str | None = None
    measured_memory_bytes: int | None = None
    error: ErrorInfo | None = None
    metadata: dict[str, str] = field(default_factory=dict[str, str])
    preview: Preview | None = None
    tool_call_pieces: list[dict[str, Any]] | None = None
    cached_tokens: int | None = None
    since_epoch: int | None = None
    since_attempt: int | None = None
    history: AttemptHistory | None = None
    user_id: str | None = None
    session_id: str | None = None
    correlation_id: str | None = None
    token_logprobs: list[dict[str, Any]] | None = None
    first_logprob_index: int | None = None
    context: ContextHeld | None = None
    key_id: str | None = None

    @property
    def since(self) -> tuple[int, int] | None:
        """The (epoch, attempt) from which on what was published counts; None when the text begins with this attempt."""
        if self.since_epoch is None or self.since_attempt is None:
            return None
        return self.since_epoch, self.since_attempt

    @property
    def output(self) -> dict[str, Any] | None:
        """The output of the task, on a completed terminal event, without the fields that are null."""
        found = self._output
        return None if found is None else {name: value for name, value in found.items() if value is not None}

    @property
    def _output(self) -> dict[str, Any] | None:
        return getattr(self, self.task) if self.task in PAYLOAD_FIELDS else None

    @property
    def is_terminal(self) -> bool:
        return self.kind == "terminal"

    @property
    def output_text(self) -> str | None:
        output = self._output
        return None if output is None else output.get("text")


@record
class WaitingFor(Record):
    """Why a request does not run yet. `reason` is one of WAITING_REASONS."""

    reason: str
    position: int | None = None
    need_bytes: int | None = None
    free_bytes: int | None = None
    estimated_start_at: int | None = None


WAITING_REASONS = (
    "class", "tenant_share", "model_loading", "memory", "conversation", "slack", "paused", "scheduled",
    "no_worker", "transaction",
)  # fmt: skip
TIMELESS_REASONS = frozenset({"no_worker", "transaction", "paused", "memory"})
"""Nobody knows when these end: that is for people and other programs to say."""


@record
class StatusEvent(Record):
    """Where a request stands; the latest by (epoch, attempt, rank) counts."""

    request_id: str
    tenant: str
    status: str
    done: bool
    rank: int
    attempt: int
    epoch: int
    origin: Origin
    worker_id: str
    created_at: int
    detail: str | None = None
    position: int | None = None
    model: str | None = None
    waiting_for: WaitingFor | None = None
    model_reason: str | None = None
    ttl_ms: int | None = None
    step: int | None = None
    steps: int | None = None
    history: AttemptHistory | None = None
    user_id: str | None = None
    session_id: str | None = None
    correlation_id: str | None = None


@record
class ControlCommand(Record):
    """An order: cancel, reprioritize, erase or end a request (`end_lost`: its record is gone from its topic), or
    delete_conversation, whose `request_id` is empty.
    """

    kind: str
    request_id: str
    tenant: str
    priority: int | None = None
    reason: str | None = None
    created_at: int
    created_by: str | None = None
    origin: Origin | None = None
    conversation_id: str | None = None
    place: Place | None = None
    task: str | None = None


@record
class ConversationFork(Record):
    """Two conversations that share their beginning, up to the message at the offset `through`.

    `conversation_id` names the other one; `topic_id` is Kafka's id of the topic that was forked.
    """

    conversation_id: str
    through: int
    topic_id: str | None = None


@record
class ConversationMessage(Record):
    """One message of a conversation, keyed by `conversation_message_key`; or a record about forks (`fork`)."""

    request_id: str | None = None
    tenant: str
    conversation_id: str
    direction: str
    index: int = 0
    epoch: int = 0
    attempt: int = 1
    role: str
    content: str
    name: str | None = None
    created_at: int
    model: str | None = None
    finish_reason: str | None = None
    usage: Usage | None = None
    covers_through: int | None = None
    metadata: dict[str, str] = field(default_factory=dict[str, str])
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    artifacts: list[ArtifactRef] = field(default_factory=list[ArtifactRef])
    reasoning_content: str | None = None
    fork: ConversationFork | None = None


def conversation_message_key(message: ConversationMessage) -> str:
    """`{request_id}/in/{n}/{epoch}`, `{request_id}/out/{epoch}` or `{request_id}/summary/{epoch}`: never rewritten."""
    if message.direction == "in":
        return f"{message.request_id}/in/{message.index}/{message.epoch}"
    return f"{message.request_id}/{message.direction}/{message.epoch}"


@record
class DeadLetter(Record):
    """A record that could not be worked on, with its original bytes."""

    request_id: str | None = None
    tenant: str | None = None
    reason_code: str
    reason: str
    original: bytes
    original_key: bytes | None = None
    original_headers: dict[str, bytes] = field(default_factory=dict[str, bytes])
    origin: Origin
    worker_id: str
    attempts: int = 0
    created_at: int
    task: str | None = None
    model: str | None = None
    error_chain: list[str] = field(default_factory=list[str])
    history: AttemptHistory | None = None


@record
class DeadLetterAction(Record):
    """What was done with a dead letter. It is on the letter's partition, behind it."""

    kind: str
    offset: int
    request_id: str | None = None
    created_at: int
    created_by: str | None = None


@record
class ModelInfo(Record):
    """A model that workers offer."""

    model: str
    tasks: list[str]
    aliases: list[str] = field(default_factory=list[str])
    pool: str | None = None
    engine: str
    context_window: int | None = None
    max_output_tokens: int | None = None
    dimensions: int | None = None
    defaults: dict[str, str] = field(default_factory=dict[str, str])
    state: str
    weights_bytes: int | None = None
    updated_at: int
    worker_id: str
    priority: int | None = None
    pinned: bool = False
    max_batch_size: int | None = None
    reason: str | None = None
    load_seconds: float | None = None
    progress: float | None = None
    replicas_ready: int = 0
    revision: str | None = None
    cause: str | None = None


@record
class DesiredState(Record):
    """What an operator wants of a model or class: all of it, for the topic keeps one record a key."""

    kind: str
    name: str
    action: str
    created_at: int
    pool: str | None = None
    loaded: bool | None = None
    pinned: bool | None = None
    paused: bool = False
    removed: bool = False
    entry: str | None = None
    created_by: str | None = None


@record
class ModelState(Record):
    """A model on a worker."""

    model: str
    state: str
    memory_bytes: int | None = None
    replica: int = 0
    device: str | None = None
    reserved_bytes: int | None = None
    pinned: bool = False
    reason: str | None = None
    load_seconds: float | None = None
    progress: float | None = None
    queued: int = 0
    running: int = 0
    cause: str | None = None
    tasks: list[str] = field(default_factory=list[str])
    aliases: list[str] = field(default_factory=list[str])
    abilities: list[str] = field(default_factory=list[str])
    entry: str | None = None
    code: str | None = None
    peak_bytes: int | None = None


@record
class DeviceHolder(Record):
    """Memory of a device that a model was granted, in bytes."""

    model: str
    bytes: int
    measured_bytes: int | None = None


@record
class DeviceState(Record):
    """A device of a worker, in bytes."""

    device: str
    kind: str
    total_bytes: int
    reserved_bytes: int
    used_bytes: int
    limit_bytes: int | None = None
    foreign_bytes: int | None = None
    measured_bytes: int | None = None
    holders: list[DeviceHolder] = field(default_factory=list[DeviceHolder])


@record
class WorkerState(Record):
    """What a worker holds and does."""

    worker_id: str
    state: str
    started_at: int
    updated_at: int
    pool: str | None = None
    assigned: list[str] = field(default_factory=list[str])
    queued: dict[str, int] = field(default_factory=dict[str, int])
    running: int = 0
    models: list[ModelState] = field(default_factory=list[ModelState])
    devices: list[DeviceState] = field(default_factory=list[DeviceState])
    completed_total: int = 0
    failed_total: int = 0
    paused: list[str] = field(default_factory=list[str])
    waiting: dict[str, int] = field(default_factory=dict[str, int])
    reason: str | None = None
    evictions_total: int = 0
    observed_revision: int | None = None
    observed_topic_id: str | None = None
    version: str | None = None
    host: str | None = None
    pid: int | None = None
    committed: list[int] = field(default_factory=list[int])
    lag: list[int] = field(default_factory=list[int])
    expiring_certificates: dict[str, int] = field(default_factory=dict[str, int])


@record
class DeliveryAttempt(Record):
    """One call of a receiver: the status code that it answered, or why there was none."""

    attempt: int
    at: int
    duration_ms: int
    status_code: int | None = None
    error: str | None = None


@record
class WebhookDelivery(Record):
    """What became of a webhook so far; the latest record of its id counts. `place`: the terminal event that it reports.

    `state` is waiting, delivered, failed, or dropped, which means that its request was erased.
    """

    webhook_id: str
    request_id: str
    tenant: str
    type: str
    url: str
    state: str
    place: Place
    created_at: int
    updated_at: int
    next_at: int | None = None
    attempts: list[DeliveryAttempt] = field(default_factory=list[DeliveryAttempt])


@record
class SummarizePolicy(Record):
    """When a conversation is summed up: after so many turns or tokens since the last summary, whichever comes first.

    With neither it is never.
    """

    every_turns: int | None = None
    every_tokens: int | None = None
    model: str | None = None


@record
class ConversationFacts(Record):
    """What callers set of a conversation beside its messages: all of it, for the topic keeps one record a key.

    `topic_id` is Kafka's id of the conversation's topic. `summarize` is None where the settings decide.
    """

    tenant: str
    conversation_id: str
    updated_at: int
    topic_id: str | None = None
    title: str | None = None
    metadata: dict[str, str] = field(default_factory=dict[str, str])
    summarize: SummarizePolicy | None = None


@record
class KeyClaim(Record):
    """A gateway is about to submit the content of this hash under the id that an Idempotency-Key stands for."""

    request_id: str
    tenant: str
    content: str
    created_at: int


@record
class GatewayState(Record):
    """What a gateway, or a process beside it, reports of itself. `kind`: gateway, bridge, webhooks or summarizer."""

    id: str
    kind: str
    version: str
    host: str
    pid: int
    url: str | None = None
    started_at: int
    reported_at: int
    status: str
    reason: str | None = None
    lag: dict[str, int] = field(default_factory=dict[str, int])
    streams: int | None = None
    sockets: int | None = None
    http_requests: int | None = None
    view_bytes: int | None = None
    oldest_waiting_at: int | None = None
    expiring_certificates: dict[str, int] = field(default_factory=dict[str, int])


@record
class KeyState(Record):
    """An API key, that a key is revoked, or limits of a tenant: all of it, for the topic keeps one record a key."""

    kind: str
    id: str
    updated_at: int
    updated_by: str | None = None
    entry: str | None = None


@record
class AuditEvent(Record):
    """An action of an operator: one record before it is done, and one of the same id with its outcome."""

    id: str
    at: int
    action: str
    target: str | None = None
    parameters: str | None = None
    key_id: str | None = None
    key_name: str | None = None
    tenant: str | None = None
    user: str | None = None
    address: str | None = None
    status: int | None = None


@record
class UsageShare(Record):
    """What was counted on one partition of the result topic, of outcomes before the offset `through`.

    `partition` is -1 for what was counted on an earlier result topic.
    """

    partition: int
    through: int
    last_at: int
    completed: int = 0
    failed: int = 0
    cancelled: int = 0
    expired: int = 0
    dead_lettered: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    embedding_tokens: int = 0
    images: int = 0
    pixels: int = 0
    device_ms: int = 0


@record
class UsageTotal(Record):
    """What the requests of one UTC day (YYYY-MM-DD), tenant, model and key used, as the sum of shares.

    `topic_id` is Kafka's id of the result topic to whose offsets `through` refers.
    """

    day: str
    tenant: str
    model: str | None = None
    key_id: str | None = None
    topic_id: str
    updated_at: int
    shares: list[UsageShare]


RECORDS: tuple[type[Record], ...] = (
    InferenceRequest,
    ResultEvent,
    StatusEvent,
    ControlCommand,
    ConversationMessage,
    DeadLetter,
    ModelInfo,
    DesiredState,
    WorkerState,
    DeadLetterAction,
    WebhookDelivery,
    ConversationFacts,
    KeyClaim,
    GatewayState,
    KeyState,
    AuditEvent,
    UsageTotal,
)
"""In the order of their schema ids; append only."""
