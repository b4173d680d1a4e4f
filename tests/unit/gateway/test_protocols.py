"""Connections that do not move are found; those that do, however slowly, are let be."""

from __future__ import annotations

import asyncio
import inspect
import logging
import resource
from typing import Any
from unittest.mock import Mock

import pytest
import uvicorn
from hypothesis import given
from hypothesis import strategies as st
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState
from websockets.client import ClientProtocol
from websockets.frames import Frame, Opcode
from websockets.protocol import State
from websockets.uri import parse_uri

from penstock.common.background import on_faults
from penstock.gateway.edge.open_files import raise_open_files
from penstock.gateway.edge.protocols import SEND_NOW, ConnectionActivity, SharedText, Timeouts, protocols
from support import wait_until_async

TIMEOUTS = Timeouts(head_s=30, write_s=30)


class Transport:
    def __init__(self, size: int = 0) -> None:
        self.size = size

    def get_write_buffer_size(self) -> int:
        return self.size


def activity_of(transport: Any) -> ConnectionActivity:
    """Of a connection whose head has come."""
    activity = ConnectionActivity(transport, 0.0)
    activity.head_since = None
    return activity


def test_a_connection_that_is_not_read_is_stuck_and_a_head_that_does_not_come_late() -> None:
    transport: Any = Transport()
    activity = ConnectionActivity(transport, 0.0)
    assert [activity.is_stuck(now, TIMEOUTS) for now in (29.0, 30.0)] == [False, True]
    assert not activity_of(transport).is_stuck(1_000.0, TIMEOUTS)
    activity = activity_of(transport)
    # More is written, nothing is read.
    for now, size, stuck in ((10.0, 0, False), (20.0, 1_000, False), (40.0, 2_000, False), (50.0, 2_000, True)):
        transport.size = size
        assert activity.is_stuck(now, TIMEOUTS) is stuck


@given(st.lists(st.sampled_from(["read", "drained", "empty"]), min_size=1, max_size=50))
def test_a_connection_that_moves_is_never_stuck(moves: list[str]) -> None:
    transport = Transport(10_000)
    activity, now = activity_of(transport), 0.0
    for move in moves:
        now += 25.0
        match move:
            case "read":
                transport.size -= 1
            case "drained":
                activity.drained, transport.size = True, transport.size + 5_000
            case _:
                transport.size = 0
        assert not activity.is_stuck(now, TIMEOUTS)
        transport.size = transport.size or 10_000


def test_the_open_files_limit_is_raised_as_far_as_allowed_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard not in (resource.RLIM_INFINITY,) and hard < 2_000:
        pytest.skip("this machine allows no more")
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1_500, hard))
        with caplog.at_level(logging.INFO):
            assert raise_open_files(300) == 1_624
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 1_624
        assert "gateway.open_files limit=1624 wanted=1624" in caplog.text
        assert raise_open_files(10) == 1_624, "never lowered"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def made(kind: int, app: Any, transport: Any, **options: Any) -> Any:
    """A connection as the server makes it. `kind`: 0 of HTTP, 1 a socket."""
    config = uvicorn.Config(app, log_config=None, **options)
    config.load()
    protocol: Any = protocols(TIMEOUTS)[kind](config, ServerState(), {})
    protocol.connection_made(transport)
    return protocol


