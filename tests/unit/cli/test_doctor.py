"""Doctor: broker settings and topic drift that break an invariant are found; what breaks nothing is left alone."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from penstock.cli.doctor import (
    broker_setting_checks,
    conversation_check,
    kafka_checks,
    order_checks,
    readiness_check,
    waiting_checks,
)
from penstock.cli.readiness import Readiness, ReadinessWatch, readiness_of
from penstock.cli.topics import broken, to_alter, unequal_topics
from penstock.common.admin import TopicReport
from penstock.common.desired import Desired
from penstock.common.settings import KafkaSettings
from penstock.schemas.desired import ordered
from penstock.schemas.topics import TopicNames, topic_specs

GOOD = {
    "auto.create.topics.enable": "false",
    "offsets.retention.minutes": "43200",
    "message.max.bytes": "1048588",
    "unclean.leader.election.enable": "false",
}
URL = "http://127.0.0.1:8000"
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
        ("inference.result", {"min.insync.replicas": ("2", "3")}, 0),
        ("inference.result", {"min.insync.replicas": ("2", "1")}, 1),
        ("inference.request.low", {"message.timestamp.type": ("LogAppendTime", "CreateTime")}, 1),
        ("inference.result", {"cleanup.policy": ("delete", "compact")}, 1),
    ],
)
def test_only_drift_that_breaks_an_invariant_counts(name: str, drift: dict[str, tuple[str, str]], lines: int) -> None:
    assert len(broken([TopicReport(name=name, created=False, drift=drift)], SPECS)) == lines


@pytest.mark.parametrize(
    ("drift", "altered"),
    [
        ({"retention.ms": ("259200000", "86400000")}, {"retention.ms": "259200000"}),
        ({"retention.ms": ("259200000", "-1"), "partitions": ("4", "64")}, {}),
        ({"min.insync.replicas": ("2", "1")}, {"min.insync.replicas": "2"}),
        ({"min.insync.replicas": ("2", "3")}, {}),
        ({"min.insync.replicas": ("2", "1"), "replication": ("3", "1")}, {}),
    ],
)
def test_an_alteration_neither_weakens_a_topic_nor_stops_its_writers(
    drift: dict[str, tuple[str, str]], altered: dict[str, str]
) -> None:
    report = TopicReport(name="inference.result", created=False, drift=drift)
    assert to_alter([report], SPECS) == ({"inference.result": altered} if altered else {})


def test_topics_of_turns_must_be_equal_in_each_pool() -> None:
    names = TopicNames("p-")
    counts = dict.fromkeys(names.conversation_topics() + names.conversation_topics("gpu"), 4)
    assert unequal_topics(names, counts, ["gpu"]) == []
    assert unequal_topics(names, {**counts, "p-inference.image.request": 8}) != []
    counts["p-inference.request.low.gpu"] = 8
    assert unequal_topics(names, counts) == []
    (line,) = unequal_topics(names, counts, ["gpu"])
    assert "p-inference.request.low.gpu 8" in line


DEGRADED = {"status": "degraded", "models_without_worker": ["chat"], "reason": "no worker is alive"}


def test_a_gateway_without_workers_is_something_to_mend() -> None:
    found = readiness_check(URL, readiness_of(200, DEGRADED), Path("/data/logs/worker.log"))
    assert found.state == "fail"
    assert found.detail == f"{URL} is degraded: no worker is alive; without a worker: chat"
    assert found.cure is not None
    assert "/data/logs/worker.log" in found.cure
    full = readiness_check(URL, readiness_of(200, {"status": "degraded", "reason": "the disk is full"}), None)
    assert (full.state, full.cure) == ("fail", "mend what the reason names; all else is served")
    assert readiness_check(URL, readiness_of(200, {"status": "ready"}), None).state == "ok"
    assert readiness_check(URL, Readiness(status="unreachable", reason="refused"), None).state == "fail"


def test_requests_that_wait_for_want_of_a_worker_are_something_to_mend() -> None:
    kind = {
        "task": "text_generation",
        "pool": None,
        "since": "2026-11-25T10:00:00Z",
        "reason": "no live worker has far",
    }
    body = {
        **DEGRADED,
        "waiting_without_worker": [
            {**kind, "model": "far", "requests": 2},
            {**kind, "model": None, "pool": "gpu", "requests": 1, "since": None, "reason": "no live worker is in gpu"},
        ],
    }
    found = list(waiting_checks(readiness_of(200, body)))
    assert [(one.name, one.state, one.detail) for one in found] == [
        (
            "waiting",
            "fail",
            "2 request(s) for text_generation by far have waited since 2026-11-25T10:00:00Z: no live worker has far",
        ),
        ("waiting", "fail", "1 request(s) for text_generation in the pool gpu have waited: no live worker is in gpu"),
    ]
    assert list(waiting_checks(readiness_of(200, {"status": "ready"}))) == []
    assert list(waiting_checks(readiness_of(200, {"status": "ready", "waiting_without_worker": ["odd"]}))) == []


def test_a_broker_that_accepts_and_says_nothing_holds_doctor_for_seconds_only() -> None:
    """As one that was stopped by SIGSTOP: each probe is bounded."""
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        settings = KafkaSettings(bootstrap_servers=f"127.0.0.1:{deaf.getsockname()[1]}")
        for named, state in ((True, "fail"), (False, "warn")):
            (found,) = kafka_checks(settings, named=named, queues=[{"topic": "jobs", "result_topic": "done"}])
            assert (found.name, found.state) == ("kafka", state)


@pytest.mark.parametrize(
    ("http_status", "body", "status", "serves"),
    [
        (200, DEGRADED, "degraded", True),
        (200, {"status": "ready", "reason": None}, "ready", True),
        (503, {"status": "not_ready", "reason": "catching up"}, "unavailable", False),
        (503, {"status": "starting"}, "starting", False),
        (200, "ok", "ready", True),
        (502, None, "unavailable", False),
        (200, {"status": "degraded", "models_without_worker": [{"id": "chat"}]}, "degraded", True),
    ],
)
def test_what_a_gateway_says_is_understood_with_and_without_details(
    http_status: int, body: object, status: str, serves: bool
) -> None:
    found = readiness_of(http_status, body)
    assert (found.status, found.serves) == (status, serves)
    assert found.models_without_worker == (("chat",) if status == "degraded" else ())


def test_each_change_is_told_once() -> None:
    told: list[str] = []
    watch = ReadinessWatch(lambda: Readiness(status="ready"), told.append, Path("/logs/worker.log"))
    degraded = Readiness(status="degraded", reason="no live worker has a, b", models_without_worker=("a", "b"))
    for found in (Readiness(status="ready"), degraded, degraded, Readiness(status="unreachable"), degraded):
        watch.note(found)
    watch.note(Readiness(status="ready"))
    assert told == [
        "degraded: no live worker has a, b (log: /logs/worker.log)",
        "the gateway is ready again: all models are served",
    ]


def test_many_conversations_with_topics_of_their_own_are_a_warning_before_brokers_cannot_bear_them() -> None:
    assert conversation_check(None, 0).state == "ok"
    assert [conversation_check(count, 3).state for count in (8_999, 9_000)] == ["ok", "warn"]
    assert "9000 have a topic each, on 3 brokers, which bears about 12000" in conversation_check(9_000, 3).detail


def test_what_was_ordered_is_told_and_a_paused_class_is_a_warning() -> None:
    """A class that somebody had paused was told nowhere."""
    (unknown,) = order_checks(None)
    assert unknown.state == "warn"
    (none,) = order_checks({})
    assert (none.state, none.detail) == ("ok", "none: models and classes are as configured")
    paused = ordered(None, kind="class", name="low", pool="b", action="pause", now_ms=0, by="3f9c")
    pinned = ordered(None, kind="model", name="chat", pool=None, action="pin", now_ms=0)
    again = ordered(paused, kind="class", name="low", pool="b", action="resume", now_ms=1)
    states = {str(number): Desired(state, number) for number, state in enumerate((pinned, paused, again))}
    told = list(order_checks(states))
    assert [(one.state, one.detail.partition(" (")[0]) for one in told] == [
        ("warn", "class low in the pool b: paused"),
        ("ok", "model chat: pinned"),
    ]
    assert "by the key 3f9c" in told[0].detail
    assert told[0].cure is not None
    assert "--class low --pool b" in told[0].cure
