"""Records whose schema only the registry knows: what it does not know is dead-lettered, and while it is away waits."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from confluent_kafka import Producer

from penstock.schemas.codec import Codec
from penstock.schemas.requests import parse_request
from registry_server import Registry, foreign
from system import System, eventually
from worker_requests import outcome, send


@pytest.fixture
def registry() -> Iterator[Registry]:
    with Registry.running() as server:
        server.up = False
        yield server


def test_an_absent_registry_pauses_intake(make_system: Callable[..., System], registry: Registry) -> None:
    system = make_system()
    worker = system.worker(env={"PENSTOCK_SCHEMA_REGISTRY__URL": registry.url}).wait_ready()
    body = {"task": "text_generation", "payload": {"prompt": "hi"}}
    request = parse_request(body, request_id="foreign", now_ms=1)
    producer = Producer({"bootstrap.servers": system.bootstrap})
    topic = system.names.request("text_generation", 5)
    producer.produce(topic, foreign("InferenceRequest")(request), partition=0)
    assert producer.flush(60) == 0
    eventually(lambda: not worker.ready(), 30, worker.tail)
    assert "registry" in httpx.get(worker.url + "/readyz").text
    asked = len(registry.asked)
    eventually(lambda: len(registry.asked) > asked + 1, 30, worker.tail)
    assert system.results() == []
    assert system.dead_letters() == []
    registry.up = True
    assert outcome(system, "foreign").status == "completed", worker.tail()
    worker.wait_ready(10)
    send(system, {"request_id": "next"})
    assert outcome(system, "next").status == "completed", worker.tail()
    eventually(lambda: system.lag() == 0, 20, worker.tail)


def test_records_of_unknown_schemas_hold_up_no_other_partition(
    make_system: Callable[..., System], registry: Registry
) -> None:
    registry.up = True
    system = make_system()
    producer = Producer({"bootstrap.servers": system.bootstrap})
    topic, body = system.names.request("text_generation", 5), {"task": "text_generation", "payload": {"prompt": "hi"}}
    worker = system.worker(env={"PENSTOCK_SCHEMA_REGISTRY__URL": registry.url}).wait_ready()
    for number in range(300):
        request = parse_request(body, request_id=f"odd{number}", now_ms=1)
        codec = Codec(writer_ids={"InferenceRequest": 1_000 + number})
        producer.produce(topic, codec.encode(request), partition=0)
    assert producer.flush(60) == 0
    eventually(lambda: bool(system.dead_letters()), 60, worker.tail)
    ids = {f"known{number}" for number in range(20)}
    for one in ids:
        producer.produce(topic, Codec().encode(parse_request(body, request_id=one, now_ms=1)), partition=1)
    assert producer.flush(60) == 0
    eventually(lambda: len(system.dead_letters()) == 300, 60, worker.tail)
    assert {event.request_id for event in system.results() if event.is_terminal} == ids
    letters_at = [message.timestamp()[1] for message in system.read(system.names.dlq)]
    sent_at = {read_id(message): message.timestamp()[1] for message in system.read(topic) if message.partition() == 1}
    ended_at = {read_id(message): message.timestamp()[1] for message in system.read(system.names.result)}
    passed = [sum(sent_at[one] <= at < ended_at[one] for at in letters_at) for one in ids]
    assert statistics.median(passed) < 20, "they did not wait for a batch of the others (64)"


def read_id(message: Any) -> str:
    return next(found for found in re.findall(r"known\d+", (message.value() or b"").decode(errors="replace")))
