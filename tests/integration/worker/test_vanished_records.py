"""Requests whose records leave their topic before a worker has ended them: each still gets its one outcome."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient

from penstock.schemas.records import ResultEvent
from support import wait_until
from system import Process, System

Make = Callable[..., System]
TTL_MS = 8_000


class Site:
    """A worker, a gateway, and one request at a time whose record is deleted while the worker is killed."""

    def __init__(self, system: System, *, faults: str = "") -> None:
        self.system = system
        self.worker, self.gateway = system.worker("w1", faults=faults), system.gateway()
        self.worker.wait_ready()
        self.gateway.wait_ready()

    def post(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        answer = httpx.post(f"{self.gateway.url}{path}", json=body, timeout=30)
        assert answer.status_code == 202, answer.text
        return answer.json()

    def submit(self, **fields: Any) -> str:
        body = {"task": "text_generation", "model": "noop", "ttl_ms": TTL_MS, "payload": {"prompt": "a"}, **fields}
        return self.post("/v1/requests", body)["request_id"]

    def request(self, request_id: str) -> dict[str, Any]:
        return httpx.get(f"{self.gateway.url}/v1/requests/{request_id}", timeout=30).json()

    def submit_to_paused_model(self, **fields: Any) -> str:
        self.post("/v1/admin/models/noop/pause")
        request_id = self.submit(**fields)
        wait_until(lambda: self.waits_for(request_id) == "paused", 20, lambda: self.request(request_id))
        return request_id

    def waits_for(self, request_id: str) -> str | None:
        return (self.request(request_id).get("waiting_for") or {}).get("reason")

    def delete_records(self) -> None:
        """Move the start of every request partition to its end, as retention does."""
        ends = {tp: end for tp, end in self.system.ends(self.system.names.request_topics()).items() if end > 0}
        assert ends, "no request stands on any topic"
        admin = AdminClient({"bootstrap.servers": self.system.bootstrap})
        futures = admin.delete_records([TopicPartition(*tp, end) for tp, end in ends.items()])
        starts = {(tp.topic, tp.partition): future.result(20).low_watermark for tp, future in futures.items()}
        assert starts == ends

    def kill_worker(self) -> None:
        self.worker.kill9()

    def start_worker(self) -> Process:
        self.worker = self.system.worker("w2").wait_ready()
        return self.worker

    def restart_gateway(self) -> None:
        assert self.gateway.stop() == 0
        self.gateway = self.system.gateway(port=self.gateway.port).wait_ready()

    def ended(self, request_id: str, deadline_s: float) -> dict[str, Any]:
        def is_done() -> bool:
            return bool(self.request(request_id)["done"])

        wait_until(is_done, deadline_s, lambda: f"{self.request(request_id)}\n{self.worker.tail(15)}", poll_s=0.2)
        return self.request(request_id)

    def outcome(self, request_id: str) -> ResultEvent:
        """What a reader of the result topic sees."""
        return self.system.outcomes()[request_id]


@pytest.fixture
def site(make_system: Make) -> Site:
    return Site(make_system())


def test_past_its_deadline_it_expires_and_cancelled_before_it_is_cancelled(site: Site) -> None:
    late, long = site.submit_to_paused_model(), site.submit_to_paused_model(ttl_ms=3_600_000)
    site.delete_records()
    site.kill_worker()
    site.start_worker()
    assert not site.request(long)["done"]
    site.post(f"/v1/requests/{long}/cancel")
    assert site.ended(long, 20)["status"] == "cancelled"
    assert site.outcome(long).status == "cancelled"
    site.restart_gateway()
    site.post("/v1/admin/models/noop/resume")
    ended = site.ended(late, 45)
    assert ended["status"] == "expired"
    assert "deleted or passed over" in ended["error"]["message"]
    outcome = site.outcome(late)
    assert (outcome.status, outcome.task) == ("expired", "text_generation")
    assert site.ended(site.submit(), 20)["status"] == "completed", "later requests run"
    site.system.wait_drained()


@pytest.mark.thorough
def test_a_cancel_outlives_the_gateway_and_the_workers(site: Site) -> None:
    """The cancel came while no worker lived."""
    request_id = site.submit_to_paused_model(ttl_ms=3_600_000)
    site.delete_records()
    site.kill_worker()
    site.post(f"/v1/requests/{request_id}/cancel")
    site.restart_gateway()
    site.start_worker()
    assert site.ended(request_id, 30)["status"] == "cancelled"


@pytest.mark.thorough
def test_what_a_worker_holds_is_left_alone(make_system: Make) -> None:
    """Its record is gone and its deadline passes while it runs: the worker is asked to end it, and lets it run."""
    slow = {"id": "noop", "source": "noop", "engine": "noop", "options": {"tokens": 60, "delay_ms": 250}}
    site = Site(make_system(models=[slow]))
    request_id = site.submit(ttl_ms=3_000)
    wait_until(lambda: site.request(request_id)["status"] == "running", 20, lambda: site.request(request_id))
    site.delete_records()
    asked = f"lost.end_asked request={request_id}"
    wait_until(lambda: asked in site.gateway.log.read_text(), 20, lambda: site.gateway.tail())
    assert not site.request(request_id)["done"]
    assert site.ended(request_id, 30)["status"] == "completed"


@pytest.mark.thorough
def test_an_answer_that_stands_in_the_conversation_is_the_outcome(make_system: Make) -> None:
    """The worker was killed between the answer's append and the outcome, and the request's record is gone."""
    site = Site(make_system(), faults="kill:after_answer_append")
    payload = {"messages": [{"role": "user", "content": "a"}]}
    request_id = site.submit(conversation_id="c1", payload=payload)
    assert site.worker.wait_dead(30) == -signal.SIGKILL
    site.delete_records()
    site.start_worker()
    ended = site.ended(request_id, 45)
    assert ended["status"] == "completed"
    assert ended["result"]["text"]
