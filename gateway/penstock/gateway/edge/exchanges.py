"""One HTTP exchange at the edge: its `send`, which adds headers and knows how far the answer is, and its `receive`s."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

from starlette.types import Message, Receive, Scope, Send

from penstock.gateway.edge.bodies import Body
from penstock.gateway.edge.disconnects import ClientGone
from penstock.gateway.edge.errors import error_response
from penstock.gateway.edge.event_stream import server_sent
from penstock.schemas.errors import PenstockError, error_body

RawHeaders = list[tuple[bytes, bytes]]


class Answer:
    """The `send` of one exchange: adds the headers of the edge, and knows how far the answer has come."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._more: Callable[[], RawHeaders] | None = None
        self.streams_events = self._sent = False
        self._look: Callable[[], object] | None = None
        self.started = self.ended = False
        self.status = 0
        self.request_id: str | None = None
        """That the answer names: of the inference request, or of the error."""
        self.body: Body | None = None
        self.refusal: PenstockError | None = None
        """Why the rest of the body was not sent."""

    def add_at_start(self, headers: Callable[[], RawHeaders]) -> None:
        """Headers that are asked for when the answer begins."""
        self._more = headers

    def look_at_each_piece(self, look: Callable[[], object]) -> None:
        """Call `look` before each piece of the body but the first. What it raises ends the answer."""
        self._look = look

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started, self.status = True, message["status"]
            headers: RawHeaders = list(message.get("headers", ()))
            for name, value in headers:
                if name == b"content-type":
                    self.streams_events = value.startswith(b"text/event-stream")
                elif name == b"x-request-id":
                    self.request_id = value.decode("latin-1")
            if self._more is not None:
                headers += self._more()
            if self.body is not None and self.body.late:
                headers.append((b"connection", b"close"))
            message = {**message, "headers": headers}
        elif message["type"] == "http.response.body":
            if self._sent and self._look is not None and message.get("body"):
                self._check()
            self._sent = True
            self.ended = not message.get("more_body", False)
        await self._send(message)

    def _check(self) -> None:
        """Raises ClientGone, which nothing between here and the edge turns into something else."""
        assert self._look is not None
        try:
            self._look()
        except PenstockError as error:
            self.refusal = error
            raise ClientGone from None

    async def refuse(self, error: PenstockError, scope: Scope, receive: Receive) -> None:
        """Say why the answer ends, as far as it still can."""
        self._look = None
        if not self.started:
            await error_response(error)(scope, receive, self)
            return
        last = b""
        if self.streams_events:
            last = server_sent(json.dumps(error_body(error)), "error")
        await self({"type": "http.response.body", "body": last, "more_body": False})


def empty_body(then: Receive) -> Receive:
    """A `receive` that has no body and then waits for the client's going."""
    return body_again(b"", then)


def body_again(content: bytes, then: Receive) -> Receive:
    """A `receive` that has this body, which was read already, and then waits for the client's going."""
    told = False

    async def receive() -> Message:
        nonlocal told
        if told:
            return await then()
        told = True
        return {"type": "http.request", "body": content, "more_body": False}

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
