"""The least rights of each role: all roles work with them on a broker that denies the rest, and each one is used."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import NewTopic

from kit.http_server import HttpServer
from kit.rights import Rights, StrictBroker
from penstock.cli.live_checks import missing_rights
from penstock.cli.rights import OFFSETS_TOPIC, Installation, Right, Role
from penstock.producers import Client, Result
from penstock.schemas.topics import TopicNames, partition_for
from support import create_topics, in_background, wait_until
from system import NOOP, Process, System, running

PREFIX = "acl."
JOBS, ANSWERS, OWN, COPIES = "their-jobs", "their-results", "own-jobs", "copies"
SECRET = "whsec_" + "QUFB" * 11
TASKS = ["text_generation", "summarization", "embedding"]
MODELS = [
    {**NOOP, "id": "talk", "tasks": TASKS},
    {"id": "far", "source": "http://127.0.0.1:1/v1", "engine": "remote", "tasks": ["image_generation"]},
    {**NOOP, "id": "slow", "options": {"tokens": 400, "delay_ms": 20}},
]
IMAGE = {"task": "image_generation", "model": "far", "payload": {"prompt": "a"}}
EMBEDDING = {"task": "embedding", "model": "talk", "payload": {"input": "a"}}
INSTALLATION = Installation(
    names=TopicNames(PREFIX), groups={"conversations": COPIES}, queues=[JOBS, OWN], queue_results=[ANSWERS], fsync=True
)


@dataclass
class Site:
    """A system each of whose processes is a user of its own, with the rights of its role."""

    broker: StrictBroker
    system: System
    called: list[dict[str, Any]] = field(default_factory=list)
    operated: dict[str, str] = field(default_factory=dict)

    @property
    def gateway(self) -> Process:
        return self.system.process("g")

    def penstock(self, *command: str, user: str = "operator") -> str:
        """The output of a user's command, which may fail."""
        env = {**os.environ, "PENSTOCK_CONFIG": str(self.system.config()), **self.broker.env(user)}
        done = subprocess.run(
            [str(Path(sys.executable).with_name("penstock")), *command],
            env=env,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        return done.stdout + done.stderr

    def post(self, path: str, body: Any = None, *, expected: int = 200, **headers: str) -> Any:
        answer = httpx.post(self.gateway.url + path, json=body, headers=headers, timeout=60)
        assert answer.status_code == expected, (path, answer.text, self.system.logs(15))
        return answer.json()

    def get(self, path: str) -> Any:
        return httpx.get(self.gateway.url + path, timeout=60).json()

    def turn(self, conversation: str, model: str = "talk") -> None:
        payload = {"messages": [{"role": "user", "content": "Hello?"}]}
        body = {"task": "text_generation", "model": model, "conversation_id": conversation, "payload": payload}
        assert self.post("/v1/requests?wait=30", body)["status"] == "completed"

    def start(self, role: str, name: str) -> Process:
        return getattr(self.system, role)(name, env=self.broker.env(role))

    def wait(self, found: Callable[[], Any]) -> Any:
        return wait_until(found, 45, lambda: self.system.logs(25))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("acls")
    with ExitStack() as stack:
        broker = stack.enter_context(StrictBroker(folder / "broker", (*Role, "nobody", "half")))
        system = System(
            broker.bootstrap_servers,
            PREFIX,
            folder / "system",
            models=MODELS,
            queues=[{"topic": JOBS, "result_topic": ANSWERS}, {"topic": OWN, "format": "penstock"}],
            # The names of groups by default: the table has them.
            worker_options={"group_id": None},
            queue_merge={"group_id": None},
            summarizer_options={"group_id": None},
        )
        made = Site(broker, system)
        receiver = HttpServer(
            lambda call: (made.called.append(call.json), (410 if "gone" in call.path else 204, b""))[1]
        )
        stack.enter_context(in_background(receiver))
        hosts = [f"127.0.0.1:{receiver.server_port}"]
        system.webhook_options = {"group_id": None, "secret": SECRET, "internal_hosts": hosts}
        stack.enter_context(running(system))
        create_topics(broker.bootstrap_servers, PREFIX, pool="gpu")
        rights = Rights(broker.bootstrap_servers)
        for topic in rights.admin.create_topics(
            [NewTopic(name, 1) for name in (JOBS, ANSWERS, OWN, f"{PREFIX}conversations.acme.c1")]
        ).values():
            topic.result(20)
        for role in Role:
            rights.grant(role, INSTALLATION.rights(role))
        for role, name in zip(
            ("worker", "gateway", "bridge", "webhooks", "summarizer"), ("w1", "g1", "b1", "h1", "s1"), strict=True
        ):
            made.start(role, name)
        for process in system.processes:
            process.wait_ready(60)
        over_http(made, receiver.url + "/hook")
        over_kafka(made)
        letters(made)
        another_worker(made)
        operate(made)
        yield made


def over_http(site: Site, receiver: str) -> None:
    site.post("/v1/conversations", {"id": "keeps", "summarize": {"every_turns": 2, "model": "talk"}})
    for _ in range(6):
        site.turn("keeps")
    request = {"task": "text_generation", "model": "talk", "payload": {"prompt": "a"}, "callback_url": receiver}
    keyed = site.post("/v1/requests", {**request, "callback_statuses": True}, expected=202, **{"idempotency-key": "k"})
    site.wait(lambda: site.called)
    site.post("/v1/requests?wait=30", {**request, "callback_url": f"{receiver}/gone"})
    site.wait(lambda: site.get(f"/v1/requests/{keyed['request_id']}/deliveries").get("data"))
    for priority in (0, 9):
        site.post("/v1/requests?wait=30", {**request, "priority": priority})
    site.post("/v1/requests?wait=30", {"task": "embedding", "model": "talk", "payload": {"input": "a"}})
    site.post("/v1/requests", IMAGE, expected=202)
    running_one = site.post("/v1/requests", {**request, "model": "slow"}, expected=202)["request_id"]
    site.post(f"/v1/requests/{running_one}/cancel", expected=202)
    site.turn("goes")
    assert httpx.delete(site.gateway.url + "/v1/conversations/goes", timeout=30).status_code == 200
    site.post("/v1/admin/models/talk/pin", expected=202)
    site.post("/v1/admin/limits/acme", {"outstanding": 10})
    assert site.get("/v1/admin/audit")["data"]
    site.wait(lambda: any("summary" in str(one) for one in site.get("/v1/conversations/keeps/replay")["data"]))


def over_kafka(site: Site) -> None:
    """Services with rights of their own, and a queue."""
    with Client(site.broker.kafka("producer", PREFIX)) as client:
        submitted = client.submit(task="text_generation", payload={"prompt": "a b"}, model="talk")
        for request in (IMAGE, EMBEDDING):
            client.submit(**request)
        client.cancel(submitted.request_id)
    with Client(site.broker.kafka("results", PREFIX)) as client:
        assert any(isinstance(event, Result) for event in client.follow(submitted.request_id, timeout=60))
    with Client(site.broker.kafka("conversations", PREFIX)) as client:
        assert client.history("keeps")
        assert list(client.replay_conversations(group=COPIES))
    job = {"id": "j1", "deadline": str(int(time.time()) + 600), "payload": {"prompt": "a", "model": "talk"}}
    put(site, JOBS, json.dumps(job).encode())
    for request in (IMAGE, EMBEDDING):
        put(site, OWN, json.dumps(request).encode())
    put(site, JOBS, b"\x00\x01 no message")
    site.wait(lambda: site.system.read(ANSWERS))


def letters(site: Site) -> None:
    """Poison, a record on another partition than that of its key, and what an operator does with dead letters."""
    names = site.system.names
    put(site, names.request("text_generation", 5), b"\x00\x00\x00\x00\x01poison")
    for request in (IMAGE, EMBEDDING):
        topic = names.request(request["task"], 5)
        put(site, topic, json.dumps({**request, "pool": "gpu"}).encode())
        site.wait(lambda pooled=f"{topic}.gpu": site.system.read(pooled))
    turn = {
        "task": "text_generation",
        "request_id": "strays",
        "model": "talk",
        "conversation_id": "strays",
        "payload": {"messages": [{"role": "user", "content": "a"}]},
    }
    wrong = (partition_for(b"strays", 4) + 1) % 4
    put(site, names.request("text_generation", 5), json.dumps(turn).encode(), key=b"strays", partition=wrong)
    site.wait(lambda: "strays" in site.system.outcomes())
    listed = site.wait(lambda: found if len(found := site.get("/v1/admin/dlq")["data"]) > 1 else None)
    site.post("/v1/admin/dlq/purge", {"ids": [one["id"] for one in listed]})


def another_worker(site: Site) -> None:
    """A turn is cut off by a kill: the next worker reads what was published and said."""
    body = {
        "task": "text_generation",
        "model": "slow",
        "stream": True,
        "conversation_id": "keeps",
        "payload": {"messages": [{"role": "user", "content": "Go on"}]},
    }
    request_id = site.post("/v1/requests", body, expected=202)["request_id"]
    site.wait(lambda: site.get(f"/v1/requests/{request_id}")["status"] == "running")
    site.system.process("w").kill9()
    site.start("worker", "w2").wait_ready(60)
    site.wait(lambda: site.get(f"/v1/requests/{request_id}?wait=30")["status"] == "completed")


def put(site: Site, topic: str, value: bytes, *, key: bytes | None = None, partition: int = 0) -> None:
    producer = Producer({"bootstrap.servers": site.broker.bootstrap_servers})
    producer.produce(topic, value, key, partition)
    assert producer.flush(20) == 0


def operate(site: Site) -> None:
    """Makes what is missing, changes settings and partitions, and reconciles when nothing runs."""
    rights = Rights(site.broker.bootstrap_servers)
    for topic in rights.admin.delete_topics([ANSWERS, site.system.names.retry("1m")]).values():
        topic.result(20)
    for command in (
        "topics create --durability fsync --alter",
        "topics apply --partitions 8",
        "topics list",
        "dlq list",
        "doctor --role operator",
    ):
        site.operated[command] = site.penstock(*command.split())
    for process in site.system.processes:
        process.stop()
    site.operated["reconcile"] = site.penstock("topics", "reconcile")


UNUSED = {"operator": {right for right in INSTALLATION.rights(Role.OPERATOR) if right.operation == "WRITE"}}
"""Only a reconciliation of topics that a mirror has changed writes (tests/integration/restore)."""


@pytest.mark.parametrize("role", list(Role))
def test_each_right_is_used_and_none_is_missing(site: Site, role: Role) -> None:
    decisions = {one for one in site.broker.decisions() if one.user == role}
    denied = {one for one in decisions if not one.allowed}
    assert denied == set(), site.operated
    rights = INSTALLATION.rights(role)
    by = [[right for right in rights if right.allows(one.kind.lower(), one.name, one.operation)] for one in decisions]
    used = {one for (one, *others) in filter(None, by) if not others}
    # Topics of conversations have two patterns: those of the default tenant, and those of the others.
    used |= {replace(one, name=f"{PREFIX}conversations.") for one in used if one.name == f"{PREFIX}conversation."}
    assert {one for one in rights if one not in used} - UNUSED.get(role, set()) == set()


@pytest.mark.parametrize("role", list(Role))
def test_a_right_that_is_taken_away_is_missing_and_named(site: Site, role: Role) -> None:
    """No other right of the role allows the operation, and `doctor` finds what is missing."""
    rights, kafka = Rights(site.broker.bootstrap_servers), site.broker.kafka(role, PREFIX)
    wanted = INSTALLATION.rights(role)
    assert missing_rights(kafka, wanted) == []
    for right in (one for one in wanted if one.name != OFFSETS_TOPIC):  # doctor asks whether it flushes
        rights.take(role, right)

        def found(right: Right = right) -> bool:
            missing = missing_rights(kafka, wanted)
            # Without DESCRIBE the brokers do not tell what else is allowed there.
            return right in missing and {(one.kind, one.name) for one in missing} == {(right.kind, right.name)}

        wait_until(found, 20, lambda right=right: f"{right}: {missing_rights(kafka, wanted)}")
        rights.grant(role, [right])
    wait_until(lambda: missing_rights(kafka, wanted) == [], 20, lambda: str(missing_rights(kafka, wanted)))


def test_the_operators_commands_succeed(site: Site) -> None:
    assert "altered settings" in site.operated["topics create --durability fsync --alter"]
    applied = site.operated["topics apply --partitions 8"]
    assert f"{PREFIX}inference.dlq has 8 partitions" in applied
    assert "turns of a conversation could run out of order: the group acl.penstock-worker has 1 members" in applied
    doctor = site.operated["doctor --role operator"]
    assert "this client may do what operator need" in doctor
    assert "is at generation" in site.operated["reconcile"]


def test_without_rights_doctor_says_so_and_names_the_command(site: Site) -> None:
    said = site.penstock("doctor", "--role", "worker", user="nobody")
    assert "no DESCRIBE on 22 of 22 topics" in said
    assert "no READ for worker on the group acl.penstock-worker, " in said
    assert "`penstock topics acls --role worker` prints the rights to grant" in said
    assert "does not exist" not in said
    Rights(site.broker.bootstrap_servers).grant(
        "half", [Right(kind="topic", name=PREFIX, operation="DESCRIBE", prefixed=True)]
    )
    wait_until(lambda: "grant DESCRIBE_CONFIGS on the cluster" in site.penstock("doctor", user="half"), 30, "no rights")
    said = site.penstock("doctor", user="half")
    assert "read the settings of" in said
    assert "no READ for gateway and worker on the group acl.penstock-worker, " in said