def open_socket(transport: Mock, **headers: str) -> Any:
    """A socket whose handshake has come."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "websocket.accept"})
        await asyncio.Event().wait()

    transport.is_closing.return_value = False
    transport.get_extra_info.return_value = None
    socket = made(1, app, transport, ws_per_message_deflate=False)
    client = ClientProtocol(parse_uri("ws://localhost/v1/ws"))
    request = client.connect()
    request.headers.update(headers)
    client.send_request(request)
    socket.data_received(b"".join(client.data_to_send()))
    return socket


async def test_debugging_logs_no_key_and_no_prompt(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "uvicorn.error")
    socket = open_socket(Mock(), authorization="Bearer pk_secret")
    await wait_until_async(lambda: socket.conn.state is State.OPEN)
    socket.data_received(Frame(Opcode.TEXT, b"a prompt").serialize(mask=True))
    assert "connection open" in caplog.text
    assert "pk_secret" not in caplog.text
    assert "prompt" not in caplog.text


async def test_a_socket_whose_shutdown_fails_is_aborted(caplog: pytest.LogCaptureFixture) -> None:
    transport = Mock()
    socket = made(1, lambda: None, transport)
    socket.conn.send_eof()  # as after any error of the protocol's
    socket.shutdown()
    transport.abort.assert_called_once_with()
    assert "edge.connection_failed in=shutdown" in caplog.text
    socket.connection_lost(ConnectionAbortedError())


@pytest.mark.parametrize(
    ("kind", "call", "arguments"),
    [
        (0, "connection_lost", [None]),
        (0, "timeout_keep_alive_handler", []),
        (1, "connection_lost", [None]),
        (1, "send_keepalive_ping", []),
        (1, "keepalive_timeout", []),
    ],
)
async def test_what_the_event_loop_calls_of_a_connection_ends_that_connection_alone(
    kind: int, call: str, arguments: list[Any]
) -> None:
    faults, transport, loop = list[str](), Mock(), asyncio.get_running_loop()
    on_faults(loop, lambda: faults.append("fault"))
    connection = made(kind, lambda: None, transport)
    transport.is_closing.side_effect = KeyError("as in a bug")
    connection.connections = None
    loop.call_soon(getattr(connection, call), *arguments)
    await wait_until_async(lambda: faults or transport.abort.called)
    assert faults == []


OVERRIDDEN = {
    HttpToolsProtocol: (
        "connection_made(self, transport)",
        "data_received(self, data)",
        "on_message_begin(self)",
        "on_headers_complete(self)",
        "resume_writing(self)",
        "connection_lost(self, exc)",
        "timeout_keep_alive_handler(self)",
    ),
    WebSocketsSansIOProtocol: (
        "connection_made(self, transport)",
        "data_received(self, data)",
        "handle_connect(self, event)",
        "shutdown(self)",
        "send_keepalive_ping(self)",
        "keepalive_timeout(self)",
        "resume_writing(self)",
        "connection_lost(self, exc)",
    ),
}


async def test_the_overridden_parts_of_uvicorn_are_unchanged() -> None:
    """These are no public names of uvicorn and websockets. When this fails: read `edge/protocols.py` and
    `edge/bodies.py` beside the new release, run tests/integration/gateway_edge, and only then change this test."""
    for kind, methods in OVERRIDDEN.items():
        found = {
            f"{name}({', '.join(inspect.signature(getattr(kind, name)).parameters)})"
            for name in (method.partition("(")[0] for method in methods)
        }
        assert found == set(methods), kind

    async def reads(scope: Any, receive: Any, send: Any) -> None:
        await receive()

    http = made(0, reads, Mock())
    http.data_received(b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\n")
    assert http.cycle.response_complete is False
    assert http.cycle.more_body is True, "Body knows by it that all has come"
    assert http.cycle.receive.__self__ is http.cycle
    http.data_received(b"{}")
    assert http.cycle.more_body is False
    http.connection_lost(None)
    socket = open_socket(Mock())
    assert socket.handshake_initiated is True
    assert socket.conn.handshake_exc is None
    assert (socket.disconnected, socket.close_sent) == (False, False)
    await wait_until_async(lambda: socket.conn.state is State.OPEN)
    assert list(socket.conn.extensions) == []
    assert socket.writable.is_set()
    socket.connection_lost(None)


async def test_a_text_for_many_sockets_is_sent_like_any_text() -> None:
    transport = Mock()
    socket = open_socket(transport)
    await wait_until_async(lambda: socket.handshake_complete)
    for text in ("", "word ", "ä" * 100, "long " * 20_000):
        transport.write.reset_mock()
        assert socket.scope["extensions"][SEND_NOW](SharedText(text))
        await socket.send({"type": "websocket.send", "text": text})
        (at_once,), (in_turn,) = (call.args for call in transport.write.call_args_list)
        assert at_once == in_turn
    socket.pause_writing()
    assert not socket.send_now(SharedText("nobody reads")), "it would be kept in memory for a client that does not read"
    socket.resume_writing()
    assert socket.send_now(SharedText("word"))
    await socket.send({"type": "websocket.close", "code": 1000})
    assert not socket.send_now(SharedText("too late"))
    socket.connection_lost(None)
