"""One HTTP exchange at the edge: its `send`, which adds headers and knows how far the answer is, and its `receive`s."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

from starlette.types import Message, Receive, Scope, Send

from penstock.gateway.edge.bodies import Body
from penstock.gateway.edge.errors import error_response
from penstock.gateway.edge.event_stream import server_sent
from penstock.schemas.errors import Unauthenticated, error_body

RawHeaders = list[tuple[bytes, bytes]]


class Answer:
    """The `send` of one exchange: adds the headers of the edge, and knows how far the answer has come."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._more: Callable[[], RawHeaders] | None = None
        self._streams_events = False
        self.started = self.ended = False
        self.body: Body | None = None

    def add_at_start(self, headers: Callable[[], RawHeaders]) -> None:
        """Headers that are asked for when the answer begins."""
        self._more = headers

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            headers: RawHeaders = list(message.get("headers", ()))
            self._streams_events = any(n == b"content-type" and v.startswith(b"text/event-stream") for n, v in headers)
            if self._more is not None:
                headers += self._more()
            if self.body is not None and self.body.late:
                headers.append((b"connection", b"close"))
            message = {**message, "headers": headers}
        elif message["type"] == "http.response.body" and not message.get("more_body", False):
            self.ended = True
        await self._send(message)

    async def end_revoked(self, scope: Scope, receive: Receive) -> None:
        """Say that the key was taken back, as far as the answer still can."""
        error = Unauthenticated("this key was revoked")
        if not self.started:
            await error_response(error)(scope, receive, self)
            return
        last = b""
        if self._streams_events:
            last = server_sent(json.dumps(error_body(error)), "error")
        await self({"type": "http.response.body", "body": last, "more_body": False})


def empty_body(then: Receive) -> Receive:
    """A `receive` that has no body and then waits for the client's going."""
    told = False

    async def receive() -> Message:
        nonlocal told
        if told:
            return await then()
        told = True
        return {"type": "http.request", "body": b"", "more_body": False}

    return receive


async def unless_set(event: asyncio.Event, receive: Receive, instead: Message) -> Message:
    """What is received, or `instead` once the event is set."""
    received = asyncio.ensure_future(receive())
    waited = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait({received, waited}, return_when=asyncio.FIRST_COMPLETED)
        return received.result() if received.done() else instead
    finally:
        for task in (received, waited):
            task.cancel()
