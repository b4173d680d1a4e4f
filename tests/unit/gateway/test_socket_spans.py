"""Spans of a socket: what ends one, and that none is left open."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from penstock.common.tracing import SpanContext
from penstock.gateway.limits.callers import Caller
from penstock.gateway.routes import socket_spans, sockets
from penstock.gateway.routes.socket_spans import SocketSpans
from penstock.schemas.errors import Gone, NotFound


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> Mock:
    exporter = Mock(begin=Mock(return_value=SpanContext(1, 2)))
    monkeypatch.setattr(socket_spans, "active", lambda: exporter)
    return exporter


def errors(exporter: Mock) -> list[str | None]:
    """Of the spans that have ended."""
    return [span.error for one in exporter.end.call_args_list for span in one.args[0]]


@pytest.mark.parametrize(
    ("raised", "error"),
    [(asyncio.CancelledError(), None), (NotFound("no"), "not_found"), (ValueError("no"), "ValueError")],
)
def test_a_client_that_leaves_is_no_error(exporter: Mock, raised: BaseException, error: str | None) -> None:
    with pytest.raises(type(raised)), SocketSpans("t", None).begun({"type": "submit"}):
        raise raised
    assert errors(exporter) == [error]


async def test_what_cannot_be_followed_takes_no_place_and_ends_its_span(
    exporter: Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it was followed before."""
    monkeypatch.setattr(sockets, "caller_of", Mock(return_value=Caller(scopes=frozenset({"read"}))))
    service: Any = Mock(lookups=Mock(find_whole=AsyncMock()), subscriptions=Mock(reach=AsyncMock()))
    service.subscriptions.open.return_value.client.subjects = ()
    session: Any = sockets.Session(Mock(headers={}, scope={}), service, Mock())
    frame = {"type": "subscribe", "request_id": "r"}
    await session._subscribe(frame)
    assert session._followed == {"r"}
    service.subscriptions.follow.side_effect = Gone("forgotten")
    with pytest.raises(Gone):
        await session._subscribe(frame)
    assert session._followed == set()
    session._spans.close()
    assert errors(exporter) == [None, "gone"]
