"""What of a difference between topics and settings is made, kept, refused or left to a person."""

from __future__ import annotations

import pytest

from penstock.cli.topic_plan import changes, reassignment
from penstock.common.admin import TopicReport
from penstock.schemas.topics import TopicNames, topic_specs

NAMES = TopicNames("p.")
SPECS = topic_specs(NAMES, partitions=8, brokers=3, shared_conversations=True)
REQUEST = NAMES.request("text_generation", 5)
DAYS = 24 * 3_600_000


@pytest.mark.parametrize(
    ("topic", "drift", "state", "reason"),
    [
        (REQUEST, {"partitions": ("8", "4")}, "change", None),
        (REQUEST, {"partitions": ("4", "8")}, "refuse", "Kafka removes no partitions"),
        (NAMES.control, {"partitions": ("1", "4")}, "refuse", "it must have one partition"),
        (NAMES.dlq, {"partitions": ("8", "4")}, "change", None),
        (NAMES.result, {"partitions": ("8", "4")}, "keep", "found by the partition of its key"),
        (NAMES.conversation_log, {"partitions": ("8", "4")}, "keep", "found by the partition of its key"),
        (NAMES.desired, {"cleanup.policy": ("compact", "delete")}, "change", None),
        (NAMES.result, {"retention.ms": (str(3 * DAYS), str(DAYS))}, "change", None),
        (NAMES.result, {"retention.ms": (str(3 * DAYS), str(9 * DAYS))}, "keep", "set it in [topics.config]"),
        (NAMES.dlq, {"retention.ms": (str(3 * DAYS), str(9 * DAYS))}, "change", "older records are deleted"),
        (NAMES.dlq, {"retention.ms": (str(3 * DAYS), str(2 * DAYS))}, "change", None),
        (NAMES.result, {"replication": ("3", "1")}, "by_hand", "kafka-reassign-partitions.sh"),
        (NAMES.result, {"replication": ("1", "3")}, "keep", "more replicas"),
        (NAMES.result, {"min.insync.replicas": ("2", "1")}, "change", None),
        (NAMES.result, {"min.insync.replicas": ("2", "3")}, "keep", "stricter"),
        (NAMES.result, {"min.insync.replicas": ("2", "1"), "replication": ("3", "1")}, "refuse", "first raise the"),
        (NAMES.status, {"min.insync.replicas": ("3", "2")}, "refuse", "the topic has 3 replicas"),
    ],
)
def test_each_difference_is_judged(
    topic: str, drift: dict[str, tuple[str, str]], state: str, reason: str | None
) -> None:
    report = TopicReport(name=topic, created=False, drift=drift)
    chosen = {NAMES.dlq: {"retention.ms": str(3 * DAYS)}}
    found = changes([], [report], SPECS, NAMES, chosen=chosen, busy=None)[0]
    assert (found.topic, found.state) == (topic, state)
    assert found.reason is None if reason is None else reason in (found.reason or "")


def test_request_topics_wait_until_nothing_is_queued_and_others_do_not() -> None:
    drift = {"partitions": ("8", "4")}
    reports = [TopicReport(name=topic, created=False, drift=drift) for topic in (REQUEST, NAMES.dlq)]
    found = changes([SPECS[0]], reports, SPECS, NAMES, chosen={}, busy="3 requests have not ended")
    assert [one.state for one in found] == ["create", "refuse", "change"]
    assert "3 requests have not ended" in (found[1].reason or "")


def test_replicas_are_added_and_none_is_moved() -> None:
    moved = reassignment({"t": [[1], [2], [3, 1]]}, [1, 2, 3], 3)
    assert moved["partitions"] == [
        {"topic": "t", "partition": 0, "replicas": [1, 2, 3]},
        {"topic": "t", "partition": 1, "replicas": [2, 3, 1]},
        {"topic": "t", "partition": 2, "replicas": [3, 1, 2]},
    ]
