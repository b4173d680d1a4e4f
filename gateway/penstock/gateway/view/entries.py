"""One request as the gateway's view holds it, and the frames that a subscriber of it is owed. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
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
from penstock.gateway.view.outputs import error_json, image_json, result_json
from penstock.gateway.view.public import request_json, waiting_json
from penstock.gateway.view.request_state import RequestState
from penstock.schemas.cursor import Cursor, encode_cursor
from penstock.schemas.errors import InvalidCursor
from penstock.schemas.fold import IGNORED, Chunk, FoldStep, Previewed
from penstock.schemas.records import StatusEvent
from penstock.schemas.topics import partition_for


class Entry(RequestState):
    """The state of a request, and which parts of it its readers get."""

    __slots__ = ()

    def to_json(self, *, whole: bool = False) -> dict[str, Any]:
        """As `request_json`."""
        return request_json(self, whole=whole)

    @property
    def subjects(self) -> list[Hashable]:
        """Who follows one of these hears of it; of its outcome also who waits for that alone."""
        subjects: list[Hashable] = [("request", self.tenant, self.request_id)]
        if self.conversation_id is not None:
            subjects.append(("conversation", self.tenant, self.conversation_id))
        return subjects

    # -- frames

    def on_status(self, event: StatusEvent, *, listened: bool = True) -> list[Frame]:
        """Frames that follow from an event of the status topic, if anybody listens.

        The result topic alone says how it ended.
        """
        if event.done or self.done or (event.epoch, event.attempt) < (self.fold.epoch, self.fold.attempt):
            return []
        if not self.statuses.apply(event):
            return []
        before, self.status = self.status, event
        if event.status == "running" and (before is None or _run(before) != _run(event)):
            self.started_ms = event.created_at
        self.model = event.model or self.model
        if not listened:
            return []
        same = before is not None and _told(before) == _told(event)
        moved = before is None or not same or (before.step, before.steps) != (event.step, event.steps)
        return [*([] if same else [self.status_frame()]), *(self._progress() if moved else [])]

    def frames_of(self, step: FoldStep, told: Cursor | None = None) -> list[Frame]:
        """The frames that follow from what `on_result` said; `told`: what readers have got, if not all before."""
        if step is IGNORED:
            return []
        if isinstance(step, Chunk):
            frames: list[Frame] = []
            if step.restarted:
                frames.append(self.restarted_frame())
            if step.text or step.calls or step.logprobs:
                frame = self.chunk_frame(step.text, step.text_offset, step.calls)
                frame.logprobs, frame.logprobs_offset = step.logprobs, step.logprobs_offset
                frames.append(frame)
            return frames
        if isinstance(step, Previewed):
            return [*([self.restarted_frame()] if step.restarted else []), *self._preview()]
        return [*(self._rest() if told is None else self._ending_after(told)), self.result_frame()]

    def opening(self, after: Cursor | None) -> list[Frame]:
        """What a new subscriber gets first: from the beginning, or from behind its cursor."""
        if self.done:
            return [*self._ending_after(after), self.result_frame()]
        # The text comes behind the status: who has only that must come back to where it was.
        cursor = self._cursor(0) if after is None else encode_cursor(after)
        return [
            self.status_frame(cursor),
            *self._progress(),
            *self._preview(),
            *([] if self.passed_over else self._text_after(after, self.fold.text)),
        ]

    def replay(self) -> list[Frame]:
        """The same from the first piece of the text on, for a reader who counts the pieces.

        The outcome brings what no piece has.
        """
        text = self.fold.text
        told: list[Frame] = [self._text_frame(text, 0)] if text else []
        return [*told, self.result_frame()] if self.done else [self.status_frame(), *told]

    def text_after(self, told: Cursor) -> list[Frame]:
        """The rest of the text for readers that have got so much of it."""
        return self._text_after(told, self.fold.text)

    def _ending_after(self, after: Cursor | None) -> list[Frame]:
        event = self.fold.terminal
        text = event.output_text if event is not None else None
        if event is not None and event.output_artifact is not None and not self.passed_over:
            text = self.fold.text  # the outcome only refers to it
        if text is None or not self.stream:
            return []
        return self._text_after(after, text)

    def _text_after(self, after: Cursor | None, text: str) -> list[Frame]:
        if after is None or after.epoch < 0:
            return [self._text_frame(text, 0)] if text else []
        place = (after.epoch, after.attempt)
        if self.fold.since <= place <= self.fold.text_place and after.text_length <= len(text):
            rest = text[after.text_length :]
            return [self._text_frame(rest, after.text_length)] if rest else []
        if place < self.fold.text_place:
            if after.text_length == 0:
                return [self._text_frame(text, 0)] if text else []
            return [self.restarted_frame(), *([self._text_frame(text, 0)] if text else [])]
        return [SnapshotFrame(request_id=self.request_id, cursor=self.cursor(), text=text)]

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

    # -- cursors

    def check_cursor(self, after: Cursor | None) -> None:
        """Raises InvalidCursor for one that was given out for another request."""
        if after is None or after.partition in (self.place, self.former_partition):
            return
        # Another gateway may have given it out before any event came, and before the topic got more partitions.
        if not self.partitions or after.partition != partition_for(self.request_id.encode(), self.partitions):
            raise InvalidCursor("this cursor is of another request", param="after")

    def is_behind(self, after: Cursor) -> bool:
        """Whether a cursor stands behind the outcome already: nothing is left to tell."""
        return self.done and after.offset >= self.terminal_offset >= 0

    def cursor(self) -> str:
        return self._cursor(self.fold.text_length)

    def _cursor(self, text_length: int, offset: int | None = None) -> str:
        fold = self.fold
        at = offset if offset is not None else (fold.offset if fold.offset is not None else -1)
        if self.done and offset is None:
            at = self.terminal_offset - 1  # the outcome itself is still to be sent
        return encode_cursor(
            Cursor(
                partition=self.place,
                offset=at,
                epoch=fold.text_place[0],
                attempt=fold.text_place[1],
                text_length=text_length,
            )
        )

    # -- one frame

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

    def _text_frame(self, text: str, offset: int) -> ChunkFrame:
        """All text from there on, as one frame."""
        frame, logprobs = self.chunk_frame(text, offset), self.fold.logprobs
        frame.ends = self.fold.piece_ends
        if logprobs is not None:
            known = logprobs.count_at(offset)
            frame.logprobs, frame.logprobs_offset = logprobs.tokens(known), known
            frame.logprob_ends = {**logprobs.ends}
        return frame

    def chunk_frame(self, text: str, offset: int, calls: Sequence[dict[str, Any]] = ()) -> ChunkFrame:
        cursor = self._cursor(offset + len(text))
        return ChunkFrame(request_id=self.request_id, cursor=cursor, text=text, offset=offset, tool_calls=[*calls])

    def restarted_frame(self) -> RestartedFrame:
        return RestartedFrame(request_id=self.request_id, cursor=self._cursor(0), attempt=max(1, self.fold.attempt))

    def result_frame(self) -> ResultFrame:
        frame, event = self.outcome_frame(), self.fold.terminal
        assert event is not None
        frame.cursor = self._cursor(len(event.output_text or ""), self.terminal_offset)
        return frame

    def outcome_frame(self) -> ResultFrame:
        """For who waits for the outcome alone, and goes on from nowhere: without a cursor."""
        event = self.fold.terminal
        assert event is not None
        return ResultFrame(
            request_id=self.request_id,
            cursor=None,
            status=event.status or "failed",
            result=None if self.large is not None else result_json(event),
            large=self.large,
            error=error_json(event, self.request_id),
            attempt=event.attempt,
            model=event.model,
            finished_ms=event.created_at,
            timings=None if event.timings is None else event.timings.to_dict(),
        )


def _run(event: StatusEvent) -> tuple[str, int, int]:
    return event.status, event.epoch, event.attempt


def _told(event: StatusEvent) -> tuple[str, int | None, str | None]:
    """What readers hear of a status: a later one that says the same is no news."""
    return event.status, event.position, None if event.waiting_for is None else event.waiting_for.reason
