"""One request while this worker holds it: the facts that scheduling needs, its bytes while they are here, its run.

Mutable and owned by the flow. Times ending in `_at`, and `deadline`, are seconds of the flow's clock; times ending in
`_ms` are milliseconds since the epoch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from penstock.processors.core.work.peers import Wanted
from penstock.processors.core.work.published_prefix import PublishedPrefix
from penstock.processors.core.work.states import Stage
from penstock.schemas.abilities import Need
from penstock.schemas.errors import PenstockError
from penstock.schemas.fixed import fixed
from penstock.schemas.labels import NO_LABELS, Labels
from penstock.schemas.published_logprobs import PublishedLogprobs
from penstock.schemas.records import AttemptHistory, InferenceRequest, Origin, Requirements, Timings

WorkKey = tuple[str, int, int]
"""(topic, partition, offset) of the record that this worker holds."""


def key_of(place: Origin) -> WorkKey:
    return (place.topic, place.partition, place.offset)


@fixed
class Body:
    """The decoded request and the record it came from; dropped while the request is parked."""

    request: InferenceRequest
    value: bytes
    headers: tuple[tuple[str, bytes | None], ...]
    record_key: bytes | None


@fixed
class Subject:
    """What a request is at one moment, for those who carry out what the flow asks for it. It never changes.

    `key` and `seq` name the request in answers to the flow.
    """

    key: WorkKey
    seq: int
    """Of its arrival: another request may be at the same place later."""
    request_id: str
    tenant: str
    task: str
    lane: str
    """The model that serves it; empty while none is chosen."""
    conversation: str | None
    """The key of the conversation of which it is a turn (`conversation_key`), None if it is no turn."""
    attempt: int
    epoch: int
    origin: Origin
    """The first record of the request."""
    body: Body | None
    history: AttemptHistory | None = None
    """Its attempts so far, from the first that failed on."""
    labels: Labels = NO_LABELS
    conversation_id: str | None = None
    priority: int = 5

    @property
    def first_key(self) -> WorkKey:
        """The place of its first record: copies that were moved elsewhere have the same one."""
        return key_of(self.origin)

    @property
    def request(self) -> InferenceRequest:
        """The request; what is known of it when its bytes are not here."""
        if self.body is not None:
            return self.body.request
        return InferenceRequest(
            request_id=self.request_id,
            tenant=self.tenant,
            task=self.task,
            conversation_id=self.conversation_id,
            created_at=self.origin.append_time_ms,
        )


@dataclass(slots=True, kw_only=True, eq=False)
class Run:
    """One attempt on an engine, from preparing to its end."""

    run_id: str
    replica: int = 0
    """Of its model: the one that prepares it, and runs it."""
    grant: Any = None
    """Memory of the ledger that it holds while it runs, beyond what its replica holds."""
    need_tokens: int = 0
    prepared: Any = None
    """What its shell made of it as it was prepared, for the shell."""
    mark: Any = None
    """What the conversation's log looked like when it was read."""
    topic_id: str | None = None
    """Kafka's id of the conversation's topic that holds its input."""
    appends: bool = False
    """Whether its output is appended to its conversation, though it takes no turn."""
    preparing_since: float = 0.0
    """When it began to be prepared."""
    granted_at: float | None = None
    run_at: float | None = None
    first_token_at: float | None = None
    timeout_at: float | None = None
    text: list[str] = field(default_factory=list[str])
    tokens: list[int] = field(default_factory=list[int])
    calls: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """Pieces of calls of tools that are still to be sent."""
    step: int = 0
    """Steps done, of `steps`."""
    steps: int = 0
    step_published_at: float | None = None
    step_due: bool = False
    logprobs: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """Of its tokens, where they were asked for; those that are still to be sent."""
    sent_pieces: int = 0
    sent_chars: int = 0
    sent_tokens: int = 0
    sent_logprobs: PublishedLogprobs | None = None
    sent_calls: list[int] = field(default_factory=list[int])
    """Characters of each call's arguments that were sent."""
    since: tuple[int, int] | None = None
    """The (epoch, attempt) in which its text began, if that was an earlier one."""
    buffered_at: float | None = None
    noted: bool = False
    """Whether the history of its request has it."""


