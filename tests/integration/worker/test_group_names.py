"""Installations with different prefixes on one broker have groups of their own; one that exists keeps its group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest
from confluent_kafka import Consumer, TopicPartition

from penstock.common import admin
from penstock.common.group_names import group_name, has_offsets
from system import System, eventually
from worker_requests import engine, send

Make = Callable[..., System]

EARLIER = "penstock-worker"
UNNAMED = {"group_id": None, "session_timeout_s": 6, "heartbeat_s": 1}


def generation(process: Any) -> int:
    return int(httpx.get(process.url + "/healthz", timeout=5).json()["generation"])


def partitions(system: System) -> list[tuple[str, int]]:
    counts = admin.partition_counts(system.kafka, system.names.request_topics())
    return [(topic, number) for topic, count in counts.items() for number in range(count)]


def began_with_an_earlier_release(system: System) -> None:
    """Its group has committed where each partition begins."""
    consumer = Consumer({**system.kafka.librdkafka(), "group.id": EARLIER})
    consumer.commit(offsets=[TopicPartition(*tp, 0) for tp in partitions(system)], asynchronous=False)
    consumer.close()


@pytest.mark.slow
def test_a_second_installation_does_not_rebalance_the_first(make_system: Make) -> None:
    first, second = (make_system(models=[engine(tokens=1)], worker_options=UNNAMED) for _ in range(2))
    worker = first.worker("w1").wait_ready()
    before = generation(worker)
    pair = [second.worker(name).wait_ready() for name in ("w1", "w2")]  # both name the group, and find the same
    eventually(lambda: all(httpx.get(one.url + "/healthz").json()["assigned"] == 10 for one in pair), 60, pair[0].tail)
    assert generation(worker) == before
    for system in (first, second):
        send(system, {"request_id": "r1"})
        eventually(lambda system=system: "r1" in system.outcomes(), 60, worker.tail)
        assert has_offsets(system.kafka, system.prefix + EARLIER, partitions(system))
        assert not has_offsets(system.kafka, EARLIER, partitions(system))
        assert group_name(system.kafka, None, EARLIER, system.names.request_topics()) == system.prefix + EARLIER


@pytest.mark.slow
def test_an_installation_that_exists_keeps_its_group(make_system: Make) -> None:
    system = make_system(models=[engine(tokens=1)], worker_options=UNNAMED)
    began_with_an_earlier_release(system)
    worker = system.worker("w1").wait_ready()
    send(system, {"request_id": "r1"})
    eventually(lambda: "r1" in system.outcomes(), 60, worker.tail)
    assert worker.stop() == 0, worker.tail()
    committed = system.reads.committed(EARLIER, system.names.request_topics())
    assert sum(committed.values()) == 1
    assert not has_offsets(system.kafka, system.prefix + EARLIER, partitions(system))
