"""uvicorn's protocols with limits of time: for a request's head to come, and for a client to read what it is sent."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame as WireFrame
from websockets.frames import Opcode
from websockets.http11 import Request
from websockets.protocol import State

from penstock.schemas.errors import InvalidRequest, error_body

logger = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., None])


def _bad_head() -> bytes:
    error = InvalidRequest("the head of this upgrade request is not valid, or too large")
    body = json.dumps(error_body(error), separators=(",", ":")).encode()
    lines = ["", "content-type: application/json", f"content-length: {len(body)}", "connection: close", "", ""]
    return "\r\n".join(lines).encode() + body


_BAD_HEAD = _bad_head()  # what follows the status line


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeouts:
    """Seconds that a client has to send a request's head, and to read more of what waits for it."""

    head_s: float = 30.0
    write_s: float = 30.0


class ConnectionActivity:
    """One connection: since when its head is awaited, and since when nothing of its buffer was read."""

    __slots__ = ("drained", "head_since", "size", "transport", "unread_since")

    def __init__(self, transport: asyncio.Transport, now: float) -> None:
        self.transport = transport
        self.head_since: float | None = now
        self.size = 0
        self.unread_since = now
        self.drained = False
        """The buffer ran low since the last look."""

    def is_stuck(self, now: float, timeouts: Timeouts) -> bool:
        """Look at it once more; whether it is to be cut off."""
        size = self.transport.get_write_buffer_size()
        if size < self.size or size == 0 or self.size == 0 or self.drained:
            self.unread_since = now
        self.size, self.drained = size, False
        late = self.head_since is not None and now - self.head_since >= timeouts.head_s
        return late or (size > 0 and now - self.unread_since >= timeouts.write_s)


class ConnectionMonitor:
    """Looks at all connections of a server now and then: one timer for all of them, which stops with the last."""

    def __init__(self, timeouts: Timeouts) -> None:
        self._timeouts = timeouts
        self._look_s = min(timeouts.head_s, timeouts.write_s) / 4
        self._timer: asyncio.TimerHandle | None = None
        self._activities: dict[asyncio.Transport, ConnectionActivity] = {}

    def watch(self, transport: asyncio.Transport) -> ConnectionActivity:
        loop = asyncio.get_running_loop()
        activity = self._activities[transport] = ConnectionActivity(transport, loop.time())
        if self._timer is None:
            self._timer = loop.call_later(self._look_s, self._look)
        return activity

    def forget(self, transport: asyncio.Transport) -> None:
        self._activities.pop(transport, None)

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        for activity in [one for one in self._activities.values() if one.is_stuck(loop.time(), self._timeouts)]:
            logger.info("edge.cut_off unsent_bytes=%d", activity.size)
            # A close would wait for the same reader.
            activity.transport.abort()
        self._timer = loop.call_later(self._look_s, self._look) if self._activities else None


SEND_NOW = "penstock.send_now"
"""In a socket's `scope["extensions"]`: the function that sends a `SharedText` at once, or says that it cannot now."""


class SharedText:
    """A text for many sockets: what goes over the wire is made once. A server's frames are the same for all clients."""

    __slots__ = ("text", "wire")

    def __init__(self, text: str) -> None:
        self.text = text
        self.wire = WireFrame(Opcode.TEXT, text.encode()).serialize(mask=False)


def _of_connection(method: F) -> F:
    """What it raises cuts off its connection. From the event loop it would count as a fault of the process."""

    @wraps(method)
    def call(self: Any, *args: Any) -> None:
        try:
            method(self, *args)
        except Exception:
            logger.exception("edge.connection_failed in=%s", method.__name__)
            if (transport := getattr(self, "transport", None)) is not None:
                transport.abort()

    return cast("F", call)


def protocols(timeouts: Timeouts) -> tuple[type[HttpToolsProtocol], type[WebSocketsSansIOProtocol]]:
    """(HTTP, WebSocket) for `uvicorn.Config`, both looked after by one warden."""
    monitor = ConnectionMonitor(timeouts)

    class TimedHttp(HttpToolsProtocol):
        @_of_connection
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._activity = monitor.watch(transport)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            # Any byte stops uvicorn's timer for idle connections. These began no request: an empty line, or the body
            # of one that is answered.
            if self._activity.head_since is None and (not self.cycle or self.cycle.response_complete):
                self._activity.head_since = self.loop.time()

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._activity.head_since = self.loop.time()

        def on_headers_complete(self) -> None:
            self._activity.head_since = None
            super().on_headers_complete()

        def resume_writing(self) -> None:
            self._activity.drained = True
            super().resume_writing()

        timeout_keep_alive_handler = _of_connection(HttpToolsProtocol.timeout_keep_alive_handler)

        @_of_connection
        def connection_lost(self, exc: Exception | None) -> None:
            monitor.forget(self.transport)
            super().connection_lost(exc)

    class TimedSocket(WebSocketsSansIOProtocol):
        @_of_connection
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self.conn.debug = False  # it would log keys and prompts: each header, and the start of each frame
            self._activity = monitor.watch(transport)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            # websockets reads the head again, with limits of its own; uvicorn hears nothing of a head that it refuses.
            if self.conn.handshake_exc is not None and not self.handshake_initiated:
                transport: asyncio.Transport = self.transport
                status, _, _ = b"".join(self.conn.data_to_send()).partition(b"\r\n")
                transport.write((status or b"HTTP/1.1 400 Bad Request") + _BAD_HEAD)
                transport.close()

        def handle_connect(self, event: Request) -> None:
            self._activity.head_since = None
            super().handle_connect(event)
            if not self.close_sent:  # else it was refused, and has no scope
                extensions: dict[str, Any] = self.scope.setdefault("extensions", {})
                extensions[SEND_NOW] = self.send_now

        def send_now(self, shared: SharedText) -> bool:
            """Send without waiting; False for a client that does not read, a closing one, or one with extensions."""
            conn = self.conn
            if not self.writable.is_set() or self.disconnected or self.close_sent:
                return False
            if conn.state is not State.OPEN or conn.extensions:
                return False
            self.transport.write(shared.wire)
            return True

        # Whatever state it is in: an exception would end the server before its lifespan has shut down.
        shutdown = _of_connection(WebSocketsSansIOProtocol.shutdown)
        send_keepalive_ping = _of_connection(WebSocketsSansIOProtocol.send_keepalive_ping)
        keepalive_timeout = _of_connection(WebSocketsSansIOProtocol.keepalive_timeout)

        def resume_writing(self) -> None:
            self._activity.drained = True
            super().resume_writing()

        @_of_connection
        def connection_lost(self, exc: Exception | None) -> None:
            monitor.forget(self.transport)
            super().connection_lost(exc)

    return TimedHttp, TimedSocket
