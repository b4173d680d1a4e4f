"""Server-sent events: every frame once, from any cursor, at any gateway; the end ends the stream."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from support import wait_until

Sse = Callable[..., list[tuple[str, dict[str, Any]]]]


def text_of(frames: list[tuple[str, dict[str, Any]]]) -> str:
    text = ""
    for _, frame in frames:
        match frame["type"]:
            case "chunk":
                assert frame["offset"] == len(text), "a gap or a repeat"
                text += frame["text"]
            case "restarted":
                text = ""
            case "snapshot":
                text = frame["text"]
            case _:
                pass
    return text


def kinds(frames: list[tuple[str, dict[str, Any]]]) -> list[str]:
    return [frame["type"] for _, frame in frames]


def test_from_the_beginning_to_the_end(gateway: Any, scribe: Any, sse: Sse) -> None:
    request_id = gateway.submit()
    job = scribe.job(request_id)

    def work() -> None:
        job.status("queued").status("running").chunk("ab", 0).chunk("cd", 2).end("abcd").status("completed")

    later = threading.Timer(0.1, work)
    later.start()
    frames = sse(gateway, request_id)
    later.join()
    assert text_of(frames) == frames[-1][1]["result"]["text"] == "abcd"
    assert kinds(frames)[-1] == "result"
    assert kinds(frames).count("result") == 1
    assert [f["status"] for _, f in frames if f["type"] == "status"] in (
        ["accepted", "queued", "running"],
        ["accepted", "running"],  # statuses and results have no order among each other
        ["accepted", "queued"],
        ["accepted"],
    )
    assert all(identity == frame["cursor"] for identity, frame in frames)


def test_a_stream_of_what_has_ended_ends_at_once(gateway: Any, scribe: Any, sse: Sse) -> None:
    job = scribe.request().chunk("ab", 0).end("abcd")
    gateway.wait_for(job.id, "completed")
    began = time.monotonic()
    frames = sse(gateway, job.id)
    assert time.monotonic() - began < 5
    assert (kinds(frames), text_of(frames)) == (["chunk", "result"], "abcd")


def test_resumed_from_every_cursor_at_both_gateways(place: Any, gateway: Any, scribe: Any, sse: Sse) -> None:
    second = place.gateway("resumed")
    job = scribe.request().status("running").chunk("ab", 0).chunk("cd", 2)
    live = sse(gateway, job.id, until=lambda found: text_of(found) == "abcd")
    job.chunk("x", 0, attempt=2)
    live += sse(gateway, job.id, live[-1][0], until=lambda found: text_of([*live, *found]) == "x")
    job.chunk("yz", 1, attempt=2).end("xyz!", attempt=2)
    frames = live + sse(gateway, job.id, live[-1][0])
    assert kinds(frames).count("restarted") == 1
    assert text_of(frames) == "xyz!"
    for at in (gateway, second):
        wait_until(lambda at=at: at.get(f"/v1/requests/{job.id}").json()["done"], describe="done")
        for number, (cursor, _) in enumerate(frames):
            got = frames[: number + 1]
            if number == len(frames) - 1:
                answer = at.get(f"/v1/requests/{job.id}/events", headers={"Last-Event-ID": cursor})
                assert answer.status_code == 204
                continue
            rest = sse(at, job.id, cursor)
            assert text_of(got + rest) == "xyz!"
            assert kinds(rest)[-1] == "result"


@pytest.mark.parametrize("cursor", ["x", "AAAA", "e30", "-1", "ä".encode().decode("latin-1")])
def test_a_malformed_cursor(gateway: Any, scribe: Any, cursor: str) -> None:
    job = scribe.request()
    for options in ({"params": {"after": cursor}}, {"headers": {"Last-Event-ID": cursor.encode("latin-1")}}):
        answer = gateway.get(f"/v1/requests/{job.id}/events", **options)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_cursor")


def test_a_request_that_fails(gateway: Any, scribe: Any, sse: Sse) -> None:
    from penstock.schemas.errors import ExecutionTimeout, to_error_record

    error = to_error_record(ExecutionTimeout("too slow"))
    job = scribe.request().chunk("ab", 0).end("", status="failed", error=error)
    gateway.wait_for(job.id, "failed")
    frames = sse(gateway, job.id)
    last = frames[-1][1]
    assert (last["status"], last["result"], last["error"]["code"]) == ("failed", None, "execution_timeout")


def test_stopping_lets_streams_and_waiters_go(own_place: Any, sse: Sse) -> None:
    """Nobody who waits keeps the gateway from stopping, and what they follow goes on at the next one."""
    gateway, scribe = own_place.gateway(), own_place.scribe
    job = scribe.request().chunk("ab", 0)
    gateway.wait_for(job.id, "accepted")
    sse(gateway, job.id, until=lambda found: bool(text_of(found)))  # its text has been read from its own topic
    found: dict[str, Any] = {}

    def follow() -> None:
        found["frames"] = sse(gateway, job.id)

    def wait() -> None:
        found["waited"] = gateway.http.get(f"/v1/requests/{job.id}", params={"wait": 30})

    threads = [threading.Thread(target=follow), threading.Thread(target=wait)]
    for thread in threads:
        thread.start()
    wait_until(lambda: gateway.get("/v1/admin/stats").json()["clients"]["connected"] == 2, describe="both follow")
    wait_until(lambda: gateway.app.state.context.service.subscriptions.hub.subjects() == 2, describe="both follow")
    began = time.monotonic()
    gateway.stop()
    for thread in threads:
        thread.join(10)
    assert time.monotonic() - began < 10
    assert found["waited"].status_code == 503
    assert found["waited"].headers["retry-after"] == "1"
    assert text_of(found["frames"]) == "ab"
    reborn = own_place.gateway()
    job.chunk("cd", 2).end("abcd")
    rest = sse(reborn, job.id, found["frames"][-1][0])
    assert text_of(found["frames"] + rest) == "abcd"
