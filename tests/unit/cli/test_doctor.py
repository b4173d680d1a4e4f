"""Doctor: broker settings and topic drift that break an invariant are found; what breaks nothing is left alone."""

from __future__ import annotations

import socket
import threading
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from kit.certificates import Authority
from kit.cli import ScriptedGateway
from nvml_fake import GIB, FakeCard, FakeDriver
from penstock.cli.doctor import (
    broker_setting_checks,
    certificate_checks,
    conversation_check,
    gateway_checks,
    gpu_check,
    kafka_checks,
    order_checks,
    readiness_check,
    waiting_checks,
)  # fmt: skip
from penstock.cli.live_checks import Check, artifact_checks, artifacts_location, missing_queue_topics, within
from penstock.cli.paths import free_port
from penstock.cli.readiness import Readiness, ReadinessWatch, readiness_of
from penstock.cli.topics import broken, to_alter, unequal_topics
from penstock.common.admin import TopicReport
from penstock.common.configuration import ArtifactsSection
from penstock.common.desired import Desired
from penstock.common.settings import KafkaSettings
from penstock.schemas.desired import ordered
from penstock.schemas.errors import BrokerUnavailable
from penstock.schemas.topics import TopicNames, topic_specs

GOOD = {
    "auto.create.topics.enable": "false",
    "offsets.retention.minutes": "43200",
    "message.max.bytes": "1048588",
    "unclean.leader.election.enable": "false",
}
URL = "http://127.0.0.1:8000"
SPECS = topic_specs(TopicNames(), partitions=4)


@pytest.mark.parametrize(
    ("brokers", "setting", "value"),
    [
        (1, None, ""),
        (3, None, ""),
        (3, "auto.create.topics.enable", "true"),
        (3, "offsets.retention.minutes", "10080"),
        (3, "message.max.bytes", "1000"),
        (3, "unclean.leader.election.enable", "true"),
    ],
)
def test_each_wrong_setting_of_the_broker_is_named(brokers: int, setting: str | None, value: str) -> None:
    config = GOOD if setting is None else {**GOOD, setting: value}
    failed = [check.detail for check in broker_setting_checks(config, brokers) if check.state == "fail"]
    assert len(failed) == (setting is not None)
    assert all(str(setting) in detail for detail in failed)


RETENTION, REPLICAS, IN_SYNC = "retention.ms", "replication", "min.insync.replicas"


@pytest.mark.parametrize(
    ("drift", "breaks", "altered"),
    [
        ({"partitions": ("4", "64")}, 0, {}),
        ({RETENTION: ("259200000", "-1")}, 0, {}),
        ({RETENTION: ("259200000", "172800000")}, 0, None),
        ({RETENTION: ("259200000", "86400000")}, 1, {RETENTION: "259200000"}),
        ({RETENTION: ("259200000", "-1"), "partitions": ("4", "64")}, 0, {}),
        ({REPLICAS: ("1", "3")}, 0, {}),
        ({REPLICAS: ("3", "1")}, 1, {}),
        ({IN_SYNC: ("2", "3")}, 0, {}),
        ({IN_SYNC: ("2", "1")}, 1, {IN_SYNC: "2"}),
        ({IN_SYNC: ("2", "1"), REPLICAS: ("3", "1")}, 2, {}),
        ({"cleanup.policy": ("delete", "compact")}, 1, None),
        ({"inference.control partitions": ("1", "4")}, 1, None),
        ({"inference.request.low message.timestamp.type": ("LogAppendTime", "CreateTime")}, 1, None),
    ],
)
def test_drift_counts_if_it_breaks_an_invariant_and_is_altered_only_if_that_is_safe(
    drift: dict[str, tuple[str, str]], breaks: int, altered: dict[str, str] | None
) -> None:
    """A field may name its topic; of `inference.result` else."""
    name, _, _ = " ".join(drift).rpartition(" ") if "inference" in "".join(drift) else ("inference.result", "", "")
    report = TopicReport(name=name, created=False, drift={key.split()[-1]: value for key, value in drift.items()})
    assert len(broken([report], SPECS)) == breaks
    if altered is not None:
        assert to_alter([report], SPECS) == ({"inference.result": altered} if altered else {})


