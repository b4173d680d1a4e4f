"""The answers about requests, and what all answers share, as models: for OpenAPI, and for tests of real answers.

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


class Accepted(Answer):
    """A request that stands on its topic, acknowledged by all in-sync replicas."""

    object: Literal["request"]
    request_id: str
    status: Literal["accepted"]
    done: Literal[False]
    status_url: str
    events_url: str


class DeliveryAttempt(Answer):
    """One call of a receiver: the status code that it answered, or why there was none."""

    attempt: int
    at: Time
    duration_ms: int
    status_code: int | None
    error: str | None


class Delivery(Answer):
    """What became of a request's webhook."""

    object: Literal["delivery"]
    webhook_id: Annotated[str, Field(description="The same at every attempt: receivers drop repeats by it.")]
    request_id: str
    type: Annotated[str, Field(description="`request.` and how the request ended, as request.completed.")]
    url: str
    state: Annotated[str, Field(description="waiting, delivered, or failed: then a dead letter has it.")]
    created_at: Time
    updated_at: Time
    next_at: Annotated[Time | None, Field(description="When it is tried again; null when it is not.")]
    attempts: Annotated[list[DeliveryAttempt], Field(description="Oldest first.")]


class WaitingFor(Answer):
    """What a request waits for. Estimates are made of what was measured; they are not promises."""

    reason: Annotated[
        str,
        Field(
            description="class, tenant_share, model_loading, memory, conversation, slack, paused, scheduled, "
            "no_worker or transaction; show one that you do not know as it is."
        ),
    ]
    position: Annotated[int | None, Field(description="Place in its worker's queue, 0 the next.")]
    need_bytes: Annotated[int | None, Field(description="Memory that it waits for.")]
    free_bytes: Annotated[int | None, Field(description="Memory free on the device that has the most.")]
    estimated_start_at: Time | None


class RequestPlan(Answer):
    """What would become of a request, by the workers' last reports; estimates, made of what was measured."""

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


class PromptLogprob(Answer):
    """A token of the prompt with the logarithm of its probability; the first has none."""

    token: str
    logprob: float | None
    bytes: list[int] | None = None
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


class MadeImage(Answer):
    """An image that was made."""

    artifact_id: str
    url: Annotated[str, Field(description="Its bytes at this gateway.")]
    media_type: str
    width: int
    height: int
    seed: int | None = None
    sha256: str
    bytes: int | None = None
    expires_at: Time | None = None


class ContextHeld(Answer):
    """What of its conversation a turn's prompt held, in turns."""

    turns: Annotated[int, Field(description="Earlier turns that stood in the prompt.")]
    summarized_turns: Annotated[int, Field(description="Earlier turns for which a summary stood there.")]
    dropped_turns: Annotated[int, Field(description="Earlier turns that were left out.")]
    summary_through: Annotated[int | None, Field(description="Offset of the last record that the summary stands for.")]
    dropped_tokens: Annotated[int | None, Field(description="About how many tokens the dropped turns have.")] = None


class Result(Answer):
    """The output of a completed request: the fields of its task. A large one is an artifact."""

    text: str | None = None
    tool_calls: list[ToolCall] | None = None
    logprobs: list[Logprob] | None = None
    prompt_logprobs: list[PromptLogprob] | None = None
    choices: Annotated[list[TextChoice] | None, Field(description="All answers when n was above 1.")] = None
    embeddings: list[list[float]] | None = None
    dimensions: int | None = None
    images: list[MadeImage] | None = None
    offsets: Annotated[list[int] | None, Field(description="Where appended items stand in their conversation.")] = None
    artifact: ArtifactReference | None = None
    finish_reason: str | None = None
    usage: UsageCounts | None = None
    covers_through: Annotated[
        int | None, Field(description="Of a conversation's summary: offset of the last record that it stands for.")
    ] = None
    context: Annotated[ContextHeld | None, Field(description="Of a turn of a conversation.")] = None


class Timings(Answer):
    """Where the time went, in milliseconds."""

    queued_ms: int
    admission_ms: int
    load_ms: int
    run_ms: int
    first_token_ms: int | None


class AttemptFailure(Answer):
    code: str
    message: str


