"""A minute without Kafka under load: what was accepted goes on by itself, and what is new is refused at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from kit.batches import Batches, line
from kit.examples import ALL
from stream_clients import Callers
from support import wait_until
from system import Process, System
from worker_requests import engine

from .test_webhooks import SECRET, Call, Receiver, listening

AWAY_S = 60 if ALL else 15
"""Longer than the session of a worker."""
PATIENCE_S = 120.0
WORDS = 100
WHOLE = "".join(f"word{number} " for number in range(WORDS))
MODEL = engine(tokens=WORDS, delay_ms=100, slots=16)
LINES = 40
CHAT = {"model": "noop", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}


@contextmanager
def running_parts(system: System) -> Iterator[Process]:
    """Its gateway, beside a worker and a sender of webhooks; all of them end with 0."""
    system.create_topics()
    try:
        parts = system.worker(), system.gateway(), system.webhooks()
        for part in parts:
            part.wait_ready()
        yield parts[1]
        assert [part.stop() for part in parts] == [0, 0, 0]
    finally:
        system.stop()


@contextmanager
def eight_calls(callers: Callers, accepted: Callable[[], int]) -> Iterator[list[Future[str]]]:
    """Two of each kind: all are accepted, and the streams have begun. A failure of the test does not wait for them."""
    before = accepted()
    pool = ThreadPoolExecutor(8)
    try:
        calls = [pool.submit(kind, number) for kind in callers.kinds for number in range(2)]
        wait_until(lambda: callers.begun == 6, PATIENCE_S, lambda: f"{callers.begun} streams have begun")
        wait_until(lambda: accepted() == before + 8, PATIENCE_S, lambda: f"{accepted() - before} calls are accepted")
        yield calls
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def be_away(kafka: Any, url: str) -> None:
    kafka.kill()
    gone = time.monotonic()
    wait_until(lambda: httpx.get(f"{url}/readyz").status_code == 503, 30, "it says that it is ready")
    while time.monotonic() < gone + AWAY_S:
        _refuses(url)


def _refuses(url: str) -> None:
    """It lives, and lets a call wait no longer than a broker takes to restart."""
    assert httpx.get(f"{url}/healthz", timeout=5).status_code == 200
    assert httpx.get(f"{url}/readyz", timeout=5).status_code == 503
    refused = httpx.post(f"{url}/v1/chat/completions", json=CHAT, timeout=30)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "broker_unavailable")
    assert refused.headers["retry-after"]


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_streams_batch_and_webhook_go_on(kafka: Any, kafka_prefix: str, tmp_path: Path) -> None:
    back = False

    def answer(call: Call) -> tuple[int, dict[str, str]]:
        return (204 if back else 503), {}

    system = System(kafka.bootstrap_servers, kafka_prefix, tmp_path, models=[MODEL])
    with listening(Receiver(answer=answer)) as receiver:
        system.webhook_options = {"secret": SECRET, "internal_hosts": [f"127.0.0.1:{receiver.port}"]}
        with running_parts(system) as gateway:
            body = {
                "task": "text_generation",
                "callback_url": receiver.url,
                "payload": {"prompt": "p", "max_tokens": 1},
            }
            called = httpx.post(f"{gateway.url}/v1/requests", json=body).raise_for_status().json()["request_id"]
            wait_until(lambda: receiver.of(called), PATIENCE_S, lambda: system.logs(20))
            batches = Batches.at(gateway)

            def accepted() -> int:
                return sum(system.ends(system.names.request_topics()).values())

            with eight_calls(Callers([gateway.url], "noop", WORDS, PATIENCE_S), accepted) as calls:
                before = accepted()
                batch = batches.begin([line(number) for number in range(LINES)])
                wait_until(lambda: accepted() > before, PATIENCE_S, lambda: system.logs(20))
                be_away(kafka, gateway.url)
                assert not any(call.done() for call in calls)
                back = True
                kafka.start()
                assert {call.result(PATIENCE_S) for call in calls} == {WHOLE}
            ended = batches.wait(batch)
            assert (ended.status, ended.request_counts.completed) == ("completed", LINES), ended
            wait_until(lambda: len(receiver.of(called)) > 1, PATIENCE_S, lambda: system.logs(30))
            gateway.wait_ready()
            assert httpx.post(f"{gateway.url}/v1/chat/completions", json=CHAT, timeout=PATIENCE_S).status_code == 200
            system.wait_drained()
            assert {event.status for event in system.outcomes().values()} == {"completed"}