def test_topics_of_turns_have_equal_partition_counts_in_each_pool() -> None:
    names = TopicNames("p-")
    counts = dict.fromkeys(names.conversation_topics() + names.conversation_topics("gpu"), 4)
    assert unequal_topics(names, counts, ["gpu"]) == []
    assert unequal_topics(names, {**counts, "p-inference.image.request": 8}) != []
    counts["p-inference.request.low.gpu"] = 8
    assert unequal_topics(names, counts) == []
    (line,) = unequal_topics(names, counts, ["gpu"])
    assert "p-inference.request.low.gpu 8" in line


DEGRADED = {"status": "degraded", "models_without_worker": ["chat"], "reason": "no worker is alive"}
ODD = {"status": "degraded", "models_without_worker": [{"id": "chat"}]}
FULL = {"status": "degraded", "reason": "the disk is full"}
READY = {"status": "ready", "reason": None}
LACKS = "is degraded: no worker is alive; without a worker: chat"
MEND, LOG = "mend what the reason names; all else is served", "/data/logs/worker.log"


@pytest.mark.parametrize(
    ("http_status", "body", "status", "serves", "lacking", "state", "detail", "cure"),
    [
        (200, DEGRADED, "degraded", True, ("chat",), "fail", f"{URL} {LACKS}", LOG),
        (200, ODD, "degraded", True, ("chat",), "fail", "", LOG),
        (200, FULL, "degraded", True, (), "fail", "the disk is full", MEND),
        (200, READY, "ready", True, (), "ok", "", ""),
        (200, "ok", "ready", True, (), "ok", "", ""),
        (503, {"status": "not_ready", "reason": "catching up"}, "unavailable", False, (), "fail", "catching up", ""),
        (503, {"status": "starting"}, "starting", False, (), "fail", "", ""),
        (502, None, "unavailable", False, (), "fail", "", ""),
    ],
)
def test_answers_of_a_gateway_and_what_doctor_says_of_them(
    http_status: int, body: object, status: str, serves: bool, lacking: tuple[str, ...], state: str, detail: str,
    cure: str,
) -> None:  # fmt: skip
    found = readiness_of(http_status, body)
    assert (found.status, found.serves, found.models_without_worker) == (status, serves, lacking)
    check = readiness_check(URL, found, Path(LOG))
    assert (check.state, detail in check.detail, cure in (check.cure or "")) == (state, True, True)
    away = readiness_check(URL, Readiness(status="unreachable", reason="refused"), Path(LOG))
    assert (away.state, "refused" in away.detail) == ("fail", True)


def test_requests_that_wait_for_a_worker_fail_the_check() -> None:
    far = {"model": "far", "pool": None, "since": "2026-11-25T10:00:00Z", "reason": "no live worker has far"}
    gpu = {"model": None, "pool": "gpu", "since": None, "reason": "no live worker is in gpu"}
    waiting = [{"task": "text_generation", "requests": count, **kind} for count, kind in ((2, far), (1, gpu))]
    found = list(waiting_checks(readiness_of(200, {**DEGRADED, "waiting_without_worker": waiting})))
    assert {(one.name, one.state) for one in found} == {("waiting", "fail")}
    assert [one.detail for one in found] == [
        "2 request(s) for text_generation by far have waited since 2026-11-25T10:00:00Z: no live worker has far",
        "1 request(s) for text_generation in the pool gpu have waited: no live worker is in gpu",
    ]
    for waits in ({}, {"waiting_without_worker": ["odd"]}):
        assert list(waiting_checks(readiness_of(200, {"status": "ready", **waits}))) == []


