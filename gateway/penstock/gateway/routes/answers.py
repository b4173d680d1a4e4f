"""The answers of the native routes as models: JSON Schema for OpenAPI, and what tests hold real answers against.

Routes give dictionaries; nothing is validated on the way out. Answers may gain fields.
"""

from __future__ import annotations

from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from penstock.schemas.bodies import ToolCall

T = TypeVar("T")
Time = Annotated[str, Field(json_schema_extra={"format": "date-time"})]
Metadata = dict[str, str]
Json = dict[str, Any]


class Answer(BaseModel):
    """Strict, so that a test sees a number that became text."""

    model_config = ConfigDict(strict=True, extra="allow")


class Page(Answer, Generic[T]):
    """A page of a list. Go on with `after` = `last_id`."""

    object: Literal["list"]
    data: list[T]
    has_more: bool
    first_id: str | None
    last_id: str | None


# --- requests


class Accepted(Answer):
    """A request that stands on its topic, acknowledged by all in-sync replicas."""

    object: Literal["request"]
    request_id: str
    status: Literal["accepted"]
    done: Literal[False]
    status_url: str
    events_url: str


class WaitingFor(Answer):
    """What a request waits for. Estimates are made of what was measured; they are not promises."""

    reason: Annotated[
        str,
        Field(
            description="class, tenant_share, model_loading, memory, conversation, slack, paused or no_worker; "
            "show one that you do not know as it is."
        ),
    ]
    position: Annotated[int | None, Field(description="Place in its worker's queue, 0 the next.")]
    need_bytes: Annotated[int | None, Field(description="Memory that it waits for.")]
    free_bytes: Annotated[int | None, Field(description="Memory free on the device that has the most.")]
    estimated_start_at: Time | None


class RequestPlan(Answer):
    """What would become of a request, by what workers last told; estimates, made of what was measured."""

    object: Literal["request.plan"]
    task: str
    pool: str | None
    model: Annotated[str | None, Field(description="Null when it is left to the worker.")]
    model_reason: Annotated[str, Field(description="Why this model, for people.")]
    class_: Annotated[Literal["high", "medium", "low"], Field(alias="class", description="Of its priority.")]
    worker_id: str | None
    device: str | None
    need_bytes: Annotated[int | None, Field(description="Memory of its model; what the request requires at least.")]
    free_bytes: Annotated[int | None, Field(description="What is free on that device now.")]
    waiting_for: Annotated[WaitingFor | None, Field(description="Null when it would start at once.")]
    estimated_wait_ms: int | None
    estimated_run_ms: int | None


class ErrorFacts(Answer):
    """Why it did not work."""

    message: Annotated[str, Field(description="For people.")]
    type: Annotated[str, Field(description="The family of the error, as OpenAI names them.")]
    code: Annotated[str, Field(description="Stable; decide by this.")]
    param: Annotated[str | None, Field(description="The field at fault.")]
    request_id: str | None
    retryable: Annotated[bool, Field(description="Whether the same request may succeed later.")]
    details: Json | None


class Error(Answer):
    """The one shape of errors."""

    error: ErrorFacts


