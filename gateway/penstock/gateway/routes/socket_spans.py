"""Spans of what frames of a socket begin: from the frame that submits or follows a request to its result."""

from __future__ import annotations

import time
from asyncio import CancelledError
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from penstock.common import tracing as names
from penstock.common.telemetry import active
from penstock.common.tracing import Attributes, Span, SpanContext, context_of
from penstock.schemas.errors import InvalidRequest, PenstockError

ROUTE = "/v1/ws"


@dataclass(frozen=True, kw_only=True, slots=True)
class Begun:
    """`traceparent` is for the record: the span's own, or the client's while traces are off. `context`: None then."""

    name: str
    traceparent: str | None
    parent: SpanContext | None
    context: SpanContext | None
    start_ns: int = field(default_factory=time.time_ns)


class SocketSpans:
    """Of one socket. Those that are open end with the result of their request, or with the socket."""

    def __init__(self, tenant: str, traceparent: str | None) -> None:
        """`traceparent`: of the handshake, for frames without one."""
        self._tenant, self._traceparent = tenant, traceparent
        self._telemetry = active()
        self._open: dict[str, Begun] = {}

    @contextmanager
    def begun(self, frame: Mapping[str, Any]) -> Generator[Begun]:
        """Around the work on a frame: an error ends its span, and so does the socket's end. Else `follow` is next.

        Raises InvalidRequest.
        """
        given = frame.get("traceparent")
        if not isinstance(given, str | None):
            raise InvalidRequest("traceparent must be text", param="traceparent")
        name, traceparent = f"{frame['type']} {ROUTE}", given or self._traceparent
        parent, context = context_of(traceparent), None
        if self._telemetry is not None:
            context = self._telemetry.begin(parent, name, "server")
            traceparent = context.traceparent
        begun = Begun(name=name, traceparent=traceparent, parent=parent, context=context)
        try:
            yield begun
        except CancelledError:  # the client left, or the gateway stops
            self._end(begun, {})
            raise
        except Exception as error:
            self._end(begun, {}, error.code if isinstance(error, PenstockError) else type(error).__name__)
            raise

    def follow(self, request_id: str, begun: Begun) -> None:
        """The span is that of the request from now on."""
        self.ended(request_id)
        if begun.context is not None:
            self._open[request_id] = begun

    def ended(self, request_id: str, status: str | None = None) -> None:
        """The request's result was sent, with this status; without one: nobody follows it here any more."""
        if (begun := self._open.pop(request_id, None)) is not None:
            known: Attributes = {} if status is None else {names.STATUS: status}
            self._end(begun, {names.REQUEST_ID: request_id, **known})

    def close(self) -> None:
        """The socket is closed."""
        for request_id in list(self._open):
            self.ended(request_id)

    def _end(self, begun: Begun, attributes: Attributes, error: str | None = None) -> None:
        if self._telemetry is None or begun.context is None:
            return
        if error is not None:
            attributes = {**attributes, names.ERROR_TYPE: error}
        span = Span(
            name=begun.name,
            kind="server",
            context=begun.context,
            parent=begun.parent,
            start_ns=begun.start_ns,
            end_ns=time.time_ns(),
            attributes={names.ROUTE: ROUTE, names.TENANT: self._tenant, **attributes},
            error=error,
        )
        self._telemetry.end((span,))
