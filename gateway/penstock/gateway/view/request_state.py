"""One request as the events of the topics make it: its folds and its facts. Pure."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple

from penstock.gateway.view.outputs import LargeOutput, artifact_ids_of, held_bytes
from penstock.schemas.fold import FoldStep, Previewed, ResultFold, StatusFold, same_origin
from penstock.schemas.ids import is_derived_id
from penstock.schemas.labels import NO_LABELS, Labels, labels_of
from penstock.schemas.lifetimes import deadline_of, waits_from
from penstock.schemas.limits import LIMITS
from penstock.schemas.records import STATUS_RANKS, InferenceRequest, Origin, Place, ResultEvent, StatusEvent
from penstock.schemas.requests import content_hash
from penstock.schemas.topics import partition_for, pool_of_topic

Key = tuple[str, str]
"""(tenant, request_id)"""

ENTRY_BYTES = 4_096
"""What an entry takes at least, beside what its outcome takes."""
NOT_KNOWN = -1
NOT_HASHED = "-"
BLANKED = "erased"
NEVER_MS = 1 << 62
RUNNING = STATUS_RANKS["running"]
MOST_OTHERS = 8
"""Records with the id of another, whose facts are kept."""
_OF_RECORD = (
    "task",
    "priority",
    "model",
    "pool",
    "conversation_id",
    "stream",
    "redriven_from",
    "labels",
    "stored_text",
    "metadata",
    "content",
    "accepted_ms",
    "deadline_ms",
    "waits_from_ms",
)
_facts_of_record = attrgetter(*_OF_RECORD)


class Noted(NamedTuple):
    """What of a request the history has counted: when it was accepted, that it ended, and how long it waited."""

    accepted_ms: int = 0
    ended: bool = False
    waited: bool = False


NOTHING = Noted()


@dataclass(slots=True, eq=False)
class RequestState:
    """Folds and facts of one request.

    `partition` is that of its events on the result topic, NOT_KNOWN until one was read or `place` was asked for;
    `partitions` says how many that topic had when the request was first heard of, 0 if that is not known.
    """

    tenant: str
    request_id: str
    partition: int
    partitions: int = 0
    redriven_from: str | None = None
    """The request whose dead letter was run again as this one."""
    task: str = ""
    priority: int = 5
    changed_priority: int | None = None
    """The priority that a command gave it; None if none did."""
    model: str | None = None
    pool: str | None = None
    conversation_id: str | None = None
    stream: bool = False
    metadata: dict[str, str] = field(default_factory=dict[str, str])
    labels: Labels = NO_LABELS
    stored_text: bool = False
    """Whether its text lies in the store of artifacts: the record only refers to it."""
    content: str = ""
    """Hash of what was asked for, where it can matter; empty until the request itself was seen."""
    origin: Origin | None = None
    accepted_ms: int = 0
    deadline_ms: int = 0
    """When its time to live ends; 0 until the request itself was seen."""
    waits_from_ms: int = 0
    """When it was accepted, or may start if that is later; 0 until the request itself was seen."""
    moved_to: Place | None = None
    """Where its record was published again, on another partition or for another pool."""
    cancelled_ms: int = 0
    """When its end was asked for; 0 if it was not."""
    end_asked_ms: int = 0
    """When a gateway last asked for its end because its record is gone."""
    updated_ms: int = 0
    erased: bool = False
    backfilled: bool = False
    """See `Backfill`; of no meaning once that was read."""
    fold: ResultFold = field(init=False)
    statuses: StatusFold = field(init=False)
    status: StatusEvent | None = None
    terminal_offset: int = -1
    ended_as: str = ""
    """The status of its outcome; empty until there is one."""
    finished_ms: int = 0
    started_ms: int = 0
    """When its last run began; 0 if none did."""
    artifact_ids: frozenset[str] = frozenset()
    """The artifacts that its outcome names."""
    large: LargeOutput | None = None
    """The output, when it is left out of the terminal event."""
    pieces_from: int = -1
    """The offset of its first piece of text; -1 until there was one."""
    first_piece_ms: int = 0
    """The time of its first piece in the log, while it runs; 0 if there was none."""
    passed_over: bool = False
    """Whether the fold lacks text of its (epoch, attempt) that can be read again from `pieces_from` on."""
    filled: tuple[int, int] | None = None
    """The (epoch, attempt) whose text was read again: it is not read once more for what it still lacks."""
    kept_bytes: int = ENTRY_BYTES
    """What it takes of the room for ended requests."""
    noted: Noted = NOTHING
    counted: tuple[Any, int] | None = None
    """As what the census counts it (its `Counted`), and since when."""
    listed: bool = False
    """Whether the census has it under its conversation."""
    preview: ResultEvent | None = None
    """The newest preview, until the outcome is there."""
    former_partition: int | None = None
    """Where its events were expected, before the topic got more partitions."""
    others: list[list[list[Any]]] = field(default_factory=list[list[list[Any]]])
    """Other records with its id that were read: the place and the facts of each."""

    @property
    def user_id(self) -> str | None:
        return self.labels.user_id

    def __post_init__(self) -> None:
        self.fold = ResultFold(request_id=self.request_id, tenant=self.tenant)
        self.statuses = StatusFold(self.request_id, self.tenant)

    @property
    def key(self) -> Key:
        return (self.tenant, self.request_id)

    @property
    def place(self) -> int:
        """The partition of its events on the result topic: where they are, or where they are expected."""
        if self.partition == NOT_KNOWN:
            self.partition = partition_for(self.request_id.encode(), self.partitions)
        return self.partition

    @property
    def first_record(self) -> Origin | None:
        """The origin that its readers follow: that of its results, else of its record, else of its statuses."""
        return self.fold.origin or self.origin or (None if self.status is None else self.status.origin)

    @property
    def terminal(self) -> ResultEvent | None:
        """Its outcome, if that is held: of what ended long ago it is on the result topic alone."""
        return self.fold.terminal

    @property
    def done(self) -> bool:
        return bool(self.ended_as)

    @property
    def lacks_outcome(self) -> bool:
        """Whether its outcome must be read before anybody can get it."""
        return self.done and self.fold.terminal is None

    @property
    def lacks_text(self) -> bool:
        """Whether it has ended with an outcome that only refers to its text, which can be read again."""
        event = self.fold.terminal
        return event is not None and event.output_artifact is not None and self.lacks_pieces

    @property
    def lacks_pieces(self) -> bool:
        """Whether it has ended, and the pieces of its text can be read again."""
        return self.done and self.stream and self.passed_over and self.pieces_from >= 0

    @property
    def closed(self) -> bool:
        """Whether nothing will happen to it any more."""
        return self.done or self.blanked

    @property
    def waits(self) -> bool:
        """Whether no worker has said that it runs."""
        return not self.closed and (self.status is None or self.status.rank < RUNNING)

    @property
    def listed_ms(self) -> int:
        """Its place in lists: when it was accepted. If only its outcome was read, when its record was appended.

        What is erased is in no list, and its record may be read without its content.
        """
        if self.accepted_ms or self.erased or not self.finished_ms or self.origin is None:
            return self.accepted_ms
        return self.origin.append_time_ms

    @property
    def to_note(self) -> Noted:
        """What its history can count now: how long it waited once it has ended and its own record was read."""
        origin, followed, ended = self.origin, self.fold.origin, bool(self.finished_ms)  # also of a blanked one
        if not ended or not self.accepted_ms or origin is None or followed is None:
            return Noted(self.accepted_ms, ended)
        return Noted(self.accepted_ms, ended, same_origin(origin, followed))

    @property
    def may_move(self) -> bool:
        """Whether another priority changes when it starts: it has not ended, and no worker has said that it runs."""
        return not self.closed and not self.erased and self.status_name != "running"

    @property
    def must_end_ms(self) -> int:
        """From when on no worker would start it; `NEVER_MS` while its record was not heard of."""
        origin = self.first_record
        if origin is None:
            return NEVER_MS
        if self.cancelled_ms:
            return self.cancelled_ms
        deadline_ms = self.deadline_ms or origin.append_time_ms + LIMITS.max_ttl_ms
        if self.status is not None and self.status.ttl_ms is not None:  # a worker chose one, as nobody named any
            return min(deadline_ms, origin.append_time_ms + self.status.ttl_ms)
        return deadline_ms

    @property
    def blanked(self) -> bool:
        """Whether all that was said in it is gone; an erased one whose outcome is still to be read is not yet."""
        return self.content == BLANKED

    @property
    def erased_unread(self) -> bool:
        """Whether it was erased before any record of its own was read. Its outcome is still published."""
        return self.blanked and not self.accepted_ms and not self.finished_ms

    @property
    def status_name(self) -> str:
        return self.ended_as or ("accepted" if self.status is None else self.status.status)

    def counts(self, origin: Origin | None) -> bool:
        """Whether a record there is the request. Of several with its id it is the one whose results readers follow.

        Until there are results it is the one that was appended first.
        """
        known, followed = self.origin, self.fold.origin
        if known is None or origin is None or not self.accepted_ms or same_origin(known, origin):
            return True
        if followed is not None and (same_origin(known, followed) or same_origin(origin, followed)):
            return same_origin(origin, followed)
        return _order(origin) < _order(known)

    def follow(self, origin: Origin) -> bool:
        """Its first result names the record that runs. Whether its facts were those of another record."""
        self.statuses.origin = origin
        known, place = self.origin, _place(origin)
        facts = next((facts for where, facts in self.others if where == place), None)
        if facts is None or known is None or not self.content or same_origin(known, origin):
            return False
        self.evict_to_disk(self)
        metadata = self.metadata
        for name, value in zip(_OF_RECORD, facts, strict=False):  # files of earlier releases have fewer
            setattr(self, name, value)
        self.labels, self.origin = Labels(*self.labels), origin
        self.kept_bytes += metadata_bytes(self.metadata) - metadata_bytes(metadata)
        if self.changed_priority is not None:
            self.priority = self.changed_priority
        return True

    def evict_to_disk(self, read: RequestState) -> None:
        """Keep the facts of a record that was read."""
        if read.origin is None or not read.content or len(self.others) >= MOST_OTHERS:
            return
        place = _place(read.origin)
        if all(where != place for where, _ in self.others):
            self.others.append([place, [*_facts_of_record(read)]])

    def on_request(self, request: InferenceRequest, origin: Origin | None) -> None:
        """The request was seen on its topic (or accepted here, `origin` still unknown)."""
        if origin is not None and not self.counts(origin):
            other = RequestState(self.tenant, self.request_id, self.partition)
            other.on_request(request, origin)
            self.evict_to_disk(other)
            return
        is_other = self.origin is not None and origin is not None and not same_origin(origin, self.origin)
        if is_other:
            self.evict_to_disk(self)
            event = self.terminal or self.status
            if not self.lacks_outcome:
                self.model = None if event is None else event.model
        if is_other or self.moved_to is None:  # else it is in the pool that it was moved to
            self.pool = request.pool or (None if origin is None else pool_of_topic(origin.topic))
        self.model = self.model or request.model
        self.conversation_id, self.stream = request.conversation_id, request.stream
        self.redriven_from, self.labels = request.redriven_from, labels_of(request)
        self.stored_text = request.input_artifact is not None
        if request.metadata or self.metadata:
            self.kept_bytes += metadata_bytes(request.metadata) - metadata_bytes(self.metadata)
            self.metadata = request.metadata
        # Only an Idempotency-Key ever asks for the content, and only its requests have ids of version 5.
        self.content = content_hash(request) if is_derived_id(request.request_id) else NOT_HASHED
        self.count_from(request, origin)

    def count_from(self, request: InferenceRequest, origin: Origin | None) -> None:
        """Take of the request what figures count, and nothing else that its caller said."""
        self.task = request.task
        self.priority = request.priority if self.changed_priority is None else self.changed_priority
        self.accepted_ms = self.accepted_ms or (origin.append_time_ms if origin else request.created_at)
        if origin is not None:
            self.origin = origin
            self.accepted_ms = origin.append_time_ms
        self.deadline_ms = deadline_of(request, self.accepted_ms)
        self.waits_from_ms = waits_from(request, self.accepted_ms)

    def on_result(
        self, event: ResultEvent, offset: int, large: LargeOutput | None = None, record_bytes: int = 0
    ) -> FoldStep:
        """Take an event of the result topic; `large` is its output, if that is left out of it."""
        step = self.fold.apply(event, offset)
        if event.kind == "chunk":
            self.note_piece(offset)
        if self.fold.terminal is event:
            self.terminal_offset, self.ended_as = offset, event.status or "failed"
            self.finished_ms, self.artifact_ids = event.created_at, artifact_ids_of(event)
            self.first_piece_ms = 0
            run_ms = 0 if event.timings is None else event.timings.run_ms
            self.started_ms = event.created_at - run_ms if run_ms or event.status == "completed" else 0
            self.task = self.task or event.task
            self.model = event.model or self.model
            self.origin = self.origin or event.origin
            self.labels = self.labels if self.content else labels_of(event)
            self.preview = None
            self.hold_outcome(event, large, record_bytes)
        elif isinstance(step, Previewed):
            self.preview = event
        return step

    def hold_outcome(self, event: ResultEvent, large: LargeOutput | None, record_bytes: int) -> None:
        """Its outcome, and its output if that is left out of it."""
        self.fold.hold_terminal(event)
        self.large = large
        self.kept_bytes += held_bytes(event, large, record_bytes)

    def pass_over(self, event: ResultEvent, offset: int) -> None:
        """Take what decides about later events of a piece whose text nobody wants here."""
        self.passed_over = True
        self.fold.pass_over(event)
        self.note_piece(offset)

    def note_piece(self, offset: int) -> None:
        """A piece of its text stands there."""
        if self.pieces_from < 0:
            self.pieces_from = offset

    def hold_text_of(self, fold: ResultFold) -> None:
        """Its events were read again, up to now: this is what they make."""
        self.fold.hold_text_of(fold)
        self.passed_over, self.filled = False, self.fold.place

    def on_partition(self, partition: int) -> None:
        """Its events stand on this partition of the result topic."""
        if partition == self.partition:
            return
        if self.partition != NOT_KNOWN:
            self.former_partition, self.pieces_from = self.partition, -1
        self.partition = partition

    def forget_text(self) -> None:
        """The outcome was sent and holds the text, or refers to it: the pieces are not needed any more."""
        fold = self.fold
        if fold.text_length:
            self.passed_over = True
            fold.forget_text()


def _place(origin: Origin) -> list[Any]:
    return [origin.topic, origin.partition, origin.offset, origin.append_time_ms]


def _order(origin: Origin) -> tuple[int, str, int, int]:
    """The same at every gateway."""
    return origin.append_time_ms, origin.topic, origin.partition, origin.offset


def metadata_bytes(metadata: Mapping[str, str]) -> int:
    """About the memory that it takes decoded."""
    return sum(sys.getsizeof(name) + sys.getsizeof(text) for name, text in metadata.items())