class UsageCounts(Answer):
    """Counts of tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    cached_tokens: Annotated[int | None, Field(description="Of the prompt, not computed again; if it is known.")] = None


class LogprobCandidate(Answer):
    token: str
    logprob: float
    bytes: list[int] | None = None


class Logprob(LogprobCandidate):
    """A token of the answer with the logarithm of its probability."""

    top_logprobs: list[LogprobCandidate] | None = None


class TextChoice(Answer):
    """One of several answers."""

    index: int
    text: str
    finish_reason: str | None = None
    tool_calls: list[ToolCall] | None = None
    logprobs: list[Logprob] | None = None


class ArtifactReference(Answer):
    """Where a large output is kept."""

    artifact_id: str
    uri: str
    url: str
    media_type: str
    size_bytes: int
    sha256: str


class Result(Answer):
    """The output of a completed request: the fields of its task. A large one is an artifact."""

    text: str | None = None
    tool_calls: list[ToolCall] | None = None
    logprobs: list[Logprob] | None = None
    choices: Annotated[list[TextChoice] | None, Field(description="All answers when n was above 1.")] = None
    embeddings: list[list[float]] | None = None
    dimensions: int | None = None
    artifact: ArtifactReference | None = None
    finish_reason: str | None = None
    usage: UsageCounts | None = None


class Timings(Answer):
    """Where the time went, in milliseconds."""

    queued_ms: int
    admission_ms: int
    load_ms: int
    run_ms: int
    first_token_ms: int | None


class RequestObject(Answer):
    """A request and where it stands. A status that you do not know is one that is not done."""

    object: Literal["request"]
    request_id: str
    task: str
    status: str
    done: bool
    attempt: int
    priority: int
    model: str | None
    pool: str | None
    conversation_id: str | None
    position: int | None
    detail: str | None
    waiting_for: Annotated[WaitingFor | None, Field(description="While it waits, as of its latest status.")] = None
    model_reason: Annotated[
        str | None, Field(description="Why this model was chosen for a request that named none.")
    ] = None
    ttl_ms: Annotated[
        int | None, Field(description="Its time to live when the system chose one, from its acceptance on.")
    ] = None
    created_at: Time | None
    finished_at: Time | None
    timings: Timings | None
    result: Result | None
    error: ErrorFacts | None
    metadata: Metadata


class CancelMany(Answer):
    """Which requests to cancel: ids, or a filter."""

    model_config = ConfigDict(extra="forbid")

    ids: Annotated[list[str] | None, Field(max_length=1_000)] = None
    status: str | None = None
    conversation_id: str | int | None = None


class Cancellation(Answer):
    """How many were asked to end, and the first of them."""

    object: Literal["cancellation"]
    count: int
    request_ids: list[str]


class RequestDeleted(Answer):
    object: Literal["request.deleted"]
    request_id: str
    deleted: Literal[True]


class Rates(Answer):
    """Means over the last minute."""

    accepted_per_s: float
    ended_per_s: float


class Stats(Answer):
    """What the caller's tenant has under way, and its limits."""

    object: Literal["stats"]
    tenant: str
    inflight: int
    rates: Rates
    outcomes: dict[str, int]
    conversations: int
    limits: Json


class AdminStats(Answer):
    """Queues, workers and models of all tenants together, as this gateway knows them."""

    object: Literal["stats"]
    queues: dict[str, Json]
    inflight: int
    rates: Rates
    outcomes: dict[str, int]
    clients: dict[str, int]
    workers: list[Json]
    models: list[Json]


class DeviceHolder(Answer):
    model: str
    bytes: int


class Device(Answer):
    """A device of a worker, in bytes; null is what the worker does not tell."""

    worker_id: str
    device: str
    kind: str
    limit_bytes: int
    reserved_bytes: int
    measured_bytes: int
    foreign_bytes: int | None
    holders: list[DeviceHolder] | None


# --- conversations


class NewConversation(Answer):
    """All optional."""

    model_config = ConfigDict(extra="forbid")

    id: Annotated[str | int | None, Field(description="[A-Za-z0-9_-]{1,128}; without one it is made.")] = None
    metadata: Annotated[Json | None, Field(description="Only empty.")] = None


class Conversation(Answer):
    object: Literal["conversation"]
    id: str
    created_at: Annotated[int | None, Field(description="Unix seconds, as OpenAI has it; null in lists.")]
    metadata: Json


class ConversationDeleted(Answer):
    object: Literal["conversation.deleted"]
    id: str
    deleted: Literal[True]


class ItemPart(Answer):
    type: Literal["input_text", "output_text"]
    text: str


class ConversationItem(Answer):
    """A message that counts."""

    object: Literal["conversation.item"]
    type: Literal["message"]
    id: str
    role: str
    status: Literal["completed"]
    content: list[ItemPart]
    created_at: Annotated[int, Field(description="Unix seconds.")]
    request_id: str | None
    offset: int


