"""One request as the gateway's view holds it, and the frames that a subscriber of it is owed. Pure."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.gateway.view.frames import (
    ChunkFrame,
    Frame,
    PreviewFrame,
    ProgressFrame,
    RestartedFrame,
    ResultFrame,
    SnapshotFrame,
    StatusFrame,
)
from penstock.gateway.view.outputs import LargeOutput, error_json, image_json, result_json
from penstock.schemas.cursor import Cursor, encode_cursor
from penstock.schemas.errors import InvalidCursor
from penstock.schemas.fold import IGNORED, Chunk, FoldStep, Previewed, ResultFold, StatusFold, same_origin
from penstock.schemas.ids import is_derived_id
from penstock.schemas.records import InferenceRequest, Origin, ResultEvent, StatusEvent, WaitingFor
from penstock.schemas.requests import content_hash
from penstock.schemas.times import rfc3339

Key = tuple[str, str]
"""(tenant, request_id)"""

ENTRY_BYTES = 4_096
"""What an entry takes at least, beside what its outcome takes."""
NOT_HASHED = "-"
BLANKED = "erased"


@dataclass(slots=True, eq=False)
class Entry:
    """Folds and facts of one request. `partition` is that of its events on the result topic."""

    tenant: str
    request_id: str
    partition: int
    task: str = ""
    priority: int = 5
    model: str | None = None
    pool: str | None = None
    conversation_id: str | None = None
    stream: bool = False
    metadata: dict[str, str] = field(default_factory=dict[str, str])
    content: str = ""
    """Hash of what was asked for, where it can matter; empty until the request itself was seen."""
    origin: Origin | None = None
    accepted_ms: int = 0
    updated_ms: int = 0
    erased: bool = False
    fold: ResultFold = field(init=False)
    statuses: StatusFold = field(init=False)
    status: StatusEvent | None = None
    terminal_offset: int = -1
    large: LargeOutput | None = None
    """The output, when it is left out of the terminal event."""
    record: bytes | None = None
    """The outcome's record until it was copied for the file."""
    written: tuple[int, int, int] = (-1, 0, 0)
    """(epoch, attempt, characters) of the text that was copied for the file."""
    kept_bytes: int = ENTRY_BYTES
    """What it takes of the room for ended requests."""
    counted: tuple[str, str, int] | None = None
    """As what the census counts it."""
    listed: bool = False
    """Whether the census has it under its conversation."""
    preview: ResultEvent | None = None
    """The newest preview, until the outcome is there."""
    former_partition: int | None = None
    """Where its events were expected, before the topic got more partitions."""

    def __post_init__(self) -> None:
        self.fold = ResultFold(request_id=self.request_id, tenant=self.tenant)
        self.statuses = StatusFold(self.request_id, self.tenant)

    @property
    def key(self) -> Key:
        return (self.tenant, self.request_id)

    @property
    def terminal(self) -> ResultEvent | None:
        return self.fold.terminal

    @property
    def done(self) -> bool:
        return self.fold.terminal is not None

    @property
    def blanked(self) -> bool:
        """Whether all that was said in it is gone; an erased one whose outcome is still to be read is not yet."""
        return self.content == BLANKED

    @property
    def status_name(self) -> str:
        if self.fold.terminal is not None:
            return self.fold.terminal.status or "failed"
        return "accepted" if self.status is None else self.status.status

    # -- events

    def counts(self, origin: Origin | None) -> bool:
        """Whether a record there says what the request is: of several with its id, the first one that is heard of.

        The order of one log is before that: another gateway's record may stand before one that was delivered here.
        """
        known = self.origin
        if known is None or origin is None or same_origin(known, origin):
            return True
        return (known.topic, known.partition) == (origin.topic, origin.partition) and origin.offset < known.offset

    def on_request(self, request: InferenceRequest, origin: Origin | None) -> None:
        """The request was seen on its topic (or accepted here, `origin` still unknown)."""
        if not self.counts(origin):
            return
        if self.origin is not None and origin is not None and origin.offset != self.origin.offset:
            event = self.terminal or self.status
            self.model = None if event is None else event.model
        self.task, self.priority, self.pool = request.task, request.priority, request.pool
        self.model = self.model or request.model
        self.conversation_id, self.stream = request.conversation_id, request.stream
        self.kept_bytes += metadata_bytes(request.metadata) - metadata_bytes(self.metadata)
        self.metadata = request.metadata
        # Only an Idempotency-Key ever asks for the content, and only its requests have ids of version 5.
        self.content = content_hash(request) if is_derived_id(request.request_id) else NOT_HASHED
        self.accepted_ms = self.accepted_ms or (origin.append_time_ms if origin else request.created_at)
        if origin is not None:
            self.origin = origin
            self.accepted_ms = origin.append_time_ms

    def on_result(self, event: ResultEvent, offset: int, large: LargeOutput | None = None) -> FoldStep:
        """Take an event of the result topic; `large` is its output, if that is left out of it."""
        step = self.fold.apply(event, offset)
        if self.fold.terminal is event:
            self.terminal_offset, self.large = offset, large
            self.task = self.task or event.task
            self.model = event.model or self.model
            self.origin = self.origin or event.origin
            self.preview = None
        elif isinstance(step, Previewed):
            self.preview = event
        return step

    def frames_of(self, step: FoldStep) -> list[Frame]:
        """The frames that follow from what `on_result` has just said."""
        if step is IGNORED:
            return []
        if isinstance(step, Chunk):
            frames: list[Frame] = []
            if step.restarted:
                frames.append(self.restarted_frame())
            if step.text or step.calls:
                frames.append(self.chunk_frame(step.text, step.text_offset, step.calls))
            return frames
        if isinstance(step, Previewed):
            return [*([self.restarted_frame()] if step.restarted else []), *self._preview()]
        return [*self._rest(), self.result_frame()]

    def on_partition(self, partition: int) -> None:
        """Its events stand on this partition of the result topic."""
        if partition != self.partition:
            self.former_partition, self.partition = self.partition, partition

    def forget_text(self) -> None:
        """The outcome is told and holds the text: the pieces are not needed any more."""
        fold = self.fold
        if fold.terminal is not None and fold.terminal.output_artifact is None:
            fold.restore(
                origin=fold.origin, epoch=fold.epoch, attempt=fold.attempt, text="", token_count=fold.token_count
            )

    # -- for the file

    def text_to_write(self) -> tuple[int, str | None]:
        """(the character from which on the file's text is replaced, by what); None: the file holds it as it is.

        Text is kept until the outcome, unless that only refers to its output.
        """
        fold = self.fold
        epoch, attempt, length = self.written
        if fold.terminal is not None and fold.terminal.output_artifact is None:
            self.written = (fold.epoch, fold.attempt, 0)
            return 0, "" if length else None
        self.written = (fold.epoch, fold.attempt, fold.text_length)
        if (epoch, attempt) != (fold.epoch, fold.attempt):
            return 0, fold.text if length or fold.text_length else None
        return length, fold.text[length:] if fold.text_length > length else None

    def _rest(self) -> list[Frame]:
        """Text of the outcome that no chunk brought (a gap, or another attempt's outcome)."""
        event = self.fold.terminal
        text = event.output_text if event is not None and self.stream else None
        shown = self.fold.text
        if text is None or event is None or text == shown:
            return []
        if text.startswith(shown):
            frame = self.chunk_frame(text[len(shown) :], len(shown))
            frame.cursor = self._cursor(len(text))
            return [frame] if text[len(shown) :] else []
        return [self.restarted_frame(), *([self.chunk_frame(text, 0)] if text else [])]

    def on_status(self, event: StatusEvent, *, listened: bool = True) -> list[Frame]:
        """Frames that follow from an event of the status topic, if anybody listens.

        The end is told by the result topic alone.
        """
        if event.done or self.done or (event.epoch, event.attempt) < (self.fold.epoch, self.fold.attempt):
            return []
        if not self.statuses.apply(event):
            return []
        before, self.status = self.status, event
        self.model = event.model or self.model
        if not listened:
            return []
        same = before is not None and _told(before) == _told(event)
        moved = before is None or not same or (before.step, before.steps) != (event.step, event.steps)
        return [*([] if same else [self.status_frame()]), *(self._progress() if moved else [])]

    # -- frames

    def _cursor(self, text_length: int, offset: int | None = None) -> str:
        fold = self.fold
        at = offset if offset is not None else (fold.offset if fold.offset is not None else -1)
        if self.done and offset is None:
            at = self.terminal_offset - 1  # the outcome itself is still to be told
        return encode_cursor(
            Cursor(
                partition=self.partition,
                offset=at,
                epoch=fold.epoch,
                attempt=fold.attempt,
                text_length=text_length,
            )
        )

    def cursor(self) -> str:
        return self._cursor(self.fold.text_length)

    def status_frame(self, cursor: str | None = None) -> StatusFrame:
        event = self.status
        cursor = cursor or self.cursor()
        if event is None:
            return StatusFrame(request_id=self.request_id, cursor=cursor, status="accepted", done=False)
        return StatusFrame(
            request_id=self.request_id,
            cursor=cursor,
            status=event.status,
            done=False,
            detail=event.detail,
            position=event.position,
            waiting_for=waiting_json(event.waiting_for),
            ttl_ms=event.ttl_ms,
            model=event.model,
            model_reason=event.model_reason,
        )

    def _progress(self) -> list[Frame]:
        """How far its run is, if that was said."""
        event = self.status
        if event is None or event.step is None or event.steps is None:
            return []
        return [ProgressFrame(request_id=self.request_id, cursor=self.cursor(), step=event.step, steps=event.steps)]

    def _preview(self) -> list[Frame]:
        """The newest preview of the attempt that counts, if there is one."""
        event, fold = self.preview, self.fold
        if event is None or event.preview is None or (event.epoch, event.attempt) != (fold.epoch, fold.attempt):
            return []
        said = event.preview
        image = image_json(said.image)
        frame = PreviewFrame(
            request_id=self.request_id, cursor=self.cursor(), step=said.step, steps=said.steps, image=image
        )
        return [frame]

    def chunk_frame(self, text: str, offset: int, calls: Sequence[dict[str, Any]] = ()) -> ChunkFrame:
        cursor = self._cursor(offset + len(text))
        return ChunkFrame(request_id=self.request_id, cursor=cursor, text=text, offset=offset, tool_calls=[*calls])

    def restarted_frame(self) -> RestartedFrame:
        return RestartedFrame(request_id=self.request_id, cursor=self._cursor(0), attempt=max(1, self.fold.attempt))

    def result_frame(self) -> ResultFrame:
        event = self.fold.terminal
        assert event is not None
        length = len(event.output_text or "")
        return ResultFrame(
            request_id=self.request_id,
            cursor=self._cursor(length, self.terminal_offset),
            status=event.status or "failed",
            result=None if self.large is not None else result_json(event),
            large=self.large,
            error=error_json(event, self.request_id),
            attempt=event.attempt,
            model=event.model,
            timings=None if event.timings is None else event.timings.to_dict(),
        )

    def opening(self, after: Cursor | None) -> list[Frame]:
        """What a new subscriber is told first: from the beginning, or from behind its cursor."""
        if self.done:
            return [*self._ending_after(after), self.result_frame()]
        # The text comes behind the status: who has only that must come back to where it was.
        cursor = self._cursor(0) if after is None else encode_cursor(after)
        return [
            self.status_frame(cursor),
            *self._progress(),
            *self._preview(),
            *self._text_after(after, self.fold.text),
        ]

    def _ending_after(self, after: Cursor | None) -> list[Frame]:
        event = self.fold.terminal
        text = event.output_text if event is not None else None
        if event is not None and event.output_artifact is not None:
            text = self.fold.text  # the outcome only refers to it
        if text is None or not self.stream:
            return []
        return self._text_after(after, text)

    def _text_after(self, after: Cursor | None, text: str) -> list[Frame]:
        if after is None or after.epoch < 0:
            return [self.chunk_frame(text, 0)] if text else []
        if (after.epoch, after.attempt) == (self.fold.epoch, self.fold.attempt) and after.text_length <= len(text):
            rest = text[after.text_length :]
            return [self.chunk_frame(rest, after.text_length)] if rest else []
        if (after.epoch, after.attempt) < (self.fold.epoch, self.fold.attempt):
            if after.text_length == 0:
                return [self.chunk_frame(text, 0)] if text else []
            return [self.restarted_frame(), *([self.chunk_frame(text, 0)] if text else [])]
        return [SnapshotFrame(request_id=self.request_id, cursor=self.cursor(), text=text)]

    def check_cursor(self, after: Cursor | None) -> None:
        """Raises InvalidCursor for one that was given out for another request."""
        if after is not None and after.partition not in (self.partition, self.former_partition):
            raise InvalidCursor("this cursor is of another request", param="after")

    def is_behind(self, after: Cursor) -> bool:
        """Whether a cursor stands behind the outcome already: nothing is left to tell."""
        return self.done and after.offset >= self.terminal_offset >= 0

    # -- the public object

    def to_json(self, *, whole: bool = False) -> dict[str, Any]:
        """The request as callers see it.

        A large output is left out, and `result_omitted` says so. With `whole` it is there, which is for a thread.
        """
        event = self.fold.terminal
        status = self.status
        public: dict[str, Any] = {
            "object": "request",
            "request_id": self.request_id,
            "task": self.task,
            "status": self.status_name,
            "done": event is not None,
            "attempt": event.attempt if event is not None else 1 if status is None else status.attempt,
            "priority": self.priority,
            "model": self.model,
            "pool": self.pool,
            "conversation_id": self.conversation_id,
            "position": None if event is not None or status is None else status.position,
            "detail": None if event is not None or status is None else status.detail,
            "waiting_for": None if event is not None or status is None else waiting_json(status.waiting_for),
            "progress": None if event is not None else progress_json(status),
            "model_reason": None if status is None else status.model_reason,
            "ttl_ms": None if status is None else status.ttl_ms,
            "created_at": rfc3339(self.accepted_ms),
            "finished_at": None if event is None else rfc3339(event.created_at),
            "timings": None if event is None or event.timings is None else event.timings.to_dict(),
            "result": None if event is None or self.large is not None else result_json(event),
            "error": None if event is None else error_json(event, self.request_id),
            "metadata": self.metadata,
        }
        if self.large is not None:
            public |= {"result": self.large.result()} if whole else {"result_omitted": True}
        return public


def metadata_bytes(metadata: Mapping[str, str]) -> int:
    """About the memory that it takes decoded."""
    return sum(sys.getsizeof(name) + sys.getsizeof(text) for name, text in metadata.items())


def _told(event: StatusEvent) -> tuple[str, int | None, str | None]:
    """What readers hear of a status: a later one that says the same is no news."""
    return event.status, event.position, None if event.waiting_for is None else event.waiting_for.reason


def waiting_json(waiting: WaitingFor | None) -> dict[str, Any] | None:
    """What a request waits for, as callers see it."""
    if waiting is None:
        return None
    at_ms = waiting.estimated_start_at
    return {
        "reason": waiting.reason,
        "position": waiting.position,
        "need_bytes": waiting.need_bytes,
        "free_bytes": waiting.free_bytes,
        "estimated_start_at": None if at_ms is None else rfc3339(at_ms),
    }


def progress_json(status: StatusEvent | None) -> dict[str, int] | None:
    """How far a run is, as callers see it."""
    if status is None or status.step is None or status.steps is None:
        return None
    return {"step": status.step, "steps": status.steps}
