"""Point 4: a socket that drops resumes at any gateway without gap or repeat; a client that stops reading is let go."""

from __future__ import annotations

import json
import socket as sockets
import time
from collections.abc import Callable
from typing import Any

import httpx
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from support import wait_until
from system import Process, System

WORDS = {
    "id": "noop",
    "source": "noop",
    "engine": "noop",
    "tasks": ["text_generation"],
    "options": {"tokens": 120, "delay_ms": 15, "slots": 64},
}
# Frames of kilobytes: what a socket's buffers in the kernel hold must not hide that nobody reads.
LARGE = {**WORDS, "id": "large", "options": {"tokens": 120, "delay_ms": 15, "slots": 64, "chars": 4_000}}


SYSTEM = {
    "models": [WORDS, LARGE],
    "gateway_options": {"client_queue_frames": 64},
    "processes": ["w1", "g1", "g2"],
}


def gateways(system: System) -> tuple[Process, Process]:
    first, second = (p for p in system.processes if p.name.startswith("g"))
    return first, second


def dial(gateway: Process, **options: Any) -> ClientConnection:
    return connect(gateway.url.replace("http", "ws") + "/v1/ws", subprotocols=["penstock.v1"], **options)  # type: ignore[list-item]


def submit(socket: ClientConnection, max_tokens: int = 120) -> str:
    request = {"task": "text_generation", "stream": True, "payload": {"prompt": "go", "max_tokens": max_tokens}}
    socket.send(json.dumps({"type": "submit", "request": request}))
    while (frame := json.loads(socket.recv(timeout=30)))["type"] != "accepted":
        assert frame["type"] != "error", frame
    return str(frame["request_id"])


def frames_until(socket: ClientConnection, enough: Callable[[list[dict[str, Any]]], bool]) -> list[dict[str, Any]]:
    frames: list[dict[str, Any]] = []
    while not enough(frames):
        frames.append(json.loads(socket.recv(timeout=60)))
    return frames


def ended(frames: list[dict[str, Any]]) -> bool:
    return bool(frames) and frames[-1]["type"] == "result"


def text_of(frames: list[dict[str, Any]]) -> str:
    return "".join(f["text"] for f in frames if f["type"] == "chunk")


def test_a_dropped_socket_resumes_also_at_another_gateway(system: System) -> None:
    first, second = gateways(system)
    with dial(first) as socket:
        request_id = submit(socket)
        frames = frames_until(socket, lambda seen: sum(f["type"] == "chunk" for f in seen) >= 3)
        socket.socket.shutdown(sockets.SHUT_RDWR)  # dropped, not closed
    for gateway in (first, second):
        cursor = [f["cursor"] for f in frames if f.get("cursor")][-1]
        with dial(gateway) as socket:
            socket.send(json.dumps({"type": "subscribe", "request_id": request_id, "after": cursor}))
            if gateway is first:
                count = len(text_of(frames))
                frames += frames_until(socket, lambda seen, n=count: len(text_of(seen)) > n)
            else:
                frames += frames_until(socket, ended)
    assert frames[-1]["status"] == "completed"
    assert text_of(frames) == frames[-1]["result"]["text"]
    offset = 0
    for frame in frames:
        if frame["type"] == "chunk":
            assert frame["offset"] == offset
            offset += len(frame["text"])


def test_status_never_goes_backwards_and_the_result_is_last(system: System) -> None:
    first, _ = gateways(system)
    with dial(first) as socket:
        submit(socket, 10)
        frames = frames_until(socket, ended)
    rank = {"accepted": 0, "queued": 1, "waiting_for_memory": 2, "loading_model": 3, "running": 4}
    seen = [rank[f["status"]] for f in frames if f["type"] == "status"]
    assert seen == sorted(seen)
    assert [f["type"] for f in frames].count("result") == 1


def test_a_client_that_stops_reading_is_closed_with_4408_and_others_are_not_slowed(system: System) -> None:
    first, _ = gateways(system)
    # A receive buffer of a few KB and no reading: what the gateway sends backs up into its queue for this client.
    raw = sockets.socket()
    raw.setsockopt(sockets.SOL_SOCKET, sockets.SO_RCVBUF, 4096)
    raw.connect(("127.0.0.1", first.port))
    slow = dial(first, sock=raw, max_queue=1, compression=None, ping_interval=None)
    try:
        submit(slow, 120)
        for _ in range(40):
            payload = {"prompt": "x", "max_tokens": 120}
            request = {"task": "text_generation", "model": "large", "stream": True, "payload": payload}
            slow.send(json.dumps({"type": "submit", "request": request}))
        with dial(first) as brisk:
            began = time.monotonic()
            submit(brisk, 20)
            frames = frames_until(brisk, ended)
            assert frames[-1]["status"] == "completed"
            assert time.monotonic() - began < 60
        # It does not read at all until the gateway has let it go; what the kernel holds then ends in the close frame.
        stats = first.url + "/v1/admin/stats"
        wait_until(lambda: httpx.get(stats).json()["clients"]["dropped_slow"] > 0, 90, lambda: httpx.get(stats).text)
        closed = None
        while closed is None:
            try:
                slow.recv(timeout=30)
            except ConnectionClosed as error:
                closed = error
        assert closed.rcvd is not None
        assert closed.rcvd.code == 4408
    finally:
        slow.close()
