"""The workers' group of restored topics, in a real broker."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from confluent_kafka import Consumer

from penstock.cli.failures import CliFailure
from penstock.cli.restored.group import WorkerGroup
from penstock.common.settings import KafkaSettings


@pytest.fixture
def settings(kafka: Any, kafka_prefix: str, create_topics: Callable[..., None]) -> KafkaSettings:
    create_topics(partitions=1)
    return KafkaSettings(bootstrap_servers=kafka.bootstrap_servers, topic_prefix=kafka_prefix)


@pytest.fixture
def topics(settings: KafkaSettings) -> dict[str, int]:
    return {settings.names.request("text_generation", priority): 1 for priority in (1, 9)}


def test_the_generation_is_raised_and_offsets_are_committed_by_one_member(
    settings: KafkaSettings, topics: dict[str, int]
) -> None:
    """The group is never empty without offsets: its coordinator would delete it, and its generation with it."""
    offsets = {(topic, 0): (7, "map") for topic in topics}
    group = WorkerGroup(settings, None, topics)
    assert group.commit(offsets, above=5) == 6
    assert group.committed(list(offsets)) == offsets
    assert WorkerGroup(settings, None, topics).commit(offsets, above=0) > 6, "it does not begin again"


def test_a_worker_that_joins_meanwhile_is_seen(settings: KafkaSettings, topics: dict[str, int]) -> None:
    group, has_joined, ends = WorkerGroup(settings, None, topics), threading.Event(), threading.Event()
    worker = Consumer({**settings.librdkafka(), "group.id": group.name, "partition.assignment.strategy": "range"})
    worker.subscribe(list(topics), on_assign=lambda *_: has_joined.set())

    def work() -> None:
        while not ends.is_set():
            worker.poll(0.05)
        worker.close()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert has_joined.wait(30)
        with pytest.raises(CliFailure, match="a worker has joined"):
            group.commit({(topic, 0): (7, "") for topic in topics}, above=5)
    finally:
        ends.set()
        thread.join()
    assert group.committed([(topic, 0) for topic in topics]) == {}
