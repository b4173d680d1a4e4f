"""One request while this worker holds it: where it came from, how far it is, and what it has sent."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from penstock.schemas.records import InferenceRequest, Origin, ResultEvent, Timings

WorkKey = tuple[str, int, int]
"""(topic, partition, offset) of the record that this worker holds."""


class Stage(StrEnum):
    """How far a request is inside the worker."""

    QUEUED = "queued"
    STARTING = "starting"  # its turn is read, its prompt counted
    WAITING = "waiting"  # the engine has no room for its tokens yet
    RUNNING = "running"
    SETTLING = "settling"  # its outcome is under way to the broker
    DONE = "done"
    DROPPED = "dropped"  # its partition went elsewhere: nothing of it may be published


@dataclass(slots=True, kw_only=True, eq=False)
class Work:
    """Mutable, owned by the event loop. Times ending in _at are the loop's monotonic seconds."""

    key: WorkKey
    request: InferenceRequest
    origin: Origin
    klass: str
    lane: str
    line: str | None
    deadline_ms: int | None
    """Wall-clock milliseconds after which it is expired: log append time + time to live."""
    arrived_at: float
    attempt: int
    model: Any = None
    """The catalog's ModelConfig, resolved at arrival; what is not known ends the request there."""

    stage: Stage = Stage.QUEUED
    epoch: int = -1
    run_id: str = ""
    alone: bool = False
    """True when two workers died while it ran: it may run only when nothing else does."""
    keeping: bool = False
    """Its end is decided (an answer is being kept, a dead letter written): too late for a cancel or a timeout."""
    position: int | None = None
    """How many stood before it in this worker's queue when that was last looked at."""

    started_at: float | None = None
    admitted_at: float | None = None
    run_at: float | None = None
    first_token_at: float | None = None
    load_ms: int = 0
    """Of the time before it started, how long its model was being loaded."""
    timeout_at: float | None = None

    pending_status: str | None = None
    published_status: str | None = None

    spec: Any = None
    prepared: Any = None
    reserved: bool = False
    """It holds a place on its lane that the engine does not count yet."""
    turn: Any = None
    text: list[str] = field(default_factory=list[str])
    tokens: list[int] = field(default_factory=list[int])
    sent_pieces: int = 0
    sent_chars: int = 0
    sent_tokens: int = 0
    buffered_at: float | None = None
    terminal: ResultEvent | None = None

    @property
    def tp(self) -> tuple[str, int]:
        return (self.key[0], self.key[1])

    @property
    def live(self) -> bool:
        return self.stage not in (Stage.SETTLING, Stage.DONE, Stage.DROPPED)

    def restart(self) -> None:
        """Forget what a run produced, for the next attempt or epoch."""
        self.text.clear()
        self.tokens.clear()
        self.sent_pieces = self.sent_chars = self.sent_tokens = 0
        self.buffered_at = self.run_at = self.first_token_at = self.admitted_at = self.timeout_at = None
        self.prepared = None

    def timings(self, now: float) -> Timings:
        """Milliseconds spent waiting, being admitted, loading and running, as of `now`."""
        started = self.started_at if self.started_at is not None else now
        run_at = self.run_at if self.run_at is not None else now
        first = None if self.first_token_at is None else round((self.first_token_at - self.arrived_at) * 1000)
        return Timings(
            queued_ms=max(0, round((started - self.arrived_at) * 1000) - self.load_ms),
            admission_ms=round((run_at - started) * 1000),
            load_ms=self.load_ms,
            run_ms=round((now - run_at) * 1000) if self.run_at is not None else 0,
            first_token_ms=first,
        )
