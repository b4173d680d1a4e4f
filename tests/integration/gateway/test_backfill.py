"""A gateway with an empty disk serves at once, while the history of the log is still to be read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from confluent_kafka import Producer

from penstock.schemas.codec import default_codec
from penstock.schemas.records import InferenceRequest, Origin, ResultEvent
from penstock.schemas.topics import request_key
from registry_server import Registry, foreign
from stream_clients import Callers
from support import create_topics, wait_until
from system import Process, System

pytestmark = pytest.mark.slow

ENDED = 8_000
"""Requests of the past, each with two records: more than a gateway reads before it serves."""
POOL = "old"
"""No worker is in it."""
PARTITIONS = 4
WORDS = 4


class History:
    """Requests that ended before the gateway started.

    The first outcome of each partition has a schema that a gateway must ask the registry for. While that is down, none
    behind it is known.
    """

    def __init__(self, system: System) -> None:
        create_topics(system.bootstrap, system.prefix, PARTITIONS, POOL)
        self._producer = Producer({"bootstrap.servers": system.bootstrap, "linger.ms": 5})
        self._names, self._codec = system.names, default_codec()
        self._topic = self._names.request("text_generation", 5, POOL)
        first = Origin(topic=self._topic, partition=0, offset=0, append_time_ms=1)
        for number in range(PARTITIONS):
            value = foreign("ResultEvent")(self._outcome(f"held-{number}", first))
            self._producer.produce(self._names.result, value, partition=number)
        assert self._producer.flush(30) == 0
        self._write([self._request(number) for number in range(ENDED)])

    def _request(self, number: int) -> InferenceRequest:
        return InferenceRequest(
            request_id=f"old-{number}",
            tenant="default",
            task="text_generation",
            text_generation={"prompt": "p"},
            created_at=1,
            pool=POOL,
        )

    def _outcome(self, request_id: str, origin: Origin) -> ResultEvent:
        return ResultEvent(
            request_id=request_id,
            tenant="default",
            origin=origin,
            attempt=1,
            epoch=1,
            task="text_generation",
            created_at=origin.append_time_ms,
            worker_id="w",
            kind="terminal",
            status="completed",
            text_generation={"text": request_id},
        )

    def _write(self, requests: list[InferenceRequest]) -> None:
        origins: dict[str, Origin] = {}

        def taken(error: Any, message: Any) -> None:
            assert error is None, error
            place = {"topic": message.topic(), "partition": message.partition(), "offset": message.offset()}
            origins[message.key().decode()] = Origin(**place, append_time_ms=message.timestamp()[1])

        for request in requests:
            value = self._codec.encode(request)
            self._producer.produce(self._topic, value, key=request_key(request), on_delivery=taken)
            self._producer.poll(0)
        assert self._producer.flush(60) == 0
        for request in requests:
            outcome = self._outcome(request.request_id, origins[request.request_id])
            self._producer.produce(self._names.result, self._codec.encode(outcome), key=request.request_id.encode())
            self._producer.poll(0)
        assert self._producer.flush(60) == 0


@pytest.fixture
def registry() -> Iterator[Registry]:
    with Registry.running() as made:
        yield made


def start(system: System, registry: Registry, name: str = "g1") -> Process:
    return system.gateway(name, env={"PENSTOCK_SCHEMA_REGISTRY__URL": registry.url})


def get(gateway: Process, path: str, **options: Any) -> httpx.Response:
    return httpx.get(f"{gateway.url}{path}", timeout=30, **options)


def is_unknown_yet(answer: httpx.Response) -> bool:
    return answer.status_code == 503 and int(answer.headers["retry-after"]) > 0 and "history until" in answer.text


def chat(gateway: Process) -> httpx.Response:
    body = {"model": "noop", "messages": [{"role": "user", "content": "p"}]}
    return httpx.post(f"{gateway.url}/v1/chat/completions", json=body, timeout=30)


def is_whole(gateway: Process) -> bool:
    return get(gateway, "/readyz").json()["status"] == "ready"


def all_ids(gateway: Process) -> set[str]:
    found, after = set[str](), {}
    while True:
        page = get(gateway, "/v1/requests", params={"limit": 100, **after}).json()
        found |= {one["request_id"] for one in page["data"]}
        if not page["has_more"]:
            return found
        after = {"after": page["last_id"]}


@pytest.fixture
def system(make_system: Callable[..., System], registry: Registry) -> System:
    """It has a worker, a history, and the gateway `g1`, which cannot read that while the registry is down."""
    system = make_system()
    system.worker().wait_ready()
    History(system)
    registry.up = False
    start(system, registry).wait_ready()
    return system


def test_new_requests_are_served_whole_and_only_unknown_ids_must_wait(system: System, registry: Registry) -> None:
    gateway = system.process("g1")
    probe = get(gateway, "/readyz").json()
    assert (probe["status"], "history until" in probe["reason"]) == ("degraded", True), probe
    answer = chat(gateway)
    assert answer.status_code == 200, answer.text
    callers = Callers([gateway.url], "noop", WORDS, 30)
    for kind in (callers.socket, callers.chat_stream, callers.chat):
        assert kind(0) == "".join(f"word{number} " for number in range(WORDS)), kind.__name__
    made = gateway.submit(stream=True)
    assert [frame for frame in get(gateway, f"/v1/requests/{made}/events").text.split("\n\n") if "word3" in frame]
    assert gateway.request(made, wait=20)["status"] == "completed"
    wait_until(lambda: registry.asked, 30, "the history is held")

    for old in ("old-7", "never"):
        for path in (f"/v1/requests/{old}", f"/v1/requests/{old}/events", f"/v1/admin/requests/{old}"):
            assert is_unknown_yet(get(gateway, path)), path
        assert is_unknown_yet(httpx.post(f"{gateway.url}/v1/requests/{old}/cancel", timeout=30)), old
    body = {"task": "text_generation", "payload": {"prompt": "p"}}
    key = {"Idempotency-Key": "k"}
    assert is_unknown_yet(httpx.post(f"{gateway.url}/v1/requests", json=body, headers=key, timeout=30))
    listed = get(gateway, "/v1/requests")
    assert "x-history-until" in listed.headers
    assert made in {one["request_id"] for one in listed.json()["data"]}
    problems = get(gateway, "/v1/admin/problems").json()
    assert problems["data"] == []
    assert "history until" in problems["summary"]
    assert "penstock_queue_depth{" not in get(gateway, "/metrics").text, "what waits is not known: it is not 0"

    registry.up = True
    wait_until(lambda: is_whole(gateway), 60, gateway.tail)
    assert "x-history-until" not in get(gateway, "/v1/requests").headers
    old = gateway.request("old-7")
    assert (old["status"], old["result"]["text"]) == ("completed", "old-7")
    assert get(gateway, "/v1/requests/never").status_code == 404
    assert httpx.post(f"{gateway.url}/v1/requests", json=body, headers=key, timeout=30).status_code == 202
    assert {f"old-{number}" for number in range(ENDED)} <= all_ids(gateway)


def test_a_gateway_that_is_killed_before_it_knows_its_history_begins_anew(system: System, registry: Registry) -> None:
    gateway = system.process("g1")
    made = gateway.submit()
    assert gateway.request(made, wait=20)["status"] == "completed"
    wait_until(lambda: registry.asked, 30, "the history is held")
    gateway.kill9()

    registry.up = True
    again = start(system, registry).wait_ready()
    wait_until(lambda: is_whole(again), 60, again.tail)
    fresh = start(system, registry, "g2").wait_ready()
    wait_until(lambda: is_whole(fresh), 60, fresh.tail)
    assert again.request(made)["status"] == "completed"
    assert all_ids(again) == all_ids(fresh)
    for figure in ("accepted", "ended"):
        counts = [get(one, "/v1/admin/history", params={"range_s": 3600}).json() for one in (again, fresh)]
        assert counts[0][figure] == counts[1][figure], figure
