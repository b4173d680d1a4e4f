"""The answers about models, devices and the system itself, as `answers` has those of requests."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from penstock.gateway.routes.answers import Answer, Attempt, ErrorFacts, Json, Page, Rates, Time


class ProcessCount(Answer):
    alive: int
    known: int


class KafkaAddress(Answer):
    bootstrap_servers: str
    topic_prefix: str


class AdminStats(Answer):
    """Queues, workers and models of all tenants together, as this gateway knows them."""

    object: Literal["stats"]
    queues: dict[str, Json]
    inflight: int
    rates: Rates
    outcomes: dict[str, int]
    clients: dict[str, int]
    workers: list[Json]
    worker_late_s: float
    processes: Annotated[dict[str, ProcessCount], Field(description="Gateways and those beside them, by kind.")]
    models: list[Json]
    kafka: Annotated[KafkaAddress, Field(description="The cluster, by the gateway's settings.")]


class Call(Answer):
    method: Literal["POST"]
    path: str
    body: Json | None


class ProblemAction(Answer):
    """What an operator does about a problem; `call` does the same as `command`, if a call can."""

    label: str
    command: str
    call: Call | None


class SystemProblem(Answer):
    """`since`: when it began, or when this gateway first saw it."""

    object: Literal["problem"]
    problem: Annotated[str, Field(description="A stable code.")]
    subject: Annotated[str | None, Field(description="The model, class, worker, tenant or reason that it is about.")]
    pool: str | None
    since: Time
    affects: str
    cause: str
    action: ProblemAction


class Problems(Answer):
    object: Literal["problems"]
    summary: Annotated[str, Field(description="One sentence: that all is well, with figures, or how many there are.")]
    data: list[SystemProblem]


class LineRates(Answer):
    """Means over the last minute. `left_per_s`: began to run, or ended."""

    accepted_per_s: float
    left_per_s: float


class WaitingLine(Answer):
    """Requests of one tenant, class, task, model and pool that wait and may start now."""

    object: Literal["waiting.line"]
    tenant: str
    klass: Annotated[str, Field(alias="class", description="high, medium or low.")]
    task: Annotated[str, Field(description="`others`: of requests beyond the lines that a gateway keeps, together.")]
    model: Annotated[str | None, Field(description="Null: a request left the choice, and no worker has made it.")]
    pool: str | None
    depth: int
    oldest_age_s: float | None
    rates: LineRates
    empty_in_s: Annotated[float | None, Field(description="At the rates of the last seconds; null: never.")]
    reasons: Annotated[
        dict[str, int],
        Field(description="What they wait for, the commonest first, as the newest status of each says."),
    ]


class AllWaiting(Answer):
    """What waits, the longest lines first."""

    object: Literal["waiting"]
    depth: Annotated[int, Field(description="Of all lines, also of those that are left out.")]
    data: list[WaitingLine]
    omitted: Annotated[int, Field(description="Lines beyond the first 100.")]


class UsedLimit(Answer):
    used: int
    limit: int


class TenantShare(Answer):
    """A tenant that has requests under way, or had some in the last minute."""

    object: Literal["tenant"]
    tenant: str
    outstanding: int
    waiting: int
    share: Annotated[float, Field(description="Its part of the requests that run or ended in the last minute, 0 to 1.")]
    rates: Rates
    limits: Annotated[
        dict[str, UsedLimit], Field(description="Its limits that are counted in the log, with what is used of each.")
    ]


class Tenants(Answer):
    """Those near a limit first, then the busiest."""

    object: Literal["tenants"]
    data: list[TenantShare]
    omitted: Annotated[int, Field(description="Tenants beyond the first 100.")]


Counts = Annotated[list[int | None], Field(description="By step; null before the first of which anything is known.")]


class TimeQuantiles(Answer):
    """In ms by step, within 5 %; null where nothing was measured."""

    p50: list[int | None]
    p95: list[int | None]


class QueueHistory(Answer):
    """By step: the most that waited at the end of a minute, and the highest age of the oldest in seconds."""

    depth: Counts
    oldest_age_s: Counts


class DeviceHistory(Answer):
    """Memory in bytes, as the worker last reported it in a step; null where it reported none."""

    worker_id: str
    device: str
    limit_bytes: list[int | None]
    reserved_bytes: list[int | None]
    foreign_bytes: list[int | None]


class History(Answer):
    """One list for each figure, with a value for each step."""

    object: Literal["history"]
    step_s: int
    until: Annotated[Time, Field(description="The present: the last step is not complete.")]
    times: Annotated[list[int], Field(description="When each step begins, in seconds since the epoch.")]
    accepted: Counts
    ended: Annotated[dict[str, Counts], Field(description="By status.")]
    prompt_tokens: Counts
    completion_tokens: Counts
    images: Annotated[Counts, Field(description="In the outputs of what ended.")]
    wait_ms: Annotated[TimeQuantiles, Field(description="From accepted, or `start_after`, to the last run's begin.")]
    run_ms: TimeQuantiles
    first_token_ms: Annotated[TimeQuantiles, Field(description="From a worker's taking it.")]
    queues: Annotated[dict[str, QueueHistory], Field(description="By priority class.")]
    devices: list[DeviceHistory]
    devices_omitted: Annotated[int, Field(description="Devices beyond the first 64.")]


class UsageGroup(Answer):
    """What the requests of a group used, by the UTC day of their outcomes. It has the fields that are grouped by."""

    object: Literal["usage"]
    id: str
    day: str | None = None
    tenant: str | None = None
    model: Annotated[str | None, Field(description="Null where no model was chosen.")] = None
    key_id: Annotated[str | None, Field(description="Null without a key, or straight onto Kafka.")] = None
    requests: Annotated[int, Field(description="That ended; the sum of the five outcomes.")]
    completed: int
    failed: int
    cancelled: int
    expired: int
    dead_lettered: int
    input_tokens: Annotated[int, Field(description="Of prompts and embedded texts.")]
    output_tokens: int
    cached_tokens: Annotated[int, Field(description="Those of `input_tokens` that were cached.")]
    embedding_tokens: Annotated[int, Field(description="Those of `input_tokens` that were embedded.")]
    images: int
    pixels: int
    device_seconds: Annotated[
        float, Field(description="Run time of all attempts. Requests that run together count each their own.")
    ]


class ModelEvent(Answer):
    """Something that happened to an engine of a model on a worker."""

    object: Literal["model.event"]
    at: Annotated[Time, Field(description="When its worker reported it.")]
    event: Literal["loading", "loaded", "unloaded", "evicted", "failed"]
    model: str
    pool: str | None
    worker_id: str
    replica: int
    device: str | None
    load_seconds: float | None
    reason: str | None
    cause: Annotated[str | None, Field(description="What made a load fail.")]


class DeviceHolder(Answer):
    model: str
    bytes: Annotated[int, Field(description="Granted.")]
    measured_bytes: int | None


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


class Overview(Answer):
    """Each part as the route of its name answers."""

    object: Literal["overview"]
    problems: Problems
    stats: AdminStats
    devices: Page[Device]
    waiting: AllWaiting
    tenants: Tenants


class GatewayReport(Answer):
    """What a gateway, or a process beside it, last reported of itself; null is what its kind does not report."""

    id: Annotated[str, Field(description="Stable across restarts.")]
    kind: Annotated[str, Field(description="gateway, bridge, webhooks or summarizer; show one that you do not know.")]
    alive: Annotated[bool, Field(description="Whether it has reported within 7 s.")]
    version: str
    host: str
    pid: int
    url: Annotated[str | None, Field(description="Its API, or its health; null if it listens on all addresses.")]
    started_at: Time
    reported_at: Annotated[Time, Field(description="When this gateway received its newest report.")]
    status: Annotated[str, Field(description="ready, degraded, starting, unavailable or draining.")]
    reason: Annotated[str | None, Field(description="Why it is not ready.")]
    lag: Annotated[dict[str, int], Field(description="By topic, records that it has not read.")]
    streams: int | None
    sockets: int | None
    http_requests: int | None
    view_bytes: int | None
    oldest_waiting_at: Annotated[Time | None, Field(description="When the oldest webhook that waits came.")]


class Ticket(Answer):
    """What the ticket is for and reaches; null narrows nothing."""

    object: Literal["ticket"]
    ticket: str
    use: Literal["socket", "read", "session"]
    scopes: list[str]
    request_id: str | None
    conversation_id: str | None
    user_id: str | None
    expires_in: int
    expires_at: Time


class SessionEnd(Answer):
    object: Literal["ticket.deleted"]
    use: Literal["session"]


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
    peak_bytes: Annotated[int | None, Field(description="The most that it was measured to hold without its runs.")]
    queued: int
    running: int
    reason: str | None
    cause: str | None
    progress: float | None
    load_seconds: float | None


class Desired(Answer):
    """The desired state of a model or class: all of it. Null is: as configured."""

    kind: Literal["model", "class"]
    name: str
    pool: str | None
    revision: Annotated[int, Field(description="Of the last order; workers report the revision that they observed.")]
    action: Annotated[str, Field(description="The last order.")]
    loaded: bool | None
    pinned: bool | None
    paused: bool
    removed: bool
    created_at: Time | None
    created_by: str | None


class OrderInForce(Desired):
    """An order that makes a model or class other than it is configured."""

    object: Literal["order_in_force"]
    changes: Annotated[list[str], Field(description="In words: `paused`, `removed`, `kept loaded`, …")]
    entry: Annotated[Json | None, Field(description="The `[[models]]` table of a model that was added.")]


class AdminModel(Model):
    """A model as operators see it."""

    cause: Annotated[str | None, Field(description="What made its newest load fail.")]
    engine: str
    priority: int | None
    pinned: bool
    paused: Annotated[bool | None, Field(description="Null: unknown, as all orders while their topic is missing.")]
    preload: Annotated[bool | None, Field(description="Of an ordered entry; null: as the configuration has it.")]
    max_batch_size: int | None
    weights_bytes: int | None
    revision: Annotated[str | None, Field(description="Of its source.")]
    desired: Desired | None
    observed_revision: Annotated[
        int | None, Field(description="Orders up to this one are observed by all live workers of the pool.")
    ]
    waiting_workers: Annotated[list[str], Field(description="Live workers that have not observed the last order.")]
    missing_on: Annotated[list[str], Field(description="Live workers of its pool that do not serve it.")]
    replicas: list[ReplicaState]


class Order(Answer):
    """How far the live workers of a pool are with an order."""

    object: Literal["order"]
    revision: int
    pool: str | None
    observed: Annotated[bool, Field(description="There are workers, and all of them have observed it.")]
    observed_revision: int | None
    waiting_workers: list[str]


class Health(Answer):
    status: Literal["ok"]


class WaitingWithoutWorker(Answer):
    """Requests of one kind that no live worker can run; `since` is when the oldest was accepted."""

    task: str
    model: str | None
    pool: str | None
    requests: int
    since: Time | None
    reason: str


class Dependency(Answer):
    """The last probe of what the gateway depends on; `ok` is null before the first."""

    name: Literal["artifacts", "orders", "rights", "transactions", "keys", "usage", "key_topic", "audit"]
    ok: bool | None
    checked_at: Time | None
    reason: str | None


class Readiness(Answer):
    status: Literal["ready", "degraded", "starting", "unavailable"]
    models_without_worker: list[str]
    waiting_without_worker: list[WaitingWithoutWorker]
    dependencies: list[Dependency]
    file_differences: Annotated[list[str], Field(description="Where the files of workers of one pool differ.")]
    reason: str | None


class RecordPlace(Answer):
    topic: str
    partition: int
    offset: int


class DeadLetter(Answer):
    """A record that could not be worked on. `original`, `headers` and `error_chain` are shown of one letter alone, and
    only to a key of its tenant with the scope `read`.
    """

    object: Literal["dead_letter"]
    id: Annotated[str, Field(description="partition/offset on the topic of dead letters.")]
    created_at: Time | None
    request_id: str | None
    tenant: str | None
    task: str | None
    model: str | None
    reason: Annotated[str, Field(description="The code of the error.")]
    error: Annotated[str, Field(description="For people.")]
    attempts: int
    worker_id: str
    origin: Annotated[RecordPlace | None, Field(description="Where the first record of the request stands.")]
    bytes: Annotated[int, Field(description="Of the original record.")]
    redrivable: Annotated[bool, Field(description="Whether it holds a valid request.")]
    redriven_as: Annotated[str | None, Field(description="The newest request that it was run again as.")]
    redrives: int
    history: list[Attempt]
    history_dropped: int | None = None
    request: Annotated[Json | None, Field(description="The request in it, as JSON; null if there is no valid one.")] = (
        None
    )
    original: Annotated[str | None, Field(description="Text, or hex behind `hex:` where it is no UTF-8.")] = None
    original_omitted: bool | None = None
    headers: dict[str, str] | None = None
    error_chain: list[str] | None = None


class DeadLetterGroup(Answer):
    """Dead letters of one reason and model that were not run again."""

    reason: str
    model: str | None
    letters: int
    redrivable: Annotated[int, Field(description="So many of them hold valid requests.")]
    oldest_at: Time | None
    newest_at: Time | None


class SkippedLetter(Answer):
    id: str
    code: str
    message: str


class Redrive(Answer):
    """`request_ids` are the new requests, those that there would be for a dry run. Call again with `after` = `last_id`
    while `has_more`: `last_id` also fixes the end of the letters.
    """

    object: Literal["dead_letter.redrive"]
    dry_run: bool
    redriven: int
    request_ids: list[str]
    skipped: list[SkippedLetter]
    error: Annotated[
        ErrorFacts | None, Field(description="Why the call left letters: its key was revoked, or they are refused now.")
    ]
    remaining: Annotated[int, Field(description="Letters that are left for further calls.")]
    has_more: bool
    last_id: str | None


class Purge(Answer):
    object: Literal["dead_letter.purge"]
    dry_run: bool
    purged: int
    ids: list[str]
    skipped: list[SkippedLetter]
    remaining: Annotated[int, Field(description="Letters that are left for further calls.")]
    has_more: bool
    last_id: str | None
