"""Two workers of two pools with different models: neither loads what is the other's, and requests find their pool."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from confluent_kafka import Producer

from penstock.producers.client import Client
from penstock.schemas.codec import default_codec
from penstock.schemas.records import ModelInfo
from support import create_topics
from system import NOOP, System
from worker_requests import outcome


def models_of(system: System, worker_id: str) -> set[str]:
    """The models that a worker has told of."""
    infos = [default_codec().decode(m.value() or b"", ModelInfo) for m in system.read(system.names.model) if m.value()]
    return {info.model for info in infos if info.worker_id == worker_id}


def send(system: System, topic: str, request: dict[str, Any]) -> None:
    """A JSON request onto any request topic, as kcat would."""
    producer = Producer({"bootstrap.servers": system.bootstrap, "partitioner": "murmur2_random"})
    body: dict[str, Any] = {"task": "text_generation", "payload": {"prompt": "hi"}, **request}
    producer.produce(topic, json.dumps(body), key=body.get("conversation_id") or body["request_id"])
    assert producer.flush(60) == 0


@pytest.mark.slow
def test_two_pools_load_nothing_of_each_others(make_system: Callable[..., System]) -> None:
    system = make_system(
        models=[
            {**NOOP, "id": "small", "pool": "a"},
            {**NOOP, "id": "large", "pool": "b", "aliases": ["big"]},
        ]
    )
    for pool in ("a", "b"):
        create_topics(system.bootstrap, system.prefix, pool=pool)
    a = system.worker("a", env={"PENSTOCK_WORKER__POOL": "a", "PENSTOCK_WORKER__WORKER_ID": "wa"})
    b = system.worker("b", env={"PENSTOCK_WORKER__POOL": "b", "PENSTOCK_WORKER__WORKER_ID": "wb"})
    gateway = system.gateway()
    for process in (a, b, gateway):
        process.wait_ready()
    names = system.names

    # A gateway, and a producer that knows no pools, route by the model.
    body = {"task": "text_generation", "model": "big", "payload": {"prompt": "hi"}}
    with httpx.Client(base_url=gateway.url, timeout=60) as http:
        submitted = http.post("/v1/requests", json=body).json()
        done = http.get(f"/v1/requests/{submitted['request_id']}?wait=30").json()
        assert (done["status"], done["model"], done["pool"]) == ("completed", "large", "b"), b.tail()
        refused = http.post("/v1/requests", json={**body, "pool": "nowhere"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "pool")
    with Client(system.kafka) as client:
        sent = client.submit(task="text_generation", payload={"prompt": "hi"}, model="small")
        assert sent.topic == names.request("text_generation", 5, "a")
        assert client.result(sent, timeout=30).worker_id == "wa"

    # What stands on another pool's topic is published where it belongs, once, with its id and origin.
    foreign = names.request("text_generation", 5, "a")
    send(system, foreign, {"request_id": "by-pool", "pool": "b", "conversation_id": "c1",
                           "payload": {"messages": [{"role": "user", "content": "Hi"}]}})  # fmt: skip
    send(system, foreign, {"request_id": "by-model", "model": "large"})
    for request_id in ("by-pool", "by-model"):
        event = outcome(system, request_id)
        assert (event.status, event.worker_id, event.model) == ("completed", "wb", "large"), (event, a.tail())
        assert event.origin.topic == foreign
    # A pool that there is not: a clear failure.
    send(system, foreign, {"request_id": "lost", "pool": "nowhere"})
    event = outcome(system, "lost", 40)
    assert (event.status, event.error.code, event.error.message) == ("failed", "invalid", "there is no pool nowhere")
    # No model named: resolved within the pool.
    send(system, names.request("text_generation", 5, "b"), {"request_id": "unnamed"})
    assert outcome(system, "unnamed").model == "large"

    assert models_of(system, "wa") == {"small"}
    assert models_of(system, "wb") == {"large"}
    assert {(e.worker_id, e.model) for e in system.outcomes().values() if e.status == "completed"} == {
        ("wa", "small"),
        ("wb", "large"),
    }
    assert a.stop() == b.stop() == 0


def test_a_worker_whose_pool_has_no_topics_says_how_to_make_them(make_system: Callable[..., System]) -> None:
    system = make_system()
    worker = system.worker(env={"PENSTOCK_WORKER__POOL": "p"})
    assert worker.wait_dead() == 1
    assert "penstock topics create --pool p" in worker.tail()