def test_a_broker_that_accepts_but_never_answers_is_given_up() -> None:
    """A broker stopped by SIGSTOP behaves so. Each probe has a bound."""
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        settings = KafkaSettings(bootstrap_servers=f"127.0.0.1:{deaf.getsockname()[1]}")
        for named, state in ((True, "fail"), (False, "warn")):
            (found,) = kafka_checks(settings, named=named, queues=[{"topic": "jobs", "result_topic": "done"}])
            assert (found.name, found.state) == ("kafka", state)


def test_each_change_of_readiness_is_printed_once() -> None:
    said: list[str] = []
    watch = ReadinessWatch(lambda: Readiness(status="ready"), said.append, Path("/logs/worker.log"))
    degraded = Readiness(status="degraded", reason="no live worker has a, b", models_without_worker=("a", "b"))
    for found in (Readiness(status="ready"), degraded, degraded, Readiness(status="unreachable"), degraded):
        watch.note(found)
    watch.note(Readiness(status="ready"))
    assert said == [
        "degraded: no live worker has a, b (log: /logs/worker.log)",
        "the gateway is ready again: all models are served",
    ]


def test_many_topics_of_conversations_are_a_warning() -> None:
    assert conversation_check(None, 0).state == "ok"
    assert [conversation_check(count, 3).state for count in (8_999, 9_000)] == ["ok", "warn"]
    assert "9000 have a topic each, on 3 brokers, which bears about 12000" in conversation_check(9_000, 3).detail


def test_orders_are_listed_and_a_paused_class_is_a_warning() -> None:
    (unknown,) = order_checks(None)
    assert unknown.state == "warn"
    (none,) = order_checks({})
    assert (none.state, none.detail) == ("ok", "none: models and classes are as configured")
    paused = ordered(None, kind="class", name="low", pool="b", action="pause", now_ms=0, by="3f9c")
    pinned = ordered(None, kind="model", name="chat", pool=None, action="pin", now_ms=0)
    again = ordered(paused, kind="class", name="low", pool="b", action="resume", now_ms=1)
    states = {str(number): Desired(state, number) for number, state in enumerate((pinned, paused, again))}
    said = list(order_checks(states))
    assert [(one.state, one.detail.partition(" (")[0]) for one in said] == [
        ("warn", "class low in the pool b: paused"),
        ("ok", "model chat: pinned"),
    ]
    assert "by the key 3f9c" in said[0].detail
    assert said[0].cure is not None
    assert "--class low --pool b" in said[0].cure


@pytest.mark.parametrize(
    ("named", "configured", "state", "detail"),
    [
        (False, True, "warn", "no gateway was asked: none answers at {nobody}, the address of [gateway]"),
        (True, True, "fail", "{nobody} is unreachable"),
        (False, False, "warn", "no gateway was asked: none is known"),
    ],
)
def test_doctor_says_which_gateway_it_asked(named: bool, configured: bool, state: str, detail: str) -> None:
    port = free_port()
    nobody = f"http://127.0.0.1:{port}"
    section = {"host": "0.0.0.0", "port": port} if configured else None
    (check,) = gateway_checks(nobody if named else None, section, None)
    assert (check.state, detail.format(nobody=nobody) in check.detail) == (state, True), check


def test_doctor_asks_the_gateway_of_the_configuration(gateway: ScriptedGateway) -> None:
    gateway.play({"GET /readyz": {"status": "ready"}})
    (check,) = gateway_checks(None, {"host": "127.0.0.1", "port": gateway.server_port}, None)
    assert (check.state, check.detail) == ("ok", f"{gateway.url} is ready")


ACTION = {"label": "start a worker", "command": "penstock worker", "call": None}
PROBLEM = {"subject": "w", "cause": "why", "affects": "2 wait", "since": "T", "action": ACTION}


