"""Whatever a client sends on a socket: it is answered, or closed with a code that says why. Nothing hangs."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic_core import from_json
from websockets.sync.client import ClientConnection, connect

from support import wait_until

EXAMPLES = int(os.environ.get("PENSTOCK_TEST_FUZZ", "60"))
DEADLINE_S = 15
SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20))
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
KINDS = st.sampled_from(["submit", "subscribe", "unsubscribe", "cancel", "ping", "reply", "told", ""])
PAYLOAD = {"prompt": "hi"}
REQUESTS = st.one_of(
    VALUES,
    st.just({"task": "text_generation", "payload": PAYLOAD, "stream": True, "conversation_id": "fuzzed"}),
    st.fixed_dictionaries(
        {"task": st.sampled_from(["text_generation", "embedding", "?"]), "payload": VALUES},
        optional={"priority": VALUES, "conversation_id": VALUES, "metadata": VALUES, "ttl_ms": VALUES, "pool": VALUES},
    ),
)
FRAMES = st.fixed_dictionaries(
    {"type": KINDS | VALUES},
    optional={
        "id": VALUES,
        "request": REQUESTS,
        "request_id": st.just("known") | VALUES,
        "conversation_id": st.just("fuzzed") | VALUES,
        "after": VALUES,
        "idempotency_key": st.sampled_from(["a", "b", ""]) | VALUES,
    },
)
MESSAGES = st.one_of(
    FRAMES.map(json.dumps),
    VALUES.map(json.dumps),
    st.text(max_size=40),
    st.sampled_from(
        ["", "{", '{"type": "ping", "id": "\\ud800"}', '{"type": "ping", "id": NaN}', '{"type": "ping", "id": 1e999}']
    ),
    # Made, not listed: Hypothesis prints its strategies when the gateway, in this process, uses `random` meanwhile,
    # and a long print is an error.
    st.just(50_000).map("[".__mul__),
)


def ask(gateway: Any) -> ClientConnection:
    return connect(gateway.ws, subprotocols=["penstock.v1"], max_size=None, compression=None)


def frames_until_pong(session: ClientConnection) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    while not found or (found[-1].get("type"), found[-1].get("id")) != ("pong", "the end"):
        found.append(from_json(session.recv(DEADLINE_S), allow_inf_nan=False))
    return found


@pytest.fixture(scope="module")
def known(gateway: Any) -> str:
    return gateway.submit()


@given(messages=st.lists(MESSAGES, max_size=12))
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_frames_are_answered(gateway: Any, known: str, messages: list[str]) -> None:
    with ask(gateway) as session:
        for message in messages:
            session.send(message.replace('"known"', f'"{known}"'))
        session.send('{"type": "ping", "id": "the end"}')
        told = frames_until_pong(session)
    assert not [frame for frame in told if frame["type"] == "error" and frame["error"]["code"] == "internal"], messages


HANDSHAKE = "\r\n".join(
    [
        "GET /v1/ws HTTP/1.1",
        "host: localhost",
        "connection: Upgrade",
        "upgrade: websocket",
        "sec-websocket-version: 13",
        "sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==",
        "",
        "",
    ]
)


@given(data=st.binary(max_size=200), cut=st.booleans())
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_are_answered_or_closed(gateway: Any, data: bytes, cut: bool) -> None:
    """Bytes below the protocol: broken frames, lengths that never come, and clients that vanish."""
    with socket.create_connection(("127.0.0.1", gateway.port), DEADLINE_S) as raw:
        raw.sendall(HANDSHAKE.encode())
        assert raw.recv(4_096).startswith(b"HTTP/1.1 101")
        raw.sendall(data)
        if cut:
            return
        raw.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):
            while raw.recv(4_096):
                pass


def test_afterwards_nothing_is_left(gateway: Any) -> None:
    def clients() -> Any:
        return gateway.get("/v1/admin/stats").json()["clients"]

    wait_until(lambda: (clients()["sockets"], clients()["connected"]) == (0, 0), 20, lambda: clients())
    assert gateway.get("/readyz").status_code == 200
