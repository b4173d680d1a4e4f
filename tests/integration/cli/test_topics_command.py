"""`penstock topics` and `penstock doctor` on a real broker: made once, drift told and not touched, faults found."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from confluent_kafka.admin import AdminClient, NewTopic
from typer.testing import CliRunner, Result

from penstock.cli.main import app
from penstock.cli.ordered import withdraw_unserved
from penstock.cli.topic_changes import add_partitions
from penstock.common.admin import partition_counts, topic_config
from penstock.common.altering import alter_topics, flush_conversations, flushes_groups
from penstock.common.reader import read_to_end
from penstock.common.settings import KafkaSettings
from penstock.common.transport import Transport
from penstock.schemas.codec import default_codec
from penstock.schemas.desired import model_key
from penstock.schemas.records import ModelInfo
from support import wait_until
from system import System

runner = CliRunner()
MESSAGE = {"messages": [{"role": "user", "content": "a"}]}


class Topics:
    """The command on this test's prefix."""

    def __init__(self, bootstrap: str, prefix: str) -> None:
        self.bootstrap, self.prefix = bootstrap, prefix
        self.settings = KafkaSettings(bootstrap_servers=bootstrap, topic_prefix=prefix)
        self.admin = AdminClient({"bootstrap.servers": bootstrap})

    def run(self, *arguments: str) -> Result:
        where = ["--bootstrap-servers", self.bootstrap, "--topic-prefix", self.prefix]
        return runner.invoke(app, ["topics", *arguments, *where])

    def make(self, name: str, partitions: int, config: dict[str, str] | None = None) -> None:
        new = NewTopic(self.prefix + name, partitions, 1, config=config or {})
        self.admin.create_topics([new])[self.prefix + name].result(20)


