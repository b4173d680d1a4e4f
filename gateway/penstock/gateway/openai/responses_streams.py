"""The stream of a response that is made in the background: any gateway can go on with it behind any of its events.

The numbers of its events follow from the log alone: each piece of the text, as its worker wrote it, is one event. A
gateway makes all events from the first one on and leaves out those that the client has.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable

from penstock.gateway.edge.errors import FinalFailure
from penstock.gateway.edge.event_stream import server_sent
from penstock.gateway.openai.chat_answers import compact_json
from penstock.gateway.openai.exchange import stream_events
from penstock.gateway.openai.responses_answers import Asked, Json, ResponseWriter, ended_otherwise
from penstock.gateway.openai.responses_bodies import WORDS
from penstock.gateway.service.subscriptions import SlowConsumer, Subscription
from penstock.schemas.errors import Overloaded, PenstockError

FIRST_DELTA = 5
"""The number of the first event with text. Created, queued, in_progress, an item and a part go before."""


class BackgroundWriter(ResponseWriter):
    """Leaves out the events up to the number `after`."""

    def __init__(self, asked: Asked, after: int | None = None) -> None:
        super().__init__(asked)
        self._after = -1 if after is None else after
        self._runs = False

    def beginning(self) -> bytes:
        """What is known before the request runs: the id of the response, and the first numbers."""
        queued = self._asked.response("queued", [])
        return self.encoded([{"type": f"response.{name}", "response": queued} for name in ("created", "queued")])

    def opening(self) -> list[Json]:
        self._runs = True
        return [{"type": "response.in_progress", "response": self._asked.response("in_progress", [])}]

    def failed(self, error: PenstockError) -> bytes:
        """The outcome of a request that did not complete. It opens, so that the numbers are the same for everybody."""
        ended = {"type": "response.failed", "response": ended_otherwise(self._asked, error)}
        return self.encoded([*([] if self._runs else self.opening()), ended])

    def broken(self, error: PenstockError) -> bytes:
        """Why this gateway cannot go on. It has the number of the event before: the client goes on behind that."""
        told = {"type": "error", "code": error.code, "message": error.message, "param": error.param}
        return server_sent(compact_json({**told, "sequence_number": max(self._number - 1, self._after)}), "error")

    def _encoded(self, event: Json, dumps: Callable[[Json], str]) -> bytes:
        if self._number <= self._after:
            self._number += 1
            return b""
        return super()._encoded(event, dumps)


async def background_events(
    frames: Subscription, writer: BackgroundWriter, whole: Callable[[Json], Awaitable[Json]]
) -> AsyncGenerator[bytes]:
    """Server-sent events to the outcome; the first may be empty. What prevents even the first one is raised."""
    told = writer.beginning()
    if told:
        yield told
    try:
        async for events in stream_events(frames, writer, whole=whole, words=WORDS, resumes=True):
            if events:
                told = events
                yield events
    except FinalFailure as failure:
        yield writer.failed(failure.error)
    except (SlowConsumer, PenstockError) as error:
        if not told:
            raise
        reason = error if isinstance(error, PenstockError) else Overloaded("the stream was not read as fast as it came")
        yield writer.broken(reason)
    if not told:
        yield b""