@pytest.mark.parametrize(
    ("readiness", "code", "checks"),
    [
        (READY, "no_worker", [("readiness", "ok"), ("no_worker", "fail")]),
        (READY, "dead_letters", [("readiness", "ok"), ("dead_letters", "warn")]),
        (READY, "class_paused", [("readiness", "ok")]),
        (DEGRADED, "model_failed", [("model_failed", "fail")]),
        (DEGRADED, None, [("readiness", "fail")]),
    ],
)
def test_what_the_gateway_tells_an_operator_are_checks(
    gateway: ScriptedGateway, readiness: dict[str, object], code: str | None, checks: list[tuple[str, str]]
) -> None:
    """A degraded gateway's reasons are told once."""
    data = [] if code is None else [{"problem": code, **PROBLEM}]
    gateway.play({"GET /readyz": readiness, "GET /v1/admin/problems": {"data": data}})
    found = list(gateway_checks(gateway.url, None, None))
    assert [(one.name, one.state) for one in found] == checks
    for one in found:
        if one.name == code:
            assert one.detail == "w: why (affects: 2 wait; since T)"
            assert one.cure == "`penstock worker` to start a worker"


def test_an_artifact_is_written_read_and_deleted(tmp_path: Path) -> None:
    (good,) = artifact_checks(ArtifactsSection(), str(tmp_path / "kept"))
    assert good.state == "ok"
    assert [path for path in (tmp_path / "kept").rglob("*") if path.is_file()] == [], "nothing stays behind"
    (tmp_path / "file").write_text("")
    (bad,) = artifact_checks(ArtifactsSection(), str(tmp_path / "file" / "kept"))
    assert (bad.state, str(tmp_path / "file") in bad.detail) == ("fail", True)
    assert bad.cure is not None


def test_where_artifacts_are(tmp_path: Path) -> None:
    assert artifacts_location(ArtifactsSection(location="s3://b/p"), tmp_path) == "s3://b/p"
    assert artifacts_location(ArtifactsSection(), tmp_path) == str(tmp_path / "artifacts")
    assert artifacts_location(ArtifactsSection(), None) is None


@pytest.mark.parametrize(("days", "state", "word"), [(2, "warn", "expires"), (-2, "fail", "expired"), (30, None, "")])
def test_certificates_of_the_configuration_are_checked(tmp_path: Path, days: int, state: str | None, word: str) -> None:
    file = Authority(tmp_path).issue("penstock", lifetime=timedelta(days=days)).certificate
    ends = (datetime.now(UTC) + timedelta(days=days)).date()
    found = [*certificate_checks(KafkaSettings(security={"ssl.certificate.location": str(file)}), None)]
    assert [(one.state, one.detail.partition("T")[0]) for one in found] == (
        [(state, f'that of kafka.security."ssl.certificate.location" {word} at {ends}')] if state else []
    )


def test_a_probe_that_hangs_is_a_finding() -> None:
    let_go = threading.Event()

    def hangs() -> list[Check]:
        let_go.wait(30)
        return []

    began = time.monotonic()
    (found,) = within("artifacts", hangs, 0.05)
    assert time.monotonic() - began < 20
    assert (found.state, found.detail) == ("fail", "no answer within 0.05 s")
    let_go.set()
    assert within("queues", list, 5) == []

    def fails() -> list[Check]:
        raise BrokerUnavailable("it does not answer")

    (failed,) = within("queues", fails, 5)
    assert (failed.state, failed.detail) == ("fail", "it does not answer")


def test_a_missing_topic_of_a_queue_is_found() -> None:
    found = list(missing_queue_topics(["jobs", "results"], {"jobs"}))
    assert [(one.state, "results" in one.detail) for one in found] == [("fail", True)]
    assert [one.state for one in missing_queue_topics(["jobs"], {"jobs"})] == ["ok"]


def test_the_cards_that_a_worker_would_find_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-bb")
    FakeDriver(FakeCard("GPU-aa"), FakeCard("GPU-bb", 24 * GIB)).install(monkeypatch)
    check = gpu_check()
    assert (check.state, check.detail.endswith("(26 GB)"), check.detail.count("GB")) == ("ok", True, 1)
