"""Requests whose records leave their topic before a worker has ended them: each still gets its one outcome."""

from __future__ import annotations

from collections.abc import Callable

import httpx
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient

from support import wait_until
from system import Process, System


def order(gateway: Process, path: str) -> None:
    answer = httpx.post(f"{gateway.url}/v1/{path}", timeout=30)
    assert answer.status_code == 202, answer.text


def delete_records(system: System) -> None:
    """Move the start of every request partition to its end, as retention does."""
    ends = {tp: end for tp, end in system.ends(system.names.request_topics()).items() if end > 0}
    assert ends, "no request stands on any topic"
    admin = AdminClient({"bootstrap.servers": system.bootstrap})
    futures = admin.delete_records([TopicPartition(*tp, end) for tp, end in ends.items()])
    starts = {(tp.topic, tp.partition): future.result(20).low_watermark for tp, future in futures.items()}
    assert starts == ends


def test_past_its_deadline_it_expires_and_cancelled_before_it_is_cancelled(make_system: Callable[..., System]) -> None:
    system = make_system()
    worker, gateway = system.worker("w1").wait_ready(), system.gateway().wait_ready()

    def waits_for(request_id: str) -> str | None:
        return (gateway.request(request_id).get("waiting_for") or {}).get("reason")

    order(gateway, "admin/models/noop/pause")
    late, long = (gateway.submit(ttl_ms=ttl_ms) for ttl_ms in (8_000, 3_600_000))
    for one in (late, long):
        wait_until(lambda one=one: waits_for(one) == "paused", 20, lambda one=one: str(gateway.request(one)))
    delete_records(system)
    worker.kill9()
    worker = system.worker("w2").wait_ready()

    def ended(request_id: str, deadline_s: float) -> str:
        wait_until(lambda: gateway.request(request_id)["done"], deadline_s, lambda: worker.tail(15), poll_s=0.2)
        return gateway.request(request_id)["status"]

    assert not gateway.request(long)["done"]
    order(gateway, f"requests/{long}/cancel")
    assert ended(long, 20) == system.outcomes()[long].status == "cancelled"
    assert gateway.stop() == 0
    gateway = system.gateway(port=gateway.port).wait_ready()
    order(gateway, "admin/models/noop/resume")
    assert ended(late, 45) == "expired"
    assert "deleted or passed over" in gateway.request(late)["error"]["message"]
    outcome = system.outcomes()[late]
    assert (outcome.status, outcome.task) == ("expired", "text_generation")
    assert ended(gateway.submit(), 20) == "completed", "later requests run"
    system.wait_drained()
