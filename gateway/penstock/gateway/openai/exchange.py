"""Running one OpenAI exchange: wait or stream, notice the client's going, and turn the outcome into an answer."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable
from types import MappingProxyType
from typing import Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from penstock.common.background import BackgroundTasks
from penstock.gateway.edge.disconnects import ClientGone, unless_gone
from penstock.gateway.edge.errors import FinalFailure, error_response, log_unexpected, outcome_error
from penstock.gateway.edge.event_stream import KEEPALIVE, KEEPALIVE_S
from penstock.gateway.openai.chat_answers import Json, choices_of
from penstock.gateway.openai.chat_bodies import Words, in_openai_words
from penstock.gateway.openai.splice import CallSplice, LogprobSplice, StreamSplice
from penstock.gateway.service.control import Control
from penstock.gateway.service.large_answers import beside_the_loop
from penstock.gateway.service.subscriptions import SlowConsumer, Subscription
from penstock.gateway.view.frames import ChunkFrame, Frame, RestartedFrame, ResultFrame, SnapshotFrame, StatusFrame
from penstock.gateway.view.outputs import encode_json
from penstock.schemas.errors import InternalError, Overloaded, PenstockError
from penstock.schemas.records import STATUS_RANKS

logger = logging.getLogger(__name__)

NO_WORDS: Words = MappingProxyType({})
_background = BackgroundTasks(ends_process=False)


class EventWriter(Protocol):
    """Makes the event objects of one stream, and their bytes."""

    @property
    def last(self) -> bytes:
        """What follows the last event."""
        ...

    def encoded(self, events: list[Json], dumps: Callable[[Json], str] = ...) -> bytes: ...
    def failure(self, error: PenstockError) -> bytes: ...
    def opening(self) -> list[Json]: ...
    def text(self, text: str, logprobs: list[Json]) -> list[Json]:
        """New text, new log probabilities of tokens, or both. Tokens may come before or behind their text."""
        ...

    def calls(self, pieces: list[Json]) -> list[Json]: ...
    def ending(self, result: Json) -> list[Json]:
        """After all text, log probabilities and pieces of calls of the first answer."""
        ...


def cancel_abandoned(control: Control, tenant: str, request_id: str) -> None:
    """Cancel a request that nobody waits for any more, without holding up the connection's end."""

    async def cancel() -> None:
        try:
            await control.abandon(tenant, request_id)
        except PenstockError as error:
            # It runs to its end instead: nothing is lost but work.
            logger.warning("openai.cancel_failed request_id=%s code=%s", request_id, error.code)

    _background.start(cancel(), f"cancel {request_id}")


async def outcome(frames: AsyncIterator[Frame], words: Words = NO_WORDS) -> Json:
    """The result of a completed request. Raises FinalFailure for every other outcome."""
    async for frame in frames:
        if isinstance(frame, ResultFrame):
            return completed(frame, words)
    raise InternalError("the subscription ended without an outcome")


