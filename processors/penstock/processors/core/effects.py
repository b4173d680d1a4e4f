"""What the flow asks of the shells: values that never change. A shell does what they say, decides nothing, and reports.

Each says which event of the flow answers it. The answer names the subject. It changes nothing when the request was let
go of or has ended meanwhile.
"""

from __future__ import annotations

from dataclasses import field
from typing import Any

from penstock.processors.core.work.published_prefix import PublishedPrefix
from penstock.processors.core.work.work import Subject, WorkKey
from penstock.schemas.errors import PenstockError
from penstock.schemas.fixed import fixed
from penstock.schemas.records import Attempt, ControlCommand, Origin, Timings, WaitingFor
from penstock.schemas.topics import TP


class Effect:
    """Something to be carried out."""

    __slots__ = ()


@fixed
class Prepare(Effect):
    """Read the conversation (writing nothing) and count the prompt. → prepared, refused, answer_stands"""

    subject: Subject
    run_id: str
    replica: int
    published: PublishedPrefix | None = None
    """What it may go on from."""
    may_resume_stream: bool = False
    """Whether what it may go on from is on the result topic, if another worker ran it."""


@fixed
class Begin(Effect):
    """Append the turn's own input: it was granted. → begun, log_moved, refused

    `mark` and `prepared`: as `prepared` gave them.
    """

    subject: Subject
    run_id: str
    mark: Any
    prepared: Any


@fixed
class Start(Effect):
    """Run it on its replica's engine. → goes_on_from, delta, stepped, previewed, finished, failed

    The journal must hold it before the engine does. `prepared`: as `prepared` gave it; None where the engine prepares
    the run as it begins.
    """

    subject: Subject
    run_id: str
    replica: int
    prepared: Any
    inline: bool
    """Whether its engine runs in this process."""
    published: PublishedPrefix | None = None
    """As of Prepare, where the engine prepares the run as it begins."""


@fixed
class CancelRun(Effect):
    """Stop a run, prepared or running; nothing more of it counts."""

    lane: str
    replica: int
    run_id: str


@fixed
class StoreOutput(Effect):
    """Append the answer to its conversation, or keep what is large of an output as artifacts, or both.

    → stored, not_stored, store_failed
    """

    subject: Subject
    finished: Any
    to: Any
    """Kafka's id of the conversation's topic that holds its input; of what takes no turn, `mark` as `prepared` gave it.
    None where the output goes to no conversation."""
    deadline_ms: int | None = None
    """The request's, in wall-clock time: a store of artifacts is not waited for much longer."""
    another: bool = False
    """Whether the answer that counts in the conversation is that of an earlier run."""


@fixed
class CheckForAnswer(Effect):
    """Look whether the answer is in the conversation already. → answer_checked"""

    subject: Subject


@fixed
class Status(Effect):
    """Say how far it is."""

    subject: Subject
    status: str
    detail: str | None = None
    done: bool = False
    waiting: WaitingFor | None = None
    position: int | None = None
    model_reason: str | None = None
    ttl_ms: int | None = None
    step: int | None = None
    steps: int | None = None


@fixed
class ShowPreview(Effect):
    """Keep a small image of what there is so far, and publish where it lies. Nothing answers: it is advice."""

    subject: Subject
    run_id: str
    preview: Any


@fixed
class Chunk(Effect):
    """Publish a piece of its stream. → chunk_refused when it can never be published"""

    subject: Subject
    text: str
    token_ids: list[int]
    first_token_index: int
    text_offset: int
    calls: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """Pieces of calls of tools."""
    since: tuple[int, int] | None = None
    """The (epoch, attempt) in which its text began, if that was an earlier one."""
    logprobs: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    first_logprob_index: int = 0


@fixed
class Terminal(Effect):
    """Publish its one outcome. → delivered

    `origin`: another record of the same request; None for its first one.
    """

    subject: Subject
    status: str
    klass: str
    """In which it waited last."""
    timings: Timings
    ran_s: float | None
    """How long it was on an engine; None when it was on none."""
    replica: int | None
    """Where it ran last."""
    error: PenstockError | None = None
    finished: Any = None
    artifact: Any = None
    origin: Origin | None = None
    since: tuple[int, int] | None = None
    """As of Chunk."""
    prepared: Any = None
    """As `prepared` gave it, of the run whose output it has."""
    prepared_s: float | None = None
    """From the beginning of its last run's preparation to its grant; None when it was granted nothing."""


@fixed
class PublishDeadLetter(Effect):
    """Keep its record in the dead-letter topic. → dead_lettered"""

    subject: Subject
    error: PenstockError
    nameless: bool
    """True for a record whose request_id could not be read: nobody waits for an outcome."""


@fixed
class Republish(Effect):
    """Put the record where it belongs, with its id and origin. → moved, cannot_move

    That is the partition of its conversation, or the topic of another pool.
    """

    subject: Subject
    partition: int | None
    origin: Origin
    pool: str | None = None


@fixed
class Size(Effect):
    """Find out how much memory a model takes. → sized, size_failed"""

    model: str


@fixed
class Load(Effect):
    """Load a replica of a model, in this many bytes of a device (None: it takes no memory). → up, load_failed

    `devices`: all of them, for an engine that takes these bytes of each.
    """

    model: str
    replica: int
    device: str | None = None
    bytes: int = 0
    devices: tuple[str, ...] = ()


@fixed
class Unload(Effect):
    """End a replica's engine, or its load; what runs on it ends silently. → gone"""

    model: str
    replica: int
    reason: str
    for_model: str | None = None
    """The model that gets its room."""


@fixed
class Fetch(Effect):
    """Read these records again. → fetched, gone. `urgency`: lower first."""

    tp: TP
    offsets: tuple[int, ...]
    urgency: int


@fixed
class RunEnded(Effect):
    """For the journal: it is on no engine any more. A worker that dies from now on does not die while it runs."""

    key: WorkKey
    request_id: str


@fixed
class AttemptEnded(Effect):
    """For the journal: what came of a failed attempt, should this worker die before the request's outcome."""

    key: WorkKey
    request_id: str
    attempt: Attempt


@fixed
class ForgetDeaths(Effect):
    """For the journal: the broker has its outcome, so its attempts and the deaths of workers under it count no more."""

    key: WorkKey
    request_id: str


@fixed
class Erase(Effect):
    """Tombstone an erased request's turns.

    `held`: this worker held the request, at whatever partition. Else it is for who owns the partition it came from.
    """

    command: ControlCommand
    held: bool = False


@fixed
class Retried(Effect):
    """One more attempt, to be counted in a metric."""

    subject: Subject
