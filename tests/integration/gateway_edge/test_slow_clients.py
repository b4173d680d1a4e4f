"""Clients that send too slowly or read nothing are let go, and hold no slot; those of a revoked key end at once."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from penstock.gateway.context import context_of_app
from penstock.gateway.edge.keys import create_key, list_keys, revoke_key
from support import wait_until

if TYPE_CHECKING:
    from .conftest import Server

QUICK = {"head_timeout_s": 0.4, "body_timeout_s": 0.4, "write_timeout_s": 0.4}


@contextmanager
def raw(server: Server, receive_bytes: int | None = None) -> Iterator[socket.socket]:
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.socket()
    if receive_bytes is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    connection.settimeout(10)
    connection.connect((host, int(port)))
    with connection:
        yield connection


def read_to_end(connection: socket.socket) -> bytes:
    """Everything until the server closes; a reset is an end too. Fails after 10 s."""
    found = b""
    try:
        while more := connection.recv(65_536):
            found += more
    except ConnectionResetError:
        pass
    return found


def head(key: str, path: str, length: int | None = None, method: str = "POST") -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "host: localhost", f"x-api-key: {key}", "content-type: application/json"]
    if length is not None:
        lines.append(f"content-length: {length}")
    return "\r\n".join([*lines, "", ""]).encode()


def chat(text: str, **fields: Any) -> bytes:
    return json.dumps({"model": "smol", "messages": [{"role": "user", "content": text}], **fields}).encode()


@pytest.fixture
def keyed(tmp_path: Path, serve_with_keys: Any) -> Iterator[tuple[Server, str, Path]]:
    path = tmp_path / "keys.json"
    key = create_key(path, tenant="acme")
    with serve_with_keys(path, **QUICK) as running:
        yield running, key, path


def open_slots(server: Server) -> dict[str, int]:
    allowances = context_of_app(server.app).allowances
    return {name: getattr(allowances, name).open for name in ("http", "streams", "sockets", "public")}


NOTHING = {"http": 0, "streams": 0, "sockets": 0, "public": 0}


def test_slow_heads_and_bodies_are_let_go(keyed: tuple[Server, str, Path]) -> None:
    server, key, _ = keyed
    with raw(server) as no_head, raw(server) as half_head, raw(server) as no_body, raw(server) as drip:
        half_head.sendall(b"GET /v1/models HTTP/1.1\r\nhost: loc")
        no_body.sendall(head(key, "/v1/chat/completions", 1_000))
        drip.sendall(head(key, "/v1/chat/completions", 1_000) + b"{")

        def drop_by_drop() -> None:
            try:
                for _ in range(100):
                    drip.sendall(b" ")
                    time.sleep(0.05)
            except OSError:
                pass

        threading.Thread(target=drop_by_drop, daemon=True).start()
        assert read_to_end(no_head) == b""
        assert read_to_end(half_head) == b""
        for late in (no_body, drip):
            answer = read_to_end(late)
            assert answer.startswith(b"HTTP/1.1 408"), answer
            assert b'"code":"invalid"' in answer
    wait_until(lambda: open_slots(server) == NOTHING, describe=lambda: open_slots(server))
    assert httpx.get(server.url + "/v1/models", headers={"x-api-key": key}).status_code == 200


@pytest.mark.parametrize("then", [b"\r\n", b"x"])
def test_bytes_that_begin_no_request_do_not_keep_a_connection(keyed: tuple[Server, str, Path], then: bytes) -> None:
    server, key, _ = keyed
    with raw(server) as lingering:
        # Refused by its Origin: the answer does not wait for the body.
        asked = head(key, "/v1/models", 100 if then == b"x" else None, method="GET")
        lingering.sendall(asked.replace(b"host: localhost", b"host: localhost\r\norigin: https://evil.example"))
        assert lingering.recv(65_536).startswith(b"HTTP/1.1 403")
        lingering.sendall(then)
        read_to_end(lingering)
    assert connections(server) == 0


def test_public_routes_take_small_bodies_and_hold_no_slot_of_callers(keyed: tuple[Server, str, Path]) -> None:
    server, key, _ = keyed
    path = "/registry/subjects/penstock.v1.ResultEvent"
    answer = httpx.post(server.url + path, content=b'{"schema": "' + b" " * 70_000 + b'"}')
    assert answer.status_code == 413
    with raw(server) as slow:
        slow.sendall(head("", path, 1_000))
        wait_until(lambda: open_slots(server)["public"] == 1, describe="the slow one is served")
        assert open_slots(server)["http"] == 0
        assert httpx.get(server.url + "/v1/models", headers={"x-api-key": key}).status_code == 200
        assert read_to_end(slow).startswith(b"HTTP/1.1 408")


def test_a_public_route_that_is_called_too_often_is_refused_and_probes_are_not(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.gateway.limits.allowances.PUBLIC_PER_S", 5.0)  # what the slowest machine exceeds
    with httpx.Client(base_url=server.url) as http:
        codes = [http.get("/registry/subjects").status_code for _ in range(100)]
        assert codes[0] == 200
        assert 429 in codes
        assert http.get("/metrics").status_code in (200, 429)
        assert http.get("/healthz").status_code == 200


def test_a_client_that_reads_nothing_is_let_go(keyed: tuple[Server, str, Path]) -> None:
    server, key, _ = keyed
    # As events these are tens of megabytes, far more than all buffers hold.
    body = chat("say " + "x" * 250_000, stream=True)
    with raw(server, receive_bytes=4_096) as deaf:
        deaf.sendall(head(key, "/v1/chat/completions", len(body)) + body)
        wait_until(lambda: server.service.requests, describe="it was submitted")
        wait_until(lambda: open_slots(server) == NOTHING, 15, lambda: open_slots(server))
        wait_until(lambda: server.service.open_subscriptions == 0, describe="the subscription is closed")
        assert connections(server) == 0


def connections(server: Server) -> int:
    """Connections that the server still has."""
    wait_until(lambda: not server.running.server_state.connections, 10, "the connection is cut")
    return len(server.running.server_state.connections)


def test_a_long_poll_and_a_stream_free_their_slots_when_the_client_leaves(keyed: tuple[Server, str, Path]) -> None:
    server, key, _ = keyed
    body = chat("hold", stream=True)
    with raw(server) as poll, raw(server) as stream:
        poll.sendall(head(key, "/v1/requests/r1?wait=60", method="GET"))
        stream.sendall(head(key, "/v1/chat/completions", len(body)) + body)
        wait_until(lambda: open_slots(server)["streams"] == 2, describe=lambda: open_slots(server))
    wait_until(lambda: open_slots(server) == NOTHING, describe=lambda: open_slots(server))


def test_a_revoked_key_ends_its_socket_its_stream_and_its_long_poll(keyed: tuple[Server, str, Path]) -> None:
    server, key, path = keyed
    other = create_key(path, tenant="acme")
    body = chat("hold some", stream=True)
    url = server.url.replace("http", "ws") + "/v1/ws?stay=1"
    with (
        connect(url, additional_headers={"x-api-key": key}, subprotocols=["penstock.v1"]) as revoked,
        connect(url, additional_headers={"x-api-key": other}, subprotocols=["penstock.v1"]) as kept,
        raw(server) as stream,
        raw(server) as poll,
    ):
        # The raw ones are opened last: a connection that sends no head is let go after a moment.
        stream.sendall(head(key, "/v1/chat/completions", len(body)) + body)
        poll.sendall(head(key, "/v1/requests/r1?wait=60", method="GET"))
        wait_until(
            lambda: (slots := open_slots(server))["streams"] == slots["sockets"] == 2,
            describe=lambda: (open_slots(server), server.service.requests),
        )
        assert (revoked.recv(5), kept.recv(5)) == ("acme", "acme")
        revoke_key(path, list_keys(path)[0].key_id)
        with pytest.raises(ConnectionClosed) as caught:
            revoked.recv(5)
        assert caught.value.rcvd is not None
        assert caught.value.rcvd.code == 4401
        poll.sendall(b"")
        answer = poll.recv(65_536)
        assert answer.startswith(b"HTTP/1.1 401"), answer
        told = b""
        while b"revoked" not in told:
            more = stream.recv(65_536)
            assert more, told
            told += more
        assert told.startswith(b"HTTP/1.1 200")
        wait_until(lambda: server.service.cancelled, describe="nobody waits for it any more")
        wait_until(lambda: open_slots(server)["streams"] == 0)
        kept.ping().wait(5)


def upgrade(*headers: str) -> bytes:
    asked = ["GET /v1/ws HTTP/1.1", "host: localhost", "connection: Upgrade", "upgrade: websocket"]
    key = ["sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==", "sec-websocket-version: 13"]
    return "\r\n".join([*asked, *key, *headers, "", ""]).encode()


@pytest.mark.parametrize("headers", [["x-a: " + "a" * 9_000], [f"x-{n}: a" for n in range(140)]])
def test_an_upgrade_that_is_not_read_is_answered(server: Server, headers: list[str]) -> None:
    with raw(server) as asking:
        asking.sendall(upgrade(*headers))
        answer = read_to_end(asking)
        assert answer.startswith(b"HTTP/1.1 431 "), answer
        assert b'"code":"invalid"' in answer
    assert connections(server) == 0
