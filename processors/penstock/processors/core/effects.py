"""What the flow asks of the shells. Plain values; a shell does what they say, decides nothing, and reports back.

Each says which event of the flow answers it. A work that was dropped or ended meanwhile ignores the answer.
"""

from __future__ import annotations

from dataclasses import field
from typing import Any

from penstock.processors.core.requests.work import Work, WorkKey
from penstock.schemas.errors import PenstockError
from penstock.schemas.fixed import fixed
from penstock.schemas.records import ControlCommand, Origin, WaitingFor
from penstock.schemas.topics import TP


@fixed
class Prepare:
    """Read the conversation (writing nothing) and count the prompt. → prepared, refused, answer_stands"""

    work: Work
    run_id: str


@fixed
class Begin:
    """Append the turn's own input: it was granted. → begun, log_moved, refused"""

    work: Work
    run_id: str


@fixed
class Start:
    """Run it on its replica's engine. → delta, stepped, previewed, finished, failed

    The journal must hold it before the engine does.
    """

    work: Work
    run_id: str


@fixed
class CancelRun:
    """Stop a run, prepared or running; nothing more of it counts."""

    lane: str
    replica: int
    run_id: str


@fixed
class Keep:
    """Append the answer to its conversation, or keep what is large of an output as artifacts, or both.

    → kept, keep_failed
    """

    work: Work
    finished: Any
    in_conversation: bool


@fixed
class LookUp:
    """Look whether the answer stands in the conversation already. → looked_up"""

    work: Work


@fixed
class Status:
    """Say how far it is. `attempt` and `epoch` are those of the moment when it was so."""

    work: Work
    status: str
    attempt: int
    epoch: int
    detail: str | None = None
    done: bool = False
    waiting: WaitingFor | None = None
    step: int | None = None
    steps: int | None = None


@fixed
class ShowPreview:
    """Keep a small image of what there is so far, and publish where it lies. Nothing answers: it is advice.

    `attempt` and `epoch` are those of the run that made it.
    """

    work: Work
    run_id: str
    attempt: int
    epoch: int
    preview: Any


@fixed
class Chunk:
    """Publish a piece of its stream. → chunk_refused when it can never be published

    `attempt` and `epoch` are those of the run that said it: another may have begun before this is carried out.
    """

    work: Work
    attempt: int
    epoch: int
    text: str
    token_ids: list[int]
    first_token_index: int
    text_offset: int
    calls: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """Pieces of calls of tools."""


@fixed
class Terminal:
    """Publish its one outcome. → delivered

    `origin`: another place where the same request stands; None for its first record.
    """

    work: Work
    status: str
    at: float
    error: PenstockError | None = None
    finished: Any = None
    artifact: Any = None
    origin: Origin | None = None


@fixed
class Letter:
    """Keep its record in the dead-letter topic. → lettered"""

    work: Work
    error: PenstockError
    nameless: bool
    """True for a record whose request_id could not be read: nobody waits for an outcome."""


@fixed
class Republish:
    """Put the record where it belongs, with its id and origin. → moved, cannot_move

    That is the partition of its conversation, or the topic of another pool.
    """

    work: Work
    partition: int | None
    origin: Origin
    pool: str | None = None


@fixed
class Size:
    """Find out how much memory a model takes. → sized, size_failed"""

    model: str


@fixed
class Load:
    """Load a replica of a model, in so many bytes of a device (None: it takes no memory). → replica_up, load_failed

    `devices`: all of them, for an engine that takes so many bytes of each.
    """

    model: str
    replica: int
    device: str | None = None
    bytes: int = 0
    devices: tuple[str, ...] = ()


@fixed
class Unload:
    """End a replica's engine, or its load; what runs on it ends silently. → replica_gone"""

    model: str
    replica: int
    reason: str
    for_model: str | None = None
    """The model that gets its room."""


@fixed
class Fetch:
    """Read these records again. → fetched, gone. `urgency`: lower first."""

    tp: TP
    offsets: tuple[int, ...]
    urgency: int


@fixed
class RunEnded:
    """For the journal: it is on no engine any more. A worker that dies from now on does not die while it runs."""

    key: WorkKey
    request_id: str


@fixed
class ForgetDeaths:
    """For the journal: the broker has its outcome, so the deaths of earlier workers under it count no more."""

    key: WorkKey
    request_id: str


@fixed
class Erase:
    """Tombstone an erased request's turns."""

    command: ControlCommand


@fixed
class Retried:
    """One more attempt, to be counted in a metric."""

    work: Work


Effect = (
    Prepare
    | Begin
    | Start
    | CancelRun
    | Keep
    | LookUp
    | Status
    | Chunk
    | ShowPreview
    | Terminal
    | Letter
    | Republish
    | Size
    | Load
    | Unload
    | Fetch
    | RunEnded
    | ForgetDeaths
    | Erase
    | Retried
)
