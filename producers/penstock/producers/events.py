"""What a follower of one request sees: its log records folded into events. Pure; the same for sync and async clients.

Law: after the last Restarted (or from the start) the texts of the chunks, joined, are the text of a completed Result.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, cast

from penstock.common.reader import RawMessage
from penstock.schemas.codec import Codec
from penstock.schemas.errors import (
    Cancelled,
    DeadLettered,
    DecodeError,
    Expired,
    InternalError,
    PenstockError,
    from_error_record,
)
from penstock.schemas.fold import Chunk as FoldedChunk
from penstock.schemas.fold import Ignored, Previewed, ResultFold, StatusFold, Terminal
from penstock.schemas.records import ArtifactRef, ErrorInfo, ResultEvent, StatusEvent
from penstock.schemas.texts import shortened
from penstock.schemas.topics import TopicNames

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

logger = logging.getLogger(__name__)


SHOWN_CHARS = 200
"""What `repr` shows of an output that is no text."""


class _Shown:
    """An event whose `repr` has the fields that differ from their defaults."""

    __slots__ = ()

    def __repr__(self) -> str:
        all_of = fields(cast("DataclassInstance", self))
        return _call(self, {one.name: value for one in all_of if (value := getattr(self, one.name)) != one.default})


def _call(event: object, shown: Mapping[str, object]) -> str:
    return f"{type(event).__name__}({', '.join(f'{name}={value!r}' for name, value in shown.items())})"


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Status(_Shown):
    """The request's state changed. `position` is its place in its worker's queue, when it waits."""

    status: str
    attempt: int
    detail: str | None = None
    position: int | None = None
    model: str | None = None
    model_reason: str | None = None
    """Why that model, when the request named none."""
    ttl_ms: int | None = None
    """The time to live, when a worker chose it."""


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Progress(_Shown):
    """A run has done a step of so many."""

    step: int
    steps: int
    attempt: int


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Preview(_Shown):
    """A small image of what there is so far: artifact_id, url, media_type, width, height, sha256."""

    step: int
    steps: int
    image: dict[str, Any]
    attempt: int


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Chunk(_Shown):
    """New text; `text_offset` characters came before it in this attempt.

    `tool_calls`: pieces of calls of tools, {index, id, name, arguments, offset} each; id and name with the first piece.
    `logprobs`: the next tokens with their log probabilities, where they were asked for, as in the outcome.
    """

    text: str
    text_offset: int
    attempt: int
    tool_calls: Sequence[Mapping[str, Any]] = ()
    logprobs: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Restarted(_Shown):
    """The text begins again: what was seen before is void."""

    attempt: int


@dataclass(frozen=True, slots=True, repr=False)
class Result:
    """The one outcome, always the last event. `event` is its whole record, of which `repr` shows the main fields."""

    event: ResultEvent

    def __repr__(self) -> str:
        other = None if self.text is not None or not self.event.output else str(self.event.output)
        shown: dict[str, object] = {
            "status": self.status,
            "text": self.text,
            "artifact": self.artifact and self.artifact.artifact_id,
            "output": other and shortened(other, SHOWN_CHARS),
            "error": self.error and f"{self.error.code}: {self.error.message}",
            "finish_reason": self.event.finish_reason,
            "model": self.event.model,
        }
        return _call(self, {name: value for name, value in shown.items() if value is not None})

    @property
    def status(self) -> str:
        """completed, failed, cancelled, expired or dead_lettered."""
        return self.event.status or "failed"

    @property
    def text(self) -> str | None:
        return self.event.output_text

    @property
    def artifact(self) -> ArtifactRef | None:
        """Where an output over 256 KiB lies, as JSON; it is not in the event then."""
        return self.event.output_artifact

    @property
    def error(self) -> ErrorInfo | None:
        """Why it did not complete."""
        return self.event.error


Event = Status | Progress | Preview | Chunk | Restarted | Result


class EventFold:
    """Folds one request's raw records of the result and status topics, in offset order each, into events."""

    def __init__(self, request_id: str, tenant: str, names: TopicNames, codec: Codec) -> None:
        self._names = names
        self._codec = codec
        self._results = ResultFold(request_id, tenant)
        self._statuses = StatusFold(request_id, tenant)

    @property
    def done(self) -> bool:
        return self._results.terminal is not None

    def apply(self, message: RawMessage) -> list[Event]:
        """The events that this record brings, often none. What does not decode is passed over with a log line."""
        if self.done or message.value is None:
            return []
        try:
            if message.topic == self._names.result:
                return self._result(self._codec.decode(message.value, ResultEvent), message.offset)
            return self._status(self._codec.decode(message.value, StatusEvent))
        except DecodeError as error:
            logger.warning("follow.undecodable topic=%s offset=%d error=%s", message.topic, message.offset, error.code)
            return []

    def _status(self, event: StatusEvent) -> list[Event]:
        # The end is told by the Result alone: a terminal status may overtake it, being on another topic.
        before = self._statuses.latest
        if not self._statuses.apply(event) or event.done:
            return []
        events: list[Event] = []
        # A status that only moves on within a run is progress, no new status.
        if event.step is None or before is None or (before.attempt, before.status) != (event.attempt, event.status):
            status = Status(
                status=event.status,
                attempt=event.attempt,
                detail=event.detail,
                position=event.position,
                model=event.model,
                model_reason=event.model_reason,
                ttl_ms=event.ttl_ms,
            )
            events.append(status)
        if event.step is not None and event.steps is not None:
            events.append(Progress(step=event.step, steps=event.steps, attempt=event.attempt))
        return events

    def _result(self, event: ResultEvent, offset: int) -> list[Event]:
        seen = self._results.text
        match self._results.apply(event, offset):
            case Ignored():
                return []
            case FoldedChunk() as chunk:
                begun = [Restarted(attempt=chunk.attempt)] if chunk.restarted else []
                if not (chunk.text or chunk.calls or chunk.logprobs):
                    return [*begun]
                told = Chunk(
                    text=chunk.text,
                    text_offset=chunk.text_offset,
                    attempt=chunk.attempt,
                    tool_calls=chunk.calls or (),
                    logprobs=chunk.logprobs,
                )
                return [*begun, told]
            case Previewed(restarted=restarted):
                return [*([Restarted(attempt=event.attempt)] if restarted else []), *_preview(event)]
            case Terminal():
                return [*_remainder(seen, event), Result(event)]