@pytest.fixture
def topics(kafka: Any, kafka_prefix: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Topics:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PENSTOCK_CONFIG", raising=False)
    return Topics(kafka.bootstrap_servers, kafka_prefix)


def test_create_twice_then_check_and_list(topics: Topics) -> None:
    assert topics.run("check").exit_code == 1
    first = topics.run("create", "--partitions", "3", "--pool", "gpu")
    assert (first.exit_code, "0 there already" in first.output) == (0, True)
    again = topics.run("create", "--partitions", "3", "--pool", "gpu")
    assert (again.exit_code, again.output.splitlines()[-1].startswith("0 created, ")) == (0, True)
    assert topics.run("check").output == "all topics are there, as the invariants need them\n"
    listed = json.loads(topics.run("list", "--json").output)["topics"]
    assert listed[f"{topics.prefix}inference.request.high"] == 3
    assert listed[f"{topics.prefix}inference.request.high.gpu"] == 3
    assert listed[f"{topics.prefix}inference.control"] == 1


def test_the_configuration_holds_for_queues_pools_and_partitions(topics: Topics, tmp_path: Path) -> None:
    """Topics of queues could not be created, nobody missed those of a pool, and a second call made 64 beside 3."""
    jobs, answers = f"{topics.prefix}jobs", f"{topics.prefix}answers"
    Path("penstock.toml").write_text(
        f'[topics]\npartitions = 3\npools = ["gpu"]\n[[queues]]\ntopic = "{jobs}"\nresult_topic = "{answers}"\n'
    )
    topics.make("jobs", 2, {"retention.ms": "60000"})
    wait_until(lambda: partition_counts(topics.settings, [jobs]) == {jobs: 2}, 20)
    assert f"{answers} of [[queues]] does not exist" in topics.run("check").output
    done = topics.run("create")
    assert (done.exit_code, f"created  {answers}" in done.stdout) == (0, True), done.output
    whole = "all topics are there, as the invariants need them\n"
    wait_until(lambda: topics.run("check").output == whole, 20, lambda: topics.run("check").output)
    counts = partition_counts(topics.settings, [jobs, answers, topics.settings.names.result])
    assert counts == {jobs: 2, answers: 3, topics.settings.names.result: 3}
    assert topic_config(topics.settings, jobs)["retention.ms"] == "60000"

    gpu = "inference.request.high.gpu"
    topics.admin.delete_topics([topics.prefix + gpu])[topics.prefix + gpu].result(20)
    wait_until(lambda: f"{gpu} does not exist" in topics.run("check").output, 20, lambda: topics.run("check").output)
    Path("penstock.toml").write_text('[topics]\npools = ["gpu"]\n')
    assert topics.run("create").exit_code == 0
    as_the_others = {topics.prefix + gpu: 3}
    wait_until(lambda: partition_counts(topics.settings, [topics.prefix + gpu]) == as_the_others, 20)
    done = topics.run("create", "--partitions", "5")
    assert "topics exist with other partitions (3) than asked for (5) and keep them" in done.stderr


def test_a_check_creates_nothing_though_the_broker_lists_a_topic_that_was_deleted(
    topics: Topics, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert topics.run("create", "--partitions", "3").exit_code == 0
    status = f"{topics.prefix}inference.status"
    topics.admin.delete_topics([status])[status].result(20)
    wait_until(lambda: partition_counts(topics.settings, [status]) == {}, 20)
    monkeypatch.setattr(
        "penstock.common.admin.partition_counts",
        lambda settings, names=None, timeout_s=10.0: (
            partition_counts(settings, names, timeout_s) | ({status: 3} if names is None else {})
        ),
    )
    assert "inference.status does not exist: run `penstock topics create`" in topics.run("check").output
    monkeypatch.undo()
    assert partition_counts(topics.settings, [status]) == {}


def test_conversations_are_counted_by_their_topics_unless_they_share_one(topics: Topics) -> None:
    assert topics.run("create", "--partitions", "3").exit_code == 0
    topics.make("conversation.c1", 1)
    wait_until(lambda: json.loads(topics.run("list", "--json").output)["conversations"] == 1)
    assert json.loads(topics.run("list", "--json").output)["conversation_layout"] == "topics"
    assert topics.run("list").output.endswith("topics; 1 conversations\n")
    topics.admin.delete_topics([f"{topics.prefix}conversation.c1"])[f"{topics.prefix}conversation.c1"].result(20)
    wait_until(lambda: json.loads(topics.run("list", "--json").output)["conversations"] == 0)
    assert topics.run("create", "--partitions", "3", "--conversation-layout", "sharded").exit_code == 0
    listed = json.loads(topics.run("list", "--json").output)
    assert (listed["conversations"], listed["conversation_layout"]) == (None, "sharded")
    assert listed["topics"][f"{topics.prefix}inference.conversation.log"] == 3
    again = topics.run("create", "--conversation-layout", "topics")
    assert "the layout topics does not hold" in again.stderr
    shared = f"conversations share {topics.prefix}inference.conversation.log"
    assert topics.run("list").output.endswith(f"topics; {shared}\n")


def test_flushing_takes_the_topic_that_conversations_share(topics: Topics) -> None:
    assert topics.run("create", "--partitions", "3", "--conversation-layout", "sharded").exit_code == 0
    name = f"{topics.prefix}inference.conversation.log"
    assert topic_config(topics.settings, name)["flush.messages"] != "1"
    done = topics.run("create", "--partitions", "3", "--durability", "fsync", "--alter")
    assert done.exit_code == 0, done.output
    assert f"altered  {name}" in done.output
    assert topic_config(topics.settings, name)["flush.messages"] == "1"
    assert flush_conversations(topics.settings) == 0


def test_drift_is_told_and_not_touched(topics: Topics) -> None:
    topics.make("inference.result", 6, {"retention.ms": "3600000", "cleanup.policy": "delete"})
    created = topics.run("create", "--partitions", "3", "--json")
    assert created.exit_code == 0
    result = next(report for report in json.loads(created.stdout) if report["name"].endswith("inference.result"))
    assert result["state"] == "differs"
    assert result["drift"]["retention.ms"]["is"] == "3600000"
    checked = topics.run("check")
    assert checked.exit_code == 1
    # Another number of partitions is a person's choice; records that go after an hour break the horizon.
    assert checked.output.count("\n") == 1
    assert "inference.result: retention.ms is 3600000 and must be 259200000" in checked.output


def test_alter_mends_what_an_invariant_needs_and_makes_old_topics_durable(topics: Topics) -> None:
    topics.run("create", "--partitions", "3")
    topics.make("conversation.c1", 1, {"cleanup.policy": "compact"})
    topics.make("conversation.events", 1, {"cleanup.policy": "delete"})  # another team's
    altered = {"inference.control": {"message.timestamp.type": "CreateTime"}}
    alter_topics(topics.settings, {topics.prefix + name: config for name, config in altered.items()})
    assert "penstock topics create --alter" in topics.run("check").output
    done = topics.run("create", "--partitions", "3", "--durability", "fsync", "--alter")
    assert (done.exit_code, done.output.splitlines()[-1].startswith("0 created, ")) == (0, True), done.output
    assert "differ" not in done.output
    assert "altered  " + topics.prefix + "inference.control" in done.output
    assert "altered settings of 1 conversations" in done.output
    theirs = topic_config(topics.settings, topics.prefix + "conversation.events")
    assert (theirs["cleanup.policy"], theirs["flush.messages"] != "1") == ("delete", True)
    assert topics.run("check").exit_code == 0
    flushed = {
        name: topic_config(topics.settings, topics.prefix + name)["flush.messages"]
        for name in ("inference.request.low", "inference.result", "conversation.c1", "inference.status")
    }
    assert flushed.pop("inference.status") != "1"
    assert set(flushed.values()) == {"1"}
    assert flushes_groups(topics.settings)
    again = topics.run("create", "--partitions", "3", "--durability", "fsync", "--alter")
    assert "altered" not in again.output, "nothing was left to do"


def test_what_was_deleted_meanwhile_stays_deleted(topics: Topics) -> None:
    gone = topics.prefix + "conversation.gone"
    assert alter_topics(topics.settings, {gone: {"flush.messages": "1"}}) == set()
    assert flush_conversations(topics.settings) == 0
    assert gone not in topics.admin.list_topics(timeout=10).topics


def test_text_topics_that_differ_are_refused(topics: Topics) -> None:
    topics.make("inference.request.low", 2, {"message.timestamp.type": "LogAppendTime"})
    refused = topics.run("create", "--partitions", "4")
    assert refused.exit_code == 1
    assert "the topics of text and of images differ in partitions" in refused.stderr
    assert "--partitions 4" in refused.stderr


def test_no_broker_is_unreachable() -> None:
    done = runner.invoke(app, ["topics", "list", "--bootstrap-servers", "127.0.0.1:1"])
    assert done.exit_code == 3
    assert "127.0.0.1:1" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_prefix_that_kafka_refuses_is_wrong_usage() -> None:
    done = runner.invoke(app, ["topics", "create", "--topic-prefix", "a b"])
    assert done.exit_code == 2


def test_doctor_finds_the_missing_topics_and_the_broker_well_set(topics: Topics, tmp_path: Any) -> None:
    arguments = ["doctor", "--bootstrap-servers", topics.bootstrap, "--data-dir", str(tmp_path), "--json"]
    done = runner.invoke(app, arguments, env={"PENSTOCK_KAFKA__TOPIC_PREFIX": topics.prefix})
    found = json.loads(done.output)
    assert done.exit_code == 1
    assert {check["state"] for check in found if check["name"] == "topics"} == {"fail"}
    assert {check["state"] for check in found if check["name"] in ("broker", "kafka", "java")} == {"ok"}
    topics.run("create", "--partitions", "2")
    done = runner.invoke(app, arguments, env={"PENSTOCK_KAFKA__TOPIC_PREFIX": topics.prefix})
    assert [c for c in json.loads(done.output) if c["state"] == "fail"] == []
    assert done.exit_code == 0


def test_conversations_share_a_topic_if_that_was_chosen_before_there_were_any(topics: Topics) -> None:
    shared = f"{topics.prefix}inference.conversation.log"
    assert topics.run("create", "--conversation-layout", "one").exit_code == 2
    topics.make("conversation.old", 1, {"cleanup.policy": "compact"})
    refused = topics.run("create", "--partitions", "3", "--conversation-layout", "sharded")
    assert (refused.exit_code, "1 conversations have topics of their own" in refused.output) == (1, True)
    assert shared not in topics.admin.list_topics(timeout=10).topics
    topics.admin.delete_topics([f"{topics.prefix}conversation.old"])[f"{topics.prefix}conversation.old"].result(20)
    made = ("create", "--conversation-layout", "sharded")
    wait_until(lambda: topics.run(*made).exit_code == 0, 20, "it is not made", promised=True)
    assert topics.run("check").exit_code == 0
    config = topic_config(topics.settings, shared)
    assert (config["cleanup.policy"], config["max.compaction.lag.ms"]) == ("compact", "86400000")
    assert topics.run("create").exit_code == 0, "the layout of an installation stays"
    alter_topics(topics.settings, {shared: {"cleanup.policy": "delete"}})
    assert f"{shared}: cleanup.policy is delete and must be compact" in topics.run("check").output


def test_the_records_of_models_that_are_not_served_are_withdrawn(topics: Topics) -> None:
    """A model that left the configuration of `penstock up` made the gateway degraded for a day."""
    assert topics.run("create").exit_code == 0
    names, codec, transport = topics.settings.names, default_codec(), Transport(topics.settings)
    for name, pool in (("served", None), ("gone", None), ("gone", "gpu"), ("withdrawn", None)):
        info = ModelInfo(
            model=name, pool=pool, tasks=["embedding"], engine="noop", state="ready", updated_at=1, worker_id="w"
        )
        transport.send(names.model, codec.encode(info), key=model_key(name, pool).encode())
    transport.send(names.model, None, key=b"withdrawn")
    transport.send(names.model, b"no record", key=b"unreadable")
    assert transport.close() == 0
    assert withdraw_unserved(topics.settings, None, {"served", "new"}) == ["gone"]
    latest = {record.key: record.value for record in read_to_end(topics.settings, names.model)}
    assert {key for key, value in latest.items() if value} == {b"served", b"gone@gpu", b"unreadable"}
    assert withdraw_unserved(topics.settings, None, {"served", "new"}) == []


def test_plan_says_what_apply_does_and_a_second_call_has_nothing_to_do(topics: Topics) -> None:
    assert topics.run("create", "--partitions", "3").exit_code == 0
    status, dlq = f"{topics.prefix}inference.status", f"{topics.prefix}inference.dlq"
    topics.admin.delete_topics([status])[status].result(20)
    wait_until(lambda: partition_counts(topics.settings, [status]) == {}, 20)
    alter_topics(topics.settings, {f"{topics.prefix}inference.result": {"retention.ms": "3600000"}})
    week = "604800000"
    Path("penstock.toml").write_text(f'[topics.config."inference.dlq"]\n"retention.ms" = "{week}"\n')
    planned = topics.run("plan", "--partitions", "6")
    lines = planned.output.splitlines()
    assert (planned.exit_code, partition_counts(topics.settings, [status])) == (0, {})
    assert f"create   {status} topic absent -> 6 partitions" in lines
    assert f"change   {topics.prefix}inference.result retention.ms 3600000 -> 259200000" in lines
    assert f"change   {dlq} retention.ms 2592000000 -> {week}: older records are deleted" in lines
    assert f"change   {topics.prefix}inference.request.high partitions 3 -> 6" in lines
    assert f"keep     {topics.prefix}inference.result partitions 3 -> 6: what is on it is found" in planned.output
    done = topics.run("apply", "--partitions", "6")
    assert done.exit_code == 0, done.output
    assert f"{topics.prefix}inference.request.high has 6 partitions" in done.output
    assert topic_config(topics.settings, dlq)["retention.ms"] == week
    assert {partition_counts(topics.settings)[topic] for topic in topics.settings.names.request_topics()} == {6}
    again = json.loads(topics.run("apply", "--partitions", "6", "--json").stdout)
    assert again == {"made": 0, "left": []}
    assert topics.run("check").exit_code == 0
    fewer = topics.run("apply", "--partitions", "4")
    assert (fewer.exit_code, "refuse" in fewer.output, "Kafka removes no partitions" in fewer.output) == (1, True, True)


def test_an_apply_that_was_killed_is_completed_by_the_next(topics: Topics) -> None:
    """Some topics have their partitions, and workers would refuse to start."""
    assert topics.run("create", "--partitions", "3").exit_code == 0
    raised = topics.settings.names.conversation_topics()[:2]
    add_partitions(topics.settings, dict.fromkeys(raised, 5))
    assert "differ in partitions" in topics.run("check").output
    assert topics.run("apply").exit_code == 0
    counts = partition_counts(topics.settings)
    assert {counts[topic] for topic in topics.settings.names.conversation_topics()} == {5}
    assert counts[topics.settings.names.request_topics()[-1]] == 3, "nobody asked for more embeddings"
    assert topics.run("check").exit_code == 0


def test_partitions_wait_until_nothing_is_queued_and_nothing_runs(
    make_system: Callable[..., System], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The partition of a conversation changes: a queued turn and a later one would not meet in one worker."""
    system = make_system()
    monkeypatch.setenv("PENSTOCK_WORKER__GROUP_ID", system.group)
    topics = Topics(system.bootstrap, system.prefix)
    gateway = system.gateway().wait_ready()
    before = [gateway.submit(conversation_id="c", payload=MESSAGE, model="noop") for _ in range(3)]
    refused = topics.run("apply", "--partitions", "7")
    assert refused.exit_code == 1
    assert "turns of a conversation could run out of order: these run" in refused.output
    assert ": gateway " in refused.output
    assert set(partition_counts(topics.settings, system.names.request_topics()).values()) == {4}

    assert gateway.stop() == 0
    wait_until(lambda: "3 requests have not ended" in topics.run("plan", "--partitions", "7").output, 40, "they run?")
    worker = system.worker().wait_ready()
    system.wait_drained()
    assert "has 1 members: stop all workers" in topics.run("apply", "--partitions", "7").output
    monkeypatch.setenv("PENSTOCK_WORKER__GROUP_ID", "another")
    assert "these run, and send requests or read them: worker " in topics.run("apply", "--partitions", "7").output
    monkeypatch.setenv("PENSTOCK_WORKER__GROUP_ID", system.group)
    assert worker.stop() == 0
    wait_until(lambda: topics.run("plan", "--partitions", "7").exit_code == 0, 40, "the worker has left")
    done = topics.run("apply", "--partitions", "7")
    assert done.exit_code == 0, done.output
    system.start_all(["w2", "g2"])
    gateway = system.process("g")
    after = [gateway.submit(conversation_id="c", payload=MESSAGE, model="noop") for _ in range(3)]
    assert [gateway.request(one, wait=30)["status"] for one in (*before, *after)] == ["completed"] * 6
    items = httpx.get(f"{gateway.url}/v1/conversations/c/items?order=asc&limit=100", timeout=30).json()["data"]
    answered = [item["request_id"] for item in items if item["role"] == "assistant"]
    assert answered == [*before, *after]
