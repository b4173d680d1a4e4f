"""Doctor: broker settings and topic drift that break an invariant are found; what breaks nothing is left alone."""

from __future__ import annotations

import pytest

from penstock.cli.doctor import broker_setting_checks
from penstock.cli.topics import broken, unequal_text_topics
from penstock.producers.admin import TopicReport
from penstock.schemas.topics import TopicNames, topic_specs

GOOD = {
    "auto.create.topics.enable": "false",
    "offsets.retention.minutes": "43200",
    "message.max.bytes": "1048588",
    "unclean.leader.election.enable": "false",
}
SPECS = topic_specs(TopicNames(), partitions=4)


def failed(brokers: int = 3, **changes: str) -> list[str]:
    config = {**GOOD, **{name.replace("_", "."): value for name, value in changes.items()}}
    return [check.detail for check in broker_setting_checks(config, brokers) if check.state == "fail"]


def test_a_good_broker_has_nothing_to_mend() -> None:
    assert failed() == []
    assert failed(brokers=1) == []


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"auto_create_topics_enable": "true"}, "auto.create.topics.enable"),
        ({"offsets_retention_minutes": "10080"}, "offsets.retention.minutes"),
        ({"message_max_bytes": "1000"}, "message.max.bytes"),
        ({"unclean_leader_election_enable": "true"}, "unclean.leader.election"),
    ],
)
def test_each_wrong_setting_is_named(changes: dict[str, str], word: str) -> None:
    (detail,) = failed(**changes)
    assert word in detail


@pytest.mark.parametrize(
    ("name", "drift", "lines"),
    [
        ("inference.result", {"partitions": ("4", "64")}, 0),
        ("inference.control", {"partitions": ("1", "4")}, 1),
        ("inference.result", {"retention.ms": ("259200000", "-1")}, 0),
        ("inference.result", {"retention.ms": ("259200000", "172800000")}, 0),
        ("inference.result", {"retention.ms": ("259200000", "86400000")}, 1),
        ("inference.result", {"replication": ("1", "3")}, 0),
        ("inference.result", {"replication": ("3", "1")}, 1),
        ("inference.request.low", {"message.timestamp.type": ("LogAppendTime", "CreateTime")}, 1),
        ("inference.result", {"cleanup.policy": ("delete", "compact")}, 1),
    ],
)
def test_only_drift_that_breaks_an_invariant_counts(name: str, drift: dict[str, tuple[str, str]], lines: int) -> None:
    assert len(broken([TopicReport(name=name, created=False, drift=drift)], SPECS)) == lines


def test_text_topics_must_be_equal_in_each_pool() -> None:
    names = TopicNames("p-")
    counts = dict.fromkeys(names.text_topics() + names.text_topics("gpu"), 4)
    assert unequal_text_topics(names, counts, ["gpu"]) == []
    counts["p-inference.request.low.gpu"] = 8
    assert unequal_text_topics(names, counts) == []
    (line,) = unequal_text_topics(names, counts, ["gpu"])
    assert "p-inference.request.low.gpu 8" in line