def _preview(event: ResultEvent) -> list[Event]:
    said = event.preview
    if said is None:
        return []
    return [Preview(step=said.step, steps=said.steps, image=said.image, attempt=event.attempt)]


def _chunk(text: str, text_offset: int, attempt: int, *, restarted: bool) -> list[Event]:
    events: list[Event] = [Restarted(attempt=attempt)] if restarted else []
    if text:
        events.append(Chunk(text=text, text_offset=text_offset, attempt=attempt))
    return events


def _remainder(seen: str, event: ResultEvent) -> list[Event]:
    """What the outcome's text has beyond the chunks; all of it, after Restarted, when it does not extend them."""
    text = event.output_text
    if event.status != "completed" or text is None or text == seen:
        return []
    if text.startswith(seen):
        return _chunk(text[len(seen) :], len(seen), event.attempt, restarted=False)
    return _chunk(text, 0, event.attempt, restarted=True)


def completed(event: ResultEvent) -> ResultEvent:
    """The event, when the request completed; else raises the typed error of its failure."""
    if event.status == "completed":
        return event
    raise failure_of(event)


def failure_of(event: ResultEvent) -> PenstockError:
    """The typed error of an outcome other than completed."""
    if event.error is not None:
        return from_error_record(event.error)
    about = f"request {event.request_id} ended as {event.status}"
    match event.status:
        case "cancelled":
            return Cancelled(about)
        case "expired":
            return Expired(about)
        case "dead_lettered":
            return DeadLettered(about)
        case _:
            return InternalError(about)