def completed(frame: ResultFrame, words: Words = NO_WORDS) -> Json:
    """The result of a terminal frame with its model and time. Raises FinalFailure if it is not `completed`.

    `words`: how the caller's route names the fields.
    """
    if frame.status == "completed":
        made = {"model": frame.model, "completed_at": frame.finished_ms // 1000 or None}
        return {**made, **(frame.result or {})}
    raise FinalFailure(in_openai_words(outcome_error(frame.status, frame.error), words=words), frame.request_id)


async def stream_events(
    subscription: Subscription,
    writer: EventWriter,
    keepalive_s: float = KEEPALIVE_S,
    *,
    whole: Callable[[Json], Awaitable[Json]] | None = None,
    words: Words = NO_WORDS,
    resumes: bool = False,
) -> AsyncGenerator[bytes]:
    """Server-sent events of one answer. Raises FinalFailure or StreamRestarted where it cannot be carried on.

    `resumes`: the same events at each gateway. The stream opens when the request runs, and calls of tools come with the
    outcome, because only pieces of text can be read again. `whole` fetches the output of a result that only refers to
    it. A large output is encoded on a thread.
    """
    turn = _StreamTurn(writer, whole, words, resumes=resumes)
    pulse = Pulse(keepalive_s)
    while True:
        events, failure = await turn.on_frames(await new_frames(subscription, keepalive_s))
        if turn.result is not None:
            yield await _ending(writer, events, turn.result)
            return
        if events:
            yield writer.encoded(events)
            pulse.told()
        if failure is not None:
            raise failure
        if pulse.is_due():  # nothing came, or nothing that says something here
            yield KEEPALIVE
            pulse.told()


class Pulse:
    """When a stream that has nothing to say must say that it lives."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self.told()

    def told(self) -> None:
        self._told_at = time.monotonic()

    def is_due(self) -> bool:
        return time.monotonic() - self._told_at >= self._every_s


async def _ending(writer: EventWriter, events: list[Json], result: Json) -> bytes:
    """The last events of a stream, behind those that came with them."""

    def make() -> bytes:
        return writer.encoded([*events, *writer.ending(result)], encode_json) + writer.last

    return await beside_the_loop(result, make)


async def new_frames(subscription: Subscription, keepalive_s: float) -> list[Frame]:
    """All frames that have come, so that a burst costs one turn of the loop; none when none came for so long."""
    if frames := subscription.take_nowait():
        return frames
    try:
        async with asyncio.timeout(keepalive_s):
            frame = await subscription.next_frame()
    except TimeoutError:
        return []
    if frame is None:
        raise InternalError("the subscription ended without an outcome")
    return [frame, *subscription.take_nowait()]


class _StreamTurn:
    """Frames in, chunk objects out."""

    def __init__(
        self,
        writer: EventWriter,
        whole: Callable[[Json], Awaitable[Json]] | None,
        words: Words,
        *,
        resumes: bool = False,
    ) -> None:
        self.result: Json | None = None
        """That of the outcome, when it has come and its text was sent."""
        self._writer = writer
        self._whole = whole
        self._words = words
        self._resumes = resumes
        self._splice = StreamSplice()
        self._calls = CallSplice()
        self._logprobs = LogprobSplice()
        self._opened = False

    async def on_frames(self, frames: Iterable[Frame]) -> tuple[list[Json], PenstockError | FinalFailure | None]:
        """What the frames say, as far as it can be carried on, and why it cannot."""
        events: list[Json] = []
        try:
            for frame in frames:
                events += await self._on_frame(frame)
                if self.result is not None:
                    break
        except (PenstockError, FinalFailure) as error:
            return events, error
        return events, None

    async def _on_frame(self, frame: Frame) -> list[Json]:
        match frame:
            case ChunkFrame() if self._resumes:
                return [event for piece in frame.pieces() for event in self._chunk(piece)]
            case ChunkFrame():
                text = self._chunk(frame)
                return [*text, *self._pieces(self._calls.pieces(frame.tool_calls))] if frame.tool_calls else text
            case SnapshotFrame():
                return self._text(self._splice.snapshot(frame.text))
            case StatusFrame() if self._resumes and STATUS_RANKS.get(frame.status, 0) >= STATUS_RANKS["running"]:
                return self._open()
            case RestartedFrame():
                self._splice.restart()
                self._calls.restart()
                self._logprobs.restart()
            case ResultFrame():
                result = completed(frame, self._words)
                if "artifact" in result and self._whole is not None:
                    result = await self._whole(result)
                first = choices_of(result)[0]
                logprobs = self._logprobs.finish(first.get("logprobs") or [])
                text = self._text(self._splice.finish(result.get("text") or ""), logprobs)
                calls = self._pieces(self._calls.finish(result.get("tool_calls") or []))
                self.result = result
                return [*text, *calls, *self._open()]
            case _:
                pass
        return []

    def _chunk(self, frame: ChunkFrame) -> list[Json]:
        logprobs = self._logprobs.pieces(frame.logprobs, frame.logprobs_offset) if frame.logprobs else []
        return self._text(self._splice.chunk(frame.text, frame.offset), logprobs)

    def _text(self, text: str, logprobs: list[Json] | None = None) -> list[Json]:
        return [*self._open(), *self._writer.text(text, logprobs or [])] if text or logprobs else []

    def _pieces(self, pieces: list[Json]) -> list[Json]:
        return [*self._open(), *self._writer.calls(pieces)] if pieces else []

    def _open(self) -> list[Json]:
        opening = [] if self._opened else self._writer.opening()
        self._opened = True
        return opening


class AnswerStream(Response):
    """A response of server-sent events that waits for its first event before it sends a status.

    So a request that fails early fails with its own HTTP status; a failure after that is an `error` event.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes],
        request_id: str,
        *,
        failure: Callable[[PenstockError], bytes],
        abandoned: Callable[[], None],
        close: Callable[[], None],
    ) -> None:
        super().__init__(media_type="text/event-stream")
        self.headers["cache-control"] = "no-cache"
        self.headers["x-accel-buffering"] = "no"
        self.headers["x-request-id"] = request_id
        del self.headers["content-length"]
        self._events = events
        self._request_id = request_id
        self._failure_event = failure
        self._abandoned = abandoned
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self._answer(scope, receive, send))
        except (ClientGone, OSError):
            self._abandoned()
        finally:
            await self._events.aclose()
            self._close()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            first = await anext(self._events)
        except Exception as error:
            failure, final = self._failure(error, scope)
            await error_response(failure, request_id=self._request_id, final=final)(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": first, "more_body": True})
        try:
            async for event in self._events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        except OSError:
            raise
        except Exception as error:
            failure, _ = self._failure(error, scope)
            event = self._failure_event(failure)
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _failure(self, error: Exception, scope: Scope) -> tuple[PenstockError, bool]:
        """What the caller gets, and whether it is the request's outcome. Without an outcome the request goes."""
        if isinstance(error, FinalFailure):
            return error.error, True
        self._abandoned()
        if isinstance(error, SlowConsumer):
            return Overloaded("the stream was not read as fast as it came"), False
        if isinstance(error, PenstockError):
            return error, False
        return InternalError("internal error", details={"incident": log_unexpected(error, scope["path"])}), False
