"""What the flow asks of the shells. Plain values; a shell does what they say, decides nothing, and reports back.

Each says which event of the flow answers it. A work that was dropped or ended meanwhile ignores the answer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from penstock.processors.core.work import Work, WorkKey
from penstock.schemas.errors import PenstockError
from penstock.schemas.records import ControlCommand, Origin, WaitingFor
from penstock.schemas.topics import TP


@dataclass(slots=True, frozen=True)
class Prepare:
    """Read the conversation (writing nothing) and count the prompt. → prepared, refused, answer_stands"""

    work: Work
    run_id: str


@dataclass(slots=True, frozen=True)
class Begin:
    """Append the turn's own input: it was granted. → begun, log_moved, refused"""

    work: Work
    run_id: str


@dataclass(slots=True, frozen=True)
class Start:
    """Run it on its replica's engine. → delta, stepped, previewed, finished, failed

    The journal must hold it before the engine does.
    """

    work: Work
    run_id: str


@dataclass(slots=True, frozen=True)
class CancelRun:
    """Stop a run, prepared or running; nothing more of it counts."""

    lane: str
    replica: int
    run_id: str


@dataclass(slots=True, frozen=True)
class Keep:
    """Append the answer to its conversation, or keep what is large of an output as artifacts, or both.

    → kept, keep_failed
    """

    work: Work
    finished: Any
    in_conversation: bool


@dataclass(slots=True, frozen=True)
class LookUp:
    """Look whether the answer stands in the conversation already. → looked_up"""

    work: Work


@dataclass(slots=True, frozen=True)
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


@dataclass(slots=True, frozen=True)
class ShowPreview:
    """Keep a small image of what there is so far, and publish where it lies. Nothing answers: it is advice.

    `attempt` and `epoch` are those of the run that made it.
    """

    work: Work
    run_id: str
    attempt: int
    epoch: int
    preview: Any


@dataclass(slots=True, frozen=True)
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


@dataclass(slots=True, frozen=True)
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


@dataclass(slots=True, frozen=True)
class Letter:
    """Keep its record in the dead-letter topic. → lettered"""

    work: Work
    error: PenstockError
    nameless: bool
    """True for a record whose request_id could not be read: nobody waits for an outcome."""


@dataclass(slots=True, frozen=True)
class Republish:
    """Put the record where it belongs, with its id and origin. → moved, cannot_move

    That is the partition of its conversation, or the topic of another pool.
    """

    work: Work
    partition: int | None
    origin: Origin
    pool: str | None = None


@dataclass(slots=True, frozen=True)
class Size:
    """Find out how much memory a model takes. → sized, size_failed"""

    model: str


@dataclass(slots=True, frozen=True)
class Load:
    """Load a replica of a model, in so many bytes of a device (None: it takes no memory). → replica_up, load_failed

    `devices`: all of them, for an engine that takes so many bytes of each.
    """

    model: str
    replica: int
    device: str | None = None
    bytes: int = 0
    devices: tuple[str, ...] = ()


@dataclass(slots=True, frozen=True)
class Unload:
    """End a replica's engine, or its load; what runs on it ends silently. → replica_gone"""

    model: str
    replica: int
    reason: str
    for_model: str | None = None
    """The model that gets its room."""


@dataclass(slots=True, frozen=True)
class Fetch:
    """Read these records again. → fetched, gone. `urgency`: lower first."""

    tp: TP
    offsets: tuple[int, ...]
    urgency: int


@dataclass(slots=True, frozen=True)
class Ended:
    """For the journal: it ran here and has its outcome, or, when `dropped`, was let go of without one."""

    key: WorkKey
    request_id: str
    dropped: bool


@dataclass(slots=True, frozen=True)
class Erase:
    """Tombstone an erased request's turns."""

    command: ControlCommand


@dataclass(slots=True, frozen=True)
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
    | Ended
    | Erase
    | Retried
)
