"""Streams that are passed over: whoever comes to one in the middle, at any gateway, is told all of it."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from typing import Any

from websockets.sync.client import connect

from support import wait_until

Sse = Callable[..., list[tuple[str, dict[str, Any]]]]

STREAMS = 20
CHUNKS = 30
READERS = 3


def records(gateway: Any) -> dict[str, int]:
    """What became of the records that a gateway has read."""
    text = gateway.get("/metrics").text
    found = re.findall(r'penstock_view_records_total\{fate="(\w+)"\} ([0-9.e+]+)', text)
    return {fate: int(float(count)) for fate, count in found}


def put_together(frames: list[tuple[str, dict[str, Any]]]) -> str:
    text = ""
    for _, frame in frames:
        if frame["type"] == "chunk":
            assert frame["offset"] == len(text), "a gap or a repeat"
            text += frame["text"]
        else:
            assert frame["type"] in ("status", "result"), frame
    return text


def test_many_come_in_the_middle_at_another_gateway(place: Any, gateway: Any, scribe: Any, sse: Sse) -> None:
    """As when a gateway dies and its clients go to the next: none was followed there before."""
    second = place.gateway("in-the-middle")
    jobs = [scribe.request() for _ in range(STREAMS)]
    before = records(second)
    for at in range(CHUNKS):
        for job in jobs:
            job.chunk("abc", 3 * at)
    whole = "abc" * 2 * CHUNKS
    wait_until(
        lambda: records(second)["passed_over"] - before["passed_over"] >= STREAMS * (CHUNKS - 2),
        20,
        lambda: f"{records(second)} after {before}",
    )
    decoded = records(second)["decoded"] - before["decoded"]
    assert decoded <= 2 * STREAMS, "of a stream that nobody follows its request is decoded, and no piece"
    found: list[list[tuple[str, dict[str, Any]]]] = []
    clients = [
        threading.Thread(target=lambda job=job: found.append(sse(second, job.id)))
        for job in jobs
        for _ in range(READERS)
    ]
    for client in clients:
        client.start()
    for at in range(CHUNKS, 2 * CHUNKS):
        for job in jobs:
            job.chunk("abc", 3 * at)
    for job in jobs:
        job.end(whole)
    for client in clients:
        client.join(30)
    assert len(found) == STREAMS * READERS
    for frames in found:
        assert put_together(frames) == frames[-1][1]["result"]["text"] == whole
    assert records(second)["read_again"] >= STREAMS * CHUNKS


def test_a_follower_of_a_conversation_elsewhere_is_told_all(place: Any, gateway: Any, scribe: Any) -> None:
    """Its requests are submitted at another gateway, or straight to the topic."""
    second = place.gateway("conversation-elsewhere")
    with connect(second.ws) as socket:
        socket.send(json.dumps({"type": "subscribe", "conversation_id": "elsewhere"}))
        job = scribe.request(conversation_id="elsewhere")
        for at in range(CHUNKS):
            job.chunk("xy", 2 * at)
        job.end("xy" * CHUNKS)
        text = ""
        while (frame := json.loads(socket.recv(timeout=15)))["type"] != "result":
            if frame["type"] == "chunk":
                assert frame["offset"] == len(text), "a gap or a repeat"
                text += frame["text"]
        assert text == frame["result"]["text"] == "xy" * CHUNKS