class MemoryOfAttempt(Answer):
    """Memory of its device as the attempt ended, in bytes."""

    engine_bytes: Annotated[int | None, Field(description="Measured of its engine.")]
    limit_bytes: int | None
    reserved_bytes: int | None
    measured_bytes: int | None
    foreign_bytes: int | None


class Attempt(Answer):
    """One attempt to run a request."""

    attempt: Annotated[int, Field(description="The number that its events carry; it begins anew on another worker.")]
    worker_id: str | None
    device: str | None
    error: Annotated[AttemptFailure | None, Field(description="Null for an attempt that completed.")]
    started_at: Time | None
    ended_at: Annotated[Time | None, Field(description="Null if its worker was killed.")]
    memory: MemoryOfAttempt | None


class RequestFacts(Answer):
    """Where a request stands. A status that you do not know is one that is not done."""

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
    worker_id: Annotated[str | None, Field(description="The worker that reported the status.")] = None
    device: Annotated[str | None, Field(description="Where it runs or ran; null if that is not known.")] = None
    status_at: Annotated[Time | None, Field(description="When the status was reported.")] = None
    first_token_at: Annotated[
        Time | None, Field(description="When the first piece of its stream came, while it runs; see `timings` later.")
    ] = None
    ttl_ms: Annotated[
        int | None, Field(description="Its time to live when the system chose one, from its acceptance on.")
    ] = None
    created_at: Time | None
    start_after: Annotated[
        Time | None, Field(description="It does not start before; null where no such time lay ahead.")
    ] = None
    finished_at: Time | None
    timings: Timings | None
    error: ErrorFacts | None
    user_id: str | None
    session_id: str | None
    correlation_id: Annotated[str | None, Field(description="That of its metadata.")]
    redriven_from: Annotated[str | None, Field(description="The request whose dead letter was run again.")] = None
    history: Annotated[
        list[Attempt] | None, Field(description="The newest attempts, where there was more than one that completed.")
    ] = None
    history_dropped: Annotated[int | None, Field(description="Older attempts that are left out.")] = None


class RequestObject(RequestFacts):
    """A request and where it stands. A status that you do not know is one that is not done."""

    result: Result | None
    metadata: Metadata


class RequestOfTenant(RequestFacts):
    """Where a request of any tenant stands, without its result and metadata."""

    tenant: str


Cursor = Annotated[str, Field(description="For `changed_since`: behind all that this answer holds.")]


class RequestPage(Page[T], Generic[T]):
    """A page of requests."""

    cursor: Cursor


class Changes(Page[T], Generic[T]):
    """Requests that changed, the one that changed first in front. While `has_more`, ask again with `cursor`."""

    cursor: Annotated[str | None, Field(description="For the next call; null with `reset`.")]
    left: Annotated[
        list[str], Field(description="Ids of changed requests that the filters do not match now, and of erased ones.")
    ]
    reset: Annotated[bool, Field(description="The cursor is of another gateway, or too old: read the list again.")]


class OwnChanges(Changes[RequestFacts]):
    """Requests that changed, without results and metadata."""


class ChangesOfTenant(Changes[RequestOfTenant]):
    """Requests of any tenant that changed."""


class RequestInput(Answer):
    """What was asked for. `request` is a body of `POST /v1/requests` that asks for the same."""

    object: Literal["request.input"]
    request_id: str
    traceparent: Annotated[str | None, Field(description="Of its record: the trace that it belongs to.")]
    request: Json


AcceptedBefore = Annotated[
    str, Field(description="Send it with the next calls: they leave out requests accepted since.")
]


class Cancellation(Answer):
    """How many were asked to end, and the first of them."""

    object: Literal["cancellation"]
    dry_run: bool
    count: int
    request_ids: list[str]
    has_more: Annotated[bool, Field(description="The limit was reached; repeat the call for the others.")]
    accepted_before: AcceptedBefore


class Reprioritization(Answer):
    """How many were given another priority, and the first of them."""

    object: Literal["reprioritization"]
    priority: int
    dry_run: bool
    count: int
    request_ids: list[str]
    has_more: Annotated[bool, Field(description="The limit was reached; repeat the call for the others.")]
    accepted_before: AcceptedBefore


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
    key_id: Annotated[str | None, Field(description="Of the caller's key; null where there are no keys.")]
    scopes: Annotated[list[str], Field(description="What the caller may do.")]
    limits: Json
