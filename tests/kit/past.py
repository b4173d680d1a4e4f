"""A log of requests that ended before a gateway starts, and what a client sees of that gateway."""

from __future__ import annotations

from typing import Any

import httpx
from confluent_kafka import Producer

from penstock.schemas.codec import default_codec
from penstock.schemas.records import InferenceRequest, Origin, ResultEvent
from penstock.schemas.topics import request_key
from registry_server import foreign
from support import create_topics
from system import Process, System

ENDED = 8_000
"""Requests of the past, each with two records: more than a gateway reads before it serves."""
POOL = "old"
"""No worker is in it."""
PARTITIONS = 4


class Past:
    """Requests that ended before a gateway starts, written straight onto the topics."""

    def __init__(self, system: System) -> None:
        create_topics(system.bootstrap, system.prefix, PARTITIONS, POOL)
        self._producer = Producer({"bootstrap.servers": system.bootstrap, "linger.ms": 5})
        self._names, self._codec = system.names, default_codec()
        self._topic = self._names.request("text_generation", 5, POOL)

    def hold_outcomes(self) -> None:
        """Outcomes with a schema that a gateway must ask the registry for. While that is down, none behind is known."""
        first = Origin(topic=self._topic, partition=0, offset=0, append_time_ms=1)
        for number in range(PARTITIONS):
            value = foreign("ResultEvent")(self._outcome(f"held-{number}", first))
            self._producer.produce(self._names.result, value, partition=number)
        assert self._producer.flush(30) == 0

    def write_ended(self) -> None:
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


def get(gateway: Process, path: str, **options: Any) -> httpx.Response:
    return httpx.get(f"{gateway.url}{path}", timeout=30, **options)


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
