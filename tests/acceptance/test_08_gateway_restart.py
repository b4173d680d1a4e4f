"""Point 8: a gateway killed and restarted: pollers and resumed streams get every event, nothing double; B knows A's."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx

from system import Process, System, free_port
from worker_requests import engine

TOKENS = 400
"""16 s: a stream that was read for a moment is far from its end, on a busy machine too."""
WORDS = engine(tokens=TOKENS, delay_ms=40, slots=32)


def sse(
    gateway: Process, request_id: str, after: str | None, stop: Callable[[list[dict[str, Any]]], bool]
) -> tuple[list[dict[str, Any]], str | None]:
    """Frames of the event stream until enough, and the last event id seen."""
    frames: list[dict[str, Any]] = []
    headers = {"Last-Event-ID": after} if after else {}
    with httpx.stream("GET", f"{gateway.url}/v1/requests/{request_id}/events", headers=headers, timeout=60) as stream:
        assert stream.status_code == 200
        for line in stream.iter_lines():
            if line.startswith("id:"):
                after = line[3:].strip()
            elif line.startswith("data:"):
                frames.append(json.loads(line[5:]))
            elif not line and stop(frames):
                break
    return frames, after


def chunks(frames: list[dict[str, Any]]) -> str:
    return "".join(frame["text"] for frame in frames if frame["type"] == "chunk")


def test_killed_and_restarted(make_system: Callable[..., System]) -> None:
    system = make_system(models=[WORDS])
    worker, port = system.worker(), free_port()
    gateway = system.gateway("g1", port=port).wait_ready()
    worker.wait_ready()
    request_id = gateway.submit(stream=True)
    others = [gateway.submit(stream=True) for _ in range(10)]
    frames, cursor = sse(gateway, request_id, None, lambda seen: sum(f["type"] == "chunk" for f in seen) >= 3)
    gateway.kill9()
    gateway = system.gateway("g1", port=port).wait_ready()
    more, cursor = sse(gateway, request_id, cursor, lambda seen: bool(seen) and seen[-1]["type"] == "result")
    frames += more
    assert frames[-1]["status"] == "completed"
    assert chunks(frames) == frames[-1]["result"]["text"]
    assert [f["type"] for f in frames].count("result") == 1
    again = httpx.get(
        f"{gateway.url}/v1/requests/{request_id}/events", headers={"Last-Event-ID": cursor or ""}, timeout=20
    )
    assert again.status_code == 204
    second = system.gateway("g2").wait_ready()
    for other in others:
        for at in (gateway, second):
            found = httpx.get(f"{at.url}/v1/requests/{other}", params={"wait": 60}, timeout=70).json()
            assert found["status"] == "completed", found


def test_gateway_b_knows_at_once_what_a_accepted(make_system: Callable[..., System]) -> None:
    system = make_system(models=[WORDS])  # no worker: nothing but the request topic says it was accepted
    first, second = system.gateway("g1").wait_ready(), system.gateway("g2").wait_ready()
    for _ in range(20):
        request_id = first.submit(stream=True)
        found = httpx.get(f"{second.url}/v1/requests/{request_id}", timeout=10)
        assert found.status_code == 200, found.text
        assert found.json()["status"] == "accepted"
        assert found.json()["done"] is False


def test_an_idempotency_key_is_one_request_at_every_gateway(make_system: Callable[..., System]) -> None:
    system = make_system(models=[WORDS])
    first, second = system.gateway("g1").wait_ready(), system.gateway("g2").wait_ready()
    body = {"task": "text_generation", "payload": {"prompt": "once"}}
    headers = {"Idempotency-Key": "k1"}
    one = httpx.post(first.url + "/v1/requests", json=body, headers=headers)
    two = httpx.post(second.url + "/v1/requests", json=body, headers=headers)
    three = httpx.post(second.url + "/v1/requests", json={**body, "priority": 1}, headers=headers)
    assert (one.status_code, two.status_code, three.status_code) == (202, 202, 422), (two.text, three.text)
    assert one.json()["request_id"] == two.json()["request_id"]
    assert two.headers["Idempotency-Replayed"] == "true"
    assert three.json()["error"]["code"] == "idempotency_key_reused"
    assert sum(end for end in system.ends(system.names.text_topics()).values()) == 1
