"""Frames: what subscribers get, over SSE, WebSocket and the OpenAI routes. Each is encoded once for all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from pydantic_core import to_json

from penstock.gateway.view.outputs import LargeOutput, encode_json, on_output_thread
from penstock.schemas.errors import PenstockError, error_body


@dataclass(kw_only=True, slots=True)
class Frame:
    """Common to all: the request, and the cursor behind this frame. Treat frames as frozen: readers share them."""

    type: ClassVar[str] = ""

    request_id: str
    cursor: str | None
    _encoded: str | None = field(default=None, repr=False, compare=False)
    for_sockets: object | None = field(default=None, repr=False, compare=False)
    """What the sockets' route makes of it, once for all readers."""

    def body(self) -> dict[str, Any]:
        """The fields of this kind of frame, without the common ones."""
        return {}

    def to_json(self) -> dict[str, Any]:
        """The public frame."""
        return {"type": self.type, "request_id": self.request_id, **self.body(), "cursor": self.cursor}

    def encoded(self) -> str:
        """The public frame as JSON text, made once for all readers."""
        if self._encoded is None:
            self._encoded = to_json(self.to_json()).decode()
        return self._encoded


@dataclass(kw_only=True, slots=True)
class StatusFrame(Frame):
    """Where the request stands; the latest counts."""

    type: ClassVar[str] = "status"

    status: str
    done: bool
    detail: str | None = None
    position: int | None = None
    waiting_for: dict[str, Any] | None = None
    ttl_ms: int | None = None
    model: str | None = None
    model_reason: str | None = None

    def body(self) -> dict[str, Any]:
        return {
            "status": self.status,
            "done": self.done,
            "detail": self.detail,
            "position": self.position,
            "waiting_for": self.waiting_for,
            "ttl_ms": self.ttl_ms,
            "model": self.model,
            "model_reason": self.model_reason,
        }


@dataclass(kw_only=True, slots=True)
class ChunkFrame(Frame):
    """New text; `offset` counts the characters before it.

    `tool_calls`: pieces of calls of tools, {index, id, name, arguments, offset} each; id and name with the first one.
    `logprobs`: log probabilities of tokens, as in a result; so many came before them as `logprobs_offset` says. A
    reader who resumes may be told some of them again.
    `ends`: where the pieces end of which the text is made, counted as `offset`; empty if it is one piece.
    `logprob_ends`: how many log probabilities had come where such a piece ends.
    """

    type: ClassVar[str] = "chunk"

    text: str
    offset: int
    tool_calls: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    logprobs: Sequence[dict[str, Any]] = ()
    logprobs_offset: int = 0
    ends: Sequence[int] = field(default=(), repr=False, compare=False)
    logprob_ends: Mapping[int, int] | None = field(default=None, repr=False, compare=False)

    def pieces(self) -> Iterator[ChunkFrame]:
        """Each piece of the text as a frame of its own; this frame, if it is one piece or has no text."""
        if not self.ends:
            yield self
            return
        begin, end, first = self.offset, self.offset + len(self.text), self.logprobs_offset
        logprob_ends = self.logprob_ends or {}
        for piece_end in (*self.ends, end):
            if begin < piece_end <= end:
                next_first = logprob_ends.get(piece_end, first)
                yield replace(
                    self,
                    text=self.text[begin - self.offset : piece_end - self.offset],
                    offset=begin,
                    logprobs=self.logprobs[first - self.logprobs_offset : next_first - self.logprobs_offset],
                    logprobs_offset=first,
                )
                begin, first = piece_end, next_first

    def body(self) -> dict[str, Any]:
        told: dict[str, Any] = {"text": self.text, "offset": self.offset}
        if self.tool_calls:
            told["tool_calls"] = [{k: v for k, v in piece.items() if v is not None} for piece in self.tool_calls]
        if self.logprobs:
            told |= {"logprobs": self.logprobs, "logprobs_offset": self.logprobs_offset}
        return told


@dataclass(kw_only=True, slots=True)
class ProgressFrame(Frame):
    """So many steps of a run are done; within an attempt they only grow."""

    type: ClassVar[str] = "progress"

    step: int
    steps: int

    def body(self) -> dict[str, Any]:
        return {"step": self.step, "steps": self.steps}


@dataclass(kw_only=True, slots=True)
class PreviewFrame(Frame):
    """A small image of what there is so far; the newest counts."""

    type: ClassVar[str] = "preview"

    step: int
    steps: int
    image: dict[str, Any]

    def body(self) -> dict[str, Any]:
        return {"step": self.step, "steps": self.steps, "image": self.image}


@dataclass(kw_only=True, slots=True)
class RestartedFrame(Frame):
    """What was sent of the text is void: another attempt begins at offset 0."""

    type: ClassVar[str] = "restarted"

    attempt: int

    def body(self) -> dict[str, Any]:
        return {"attempt": self.attempt}


@dataclass(kw_only=True, slots=True)
class SnapshotFrame(Frame):
    """The text so far, in place of everything before: the cursor could not be continued from."""

    type: ClassVar[str] = "snapshot"

    text: str

    def body(self) -> dict[str, Any]:
        return {"text": self.text}


@dataclass(kw_only=True, slots=True)
class FailureFrame(Frame):
    """Why nothing can be said of this request now."""

    type: ClassVar[str] = "error"

    error: PenstockError

    def body(self) -> dict[str, Any]:
        return error_body(self.error, self.request_id)


@dataclass(kw_only=True, slots=True)
class ResultFrame(Frame):
    """The one outcome; always the last frame of a request. One with a large output is to be made `ready` first."""

    type: ClassVar[str] = "result"

    status: str
    result: dict[str, Any] | None
    error: dict[str, Any] | None
    attempt: int = 1
    timings: dict[str, Any] | None = None
    model: str | None = None
    finished_ms: int = field(default=0, repr=False, compare=False)
    large: LargeOutput | None = field(default=None, repr=False)
    """The output in place of `result`, until this is ready."""
    _making_ready: asyncio.Future[None] | None = field(default=None, repr=False, compare=False)

    async def ready(self) -> None:
        """Have a thread decode and encode a large output, once for all readers."""
        if self.large is None:
            return
        if self._making_ready is None:
            self._making_ready = asyncio.ensure_future(on_output_thread(self._make_ready))
        await asyncio.shield(self._making_ready)

    def _make_ready(self) -> None:
        if self.large is not None:
            self.result = self.large.result()
            self.large = None
            self._encoded = encode_json(self.to_json())

    def body(self) -> dict[str, Any]:
        self._make_ready()
        return {
            "status": self.status,
            "done": True,
            "result": self.result,
            "error": self.error,
            "attempt": self.attempt,
            "model": self.model,
            "timings": self.timings,
        }