@dataclass(slots=True)
class Unserved:
    """Why a request cannot run on this worker, and since when. Times are wall-clock milliseconds."""

    wanted: Wanted
    need: Need | None
    error: PenstockError
    """With this it fails if nobody comes to serve it."""
    arrived_ms: int
    absent_since_ms: int
    """When a live worker was last known to serve it; at first, when it arrived."""
    unloadable: bool = False
    """This worker serves the model, and cannot load it."""


class Destination(NamedTuple):
    """Where a record is published again. `partition` None: that of its key. `pool` None: on the topic it comes from."""

    partition: int | None = None
    pool: str | None = None


@dataclass(slots=True, kw_only=True, eq=False, repr=False)
class Work:
    """A request between arrival and commit. The scheduler's item; it stays within the core.

    The defaults of its first facts are for what can only end: its payload, or whose it is, is not known.
    """

    key: WorkKey
    request_id: str
    tenant: str
    task: str
    klass: str = "medium"
    priority: int = 5
    lane: str = ""
    model_reason: str | None = None
    """Why this model, when its caller named none."""
    conversation: str | None = None
    deadline_ms: int | None = None
    deadline: float | None = None
    arrived_at: float
    start_after_ms: int | None = None
    """Its caller wants it not to start before."""
    cost: int = 1
    seq: int
    """Its place among the others: of its arrival, or of when it might start if that came later."""
    number: int = field(init=False)
    """Of its arrival. It names the request in answers."""
    ticket: int = 0
    conversation_id: str | None = None
    """Also of what is no turn of it."""
    holds_conversation: bool = False
    """Its conversation waits for it: it was granted once."""
    begun: bool = False
    """A run of it has begun here: no answer stood in its conversation then."""
    in_budget: bool = False
    """Whether the budget counts it."""
    stage: Stage = Stage.NEW
    attempt: int
    """The number that events carry: a run whose words may have been published is never repeated under it."""
    spent: int = 0
    """Attempts used up, the present one included; an innocent's run beside a poisonous one is not counted."""
    max_attempts: int | None
    """The bound that its caller set."""
    put_backs: int = 0
    """How often in a row it was put back, because what it needs is away or full."""
    history: AttemptHistory | None = None
    """Its attempts so far, from the first that failed on."""
    failure: str | None = None
    """Why its last attempt failed."""
    epoch: int
    stream: bool = False
    first_place: Origin
    body: Body | None = None
    labels: Labels = NO_LABELS
    """Known also while its bytes are not here."""
    size_bytes: int = 0
    requirements: Requirements | None = None
    need: Need | None = None
    """What its payload asks of a model."""
    run: Run | None = None
    published: PublishedPrefix | None = None
    """What an earlier run has published of its stream."""
    may_resume_stream: bool = False
    """Whether another worker may have published a part of its stream: that is looked for before it runs here."""
    stored_input: bool = False
    """Whether its text or its images are read from elsewhere before the run."""
    _subject: Subject | None = None
    alone: bool = False
    """Two workers died while it ran: it may run only when nothing else does on this worker."""
    group: Any = None
    """The suspects it belongs to, after an engine died under it."""
    deaths: int = 0
    """Deaths of an engine in which it took part."""
    blocked_at: float | None = None
    """Since when it has been the most urgent of its lane and did not fit."""
    memory_bytes: int = 0
    """What its engine said that its run takes of the device, beyond what the engine holds then."""
    first_waiter_since: float | None = None
    """Since when it has been the first that waits for memory of its device."""
    moved_at: float | None = None
    """When it was last taken to another replica, where memory was free."""
    held_off_at: float | None = None
    """Since when it waits for the replica that has its conversation's beginning."""
    started_at: float | None = None
    load_ms: int = 0
    position: int | None = None
    pending_status: str | None = None
    published_status: str | None = None
    published_waiting: tuple[str, int | None] | None = None
    """(reason, position) that was last published of its waiting."""
    published_start_at: float | None = None
    """When it was last said to start."""
    counted_wait: bool = False
    """Whether its wait is among those that were measured."""
    ttl_ms: int | None = None
    """Its time to live when this worker chose one, milliseconds after its log append time."""
    end_with: PenstockError | None = None
    """It shall end with this as soon as its bytes are here, or the store does not take its output."""
    unserved: Unserved | None = None
    """Set while this worker does not serve its model, or cannot load it and another worker may run it."""
    unloadable_since_ms: int | None = None
    """Since when nobody else is known to have loaded its model, over all loads that failed here while it waited."""
    names_pool: bool = False
    """Whether its record names a pool: it may not leave that one."""
    pass_to: Destination | None = None
    """Where it is published again: a worker there serves its model."""
    repeats: list[Origin] = field(default_factory=list[Origin])
    """Other records of the same request: readers may follow any of them, so each has its outcome."""
    silent_repeats: list[Origin] = field(default_factory=list[Origin])
    """The same of those that nobody follows yet: each has a copy if the request is passed on, and else no outcome."""
    output_bytes: int = 0
    """Of its output in memory, once it has finished."""
    awaiting_store: Any = None
    """What is to be asked of the store of artifacts again, and since when."""
    outcome: Any = None
    """What is on its way to the broker as its outcome."""
    error: PenstockError | None = None
    """Of a dead letter: the reason, for the letter and for the terminal event that follows it."""

    def __post_init__(self) -> None:
        self.spent, self.number = self.attempt, self.seq

    @property
    def waits_from_ms(self) -> int:
        """Since when it could have started, milliseconds since the epoch."""
        return max(self.first_place.append_time_ms, self.start_after_ms or 0)

    @property
    def tp(self) -> tuple[str, int]:
        return (self.key[0], self.key[1])

    @property
    def starts_unprepared(self) -> bool:
        """Whether nothing has to be read for it before it starts, on an engine that counts no prompts."""
        return self.conversation is None and not self.may_resume_stream and not self.stored_input

    @property
    def goes_on_from(self) -> PublishedPrefix | None:
        """What its next run may go on from: another model's words are not."""
        return self.published if self.published is not None and self.published.model == self.lane else None

    @property
    def first_key(self) -> WorkKey:
        """The place of its first record: copies that were moved elsewhere have the same one."""
        return key_of(self.first_place)

    @property
    def request(self) -> InferenceRequest:
        """The request; what is known of it when its bytes are not here."""
        return self.subject.request

    @property
    def subject(self) -> Subject:
        """Its facts as they are now."""
        known = self._subject
        if (
            known is None
            or known.attempt != self.attempt
            or known.epoch != self.epoch
            or known.lane != self.lane
            or known.body is not self.body
            or known.history is not self.history
            or known.priority != self.priority
        ):
            known = self._subject = Subject(
                self.key,
                self.number,
                self.request_id,
                self.tenant,
                self.task,
                self.lane,
                self.conversation,
                self.attempt,
                self.epoch,
                self.first_place,
                self.body,
                self.history,
                self.labels,
                self.conversation_id,
                self.priority,
            )
        return known

    def count_as_new_attempt(self) -> None:
        """Its outcome is an answer that another run may have given. Readers of its stream must not take it for the end
        of the text that was published under its attempt, or of the text that the attempt continued.
        """
        if self.stream:
            self.attempt += 1
            if self.run is not None:
                self.run.since = None

    @property
    def live(self) -> bool:
        """Whether anything else than its end may still be published for it."""
        return self.stage not in (Stage.PUBLISHING, Stage.DONE, Stage.DROPPED)

    def timings(self, now: float) -> Timings:
        """Milliseconds spent waiting, being admitted, loading and running, as of `now`."""
        run = self.run
        started = self.started_at if self.started_at is not None else now
        run_at = run.run_at if run is not None and run.run_at is not None else None
        first = None
        if run is not None and run.first_token_at is not None:
            first = round((run.first_token_at - self.arrived_at) * 1000)
        return Timings(
            queued_ms=max(0, round((started - self.arrived_at) * 1000) - self.load_ms),
            admission_ms=0 if run_at is None else max(0, round((run_at - started) * 1000)),
            load_ms=self.load_ms,
            run_ms=0 if run_at is None else round((now - run_at) * 1000),
            first_token_ms=first,
        )

    def __repr__(self) -> str:
        return f"<Work {self.request_id} {self.stage} {self.key}>"