class ConversationRecordBody(Answer):
    """A record of the topic, whether it counts or not."""

    offset: int
    key: str | None
    time: Time | None
    message: Json | None


class Replay(Answer):
    object: Literal["list"]
    data: list[ConversationRecordBody]
    has_more: bool
    first_id: int | None
    last_id: int | None
    next_offset: int


# --- the rest


class ArtifactBody(Answer):
    object: Literal["artifact"]
    id: str
    artifact_id: str
    media_type: str
    bytes: int
    sha256: str
    content_url: str
    url: str
    width: int | None
    height: int | None
    seed: int | None
    created_at: Time | None
    expires_at: Time | None


class ArtifactDeleted(Answer):
    object: Literal["artifact.deleted"]
    id: str
    deleted: bool


class ArtifactUrl(Answer):
    """`url` begins with `/` when it is one of this gateway."""

    object: Literal["artifact.url"]
    id: str
    url: str
    expires_at: Time


class UrlLifetime(Answer):
    ttl_s: float | None = None


class SweptArtifact(Answer):
    tenant: str
    artifact_id: str
    reason: Literal["expired", "orphan", "partial"]
    bytes: int


class ArtifactSweep(Answer):
    """How many artifacts by reason, and the first thousand of them."""

    object: Literal["artifact.sweep"]
    dry_run: bool
    artifacts: dict[str, int]
    bytes: int
    released_conversations: int
    data: list[SweptArtifact]


class Ticket(Answer):
    """Connect with `/v1/ws?ticket=…` within `expires_in` seconds; it works once per gateway."""

    object: Literal["ticket"]
    ticket: str
    expires_in: int
    expires_at: Time


class Model(Answer):
    """OpenAI's model object with Penstock's facts beside."""

    object: Literal["model"]
    id: str
    created: int
    owned_by: str
    aliases: list[str]
    tasks: list[str]
    pool: str | None
    state: str
    reason: Annotated[str | None, Field(description="Why it is in this state.")]
    progress: Annotated[float | None, Field(description="How much of its loading is done, 0 to 1.")]
    load_seconds: float | None
    context_window: int | None
    max_output_tokens: int | None
    dimensions: int | None
    defaults: Annotated[Json, Field(description="Applied to requests that leave these fields out.")]
    available: Annotated[bool, Field(description="Whether a live worker has it; without one its requests wait.")]


class ReplicaState(Answer):
    """An engine of a model on a worker, in bytes and seconds."""

    worker_id: str
    replica: int
    state: str
    device: str | None
    memory_bytes: int | None
    reserved_bytes: int | None
    queued: int
    running: int
    reason: str | None
    progress: float | None
    load_seconds: float | None


class Desired(Answer):
    """What is wanted of a model or class: all of it. Null is: as configured."""

    kind: Literal["model", "class"]
    name: str
    pool: str | None
    action: Annotated[str, Field(description="The last order.")]
    loaded: bool | None
    pinned: bool | None
    paused: bool
    removed: bool
    created_at: Time | None
    created_by: str | None


class AdminModel(Model):
    """A model as operators see it."""

    engine: str
    priority: int | None
    pinned: bool
    paused: bool
    max_batch_size: int | None
    weights_bytes: int | None
    revision: str | None
    desired: Desired | None
    replicas: list[ReplicaState]


class Health(Answer):
    status: Literal["ok"]


class Readiness(Answer):
    status: Literal["ready", "degraded", "starting", "unavailable"]
    models_without_worker: list[str]
    reason: str | None


# --- the registry


class RegistrySchema(Answer):
    schema_: Annotated[str, Field(alias="schema")]


class RegistrySubjectVersion(Answer):
    subject: str
    version: int


class RegistryVersion(RegistrySubjectVersion):
    id: int
    schema_: Annotated[str, Field(alias="schema")]


class RegistryId(Answer):
    id: int


class RegistryErrorBody(Answer):
    error_code: int
    message: str
