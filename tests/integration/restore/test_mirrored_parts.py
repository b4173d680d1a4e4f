"""Webhooks, batches, queues and summaries on topics that MirrorMaker 2 copied: each goes on, and repeats nothing."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from conversing import items, turn
from kit.batches import Batches, line
from kit.http_server import Answer, Call, serving_http
from mirror_maker import copy_topics
from penstock.cli.embedded_kafka import EmbeddedKafka
from restoring import penstock, reconcile, shift_offsets
from support import wait_until
from system import NOOP, Process, System, running

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TASKS = ["text_generation", "summarization"]
MODELS: list[dict[str, Any]] = [
    {**NOOP, "tasks": TASKS, "options": {"tokens": 4}},
    {**NOOP, "id": "slow", "options": {"tokens": 4, "delay_ms": 200, "slots": 2}},
    {**NOOP, "id": "stuck", "options": {"tokens": 400, "delay_ms": 200, "slots": 8}},
]
"""`stuck` ends nothing before its worker is killed; the new installation has a quick one."""
LINES = 12
QUEUE, ANSWERS = "queue", "queue-results"
QUEUE_FORM = {"format": "penstock", "tenant": "default"}
SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"


@dataclass
class Receiver:
    """Of webhooks. It answers 503 to those whose path is in `refused`."""

    url: str = ""
    calls: Counter[str] = field(default_factory=Counter[str])
    """By path, those that were answered 204."""
    refused: set[str] = field(default_factory=set[str])

    def answer(self, call: Call) -> Answer:
        if call.path in self.refused:
            return 503, b""
        self.calls[call.path] += 1
        return 204, b""


@dataclass
class Parts:
    """What the parts were at when the old installation was lost, and the new one."""

    receiver: Receiver
    hooks: dict[str, str]
    """Ids of requests with webhooks: delivered, refused so far, and not ended."""
    ended_batch: Any
    batch: str
    ended_lines: Counter[str]
    """Outcomes of the batch that was under way, by request."""
    summed_up: list[int]
    new: System = field(init=False)

    @property
    def gateway(self) -> Process:
        return self.new.process("g")

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.gateway.url, timeout=60)


def submit(gateway: Process, receiver: Receiver, name: str, model: str) -> str:
    return gateway.submit(model=model, callback_url=f"{receiver.url}/{name}")


def delivery(gateway: Process, request_id: str) -> dict[str, Any]:
    answer = httpx.get(f"{gateway.url}/v1/requests/{request_id}/deliveries", timeout=30)
    return next(iter(answer.json()["data"]), {"state": None, "attempts": []})


def message(number: int, model: str) -> bytes:
    body = {"task": "text_generation", "request_id": f"m{number}", "model": model, "payload": {"prompt": "p"}}
    return json.dumps(body).encode()


def put(system: System, *messages: bytes) -> None:
    producer = Producer({"bootstrap.servers": system.bootstrap})
    for one in messages:
        producer.produce(f"{system.prefix}{QUEUE}", one)
    assert producer.flush(30) == 0


def answers(system: System) -> Counter[str]:
    """How often each message was answered."""
    records = system.read(f"{system.prefix}{ANSWERS}")
    return Counter(str(json.loads(one.value() or b"null")["request_id"]) for one in records)


def covers(client: httpx.Client) -> list[int]:
    """Through which offsets the conversation is summed up."""
    records = client.get("/v1/conversations/talk/replay").json()["data"]
    said = [one["message"] for one in records if one["message"]]
    return [one["covers_through"] for one in said if one["direction"] == "summary"]


def line_ends(system: System) -> Counter[str]:
    """Outcomes by request, of what batches sent."""
    return Counter(one.request_id for one in system.results() if one.is_terminal and one.model == "slow")


def use(old: System, receiver: Receiver) -> Parts:
    """Have each part in the middle of its work when the worker is killed."""
    admin = AdminClient({"bootstrap.servers": old.bootstrap})
    topics = [NewTopic(f"{old.prefix}{topic}", num_partitions=1) for topic in (QUEUE, ANSWERS)]
    for made in admin.create_topics(topics).values():
        made.result(20)
    old.start_all(["w1", "g1", "h1", "b1", "s1"])
    worker, gateway = old.process("w"), old.process("g")
    shift_offsets(old)
    batches = Batches.at(gateway)
    ended = batches.wait(batches.begin([line(0), line(1)]))
    put(old, message(0, "noop"), message(1, "noop"))
    receiver.refused.add("/refused")
    hooks = {name: submit(gateway, receiver, name, "noop") for name in ("told", "refused")}
    with httpx.Client(base_url=gateway.url, timeout=60) as http:
        policy = {"id": "talk", "summarize": {"every_turns": 2, "model": "noop"}}
        assert http.post("/v1/conversations", json=policy).is_success
        for number in range(6):
            turn(http, "talk", f"q{number}", "noop")
        wait_until(lambda: covers(http), 60, old.process("s").tail)
        wait_until(lambda: len(answers(old)) == 2, 60, old.process("b").tail)
        wait_until(lambda: delivery(gateway, hooks["told"])["state"] == "delivered", 60, old.process("h").tail)
        wait_until(lambda: delivery(gateway, hooks["refused"])["attempts"], 60, old.process("h").tail)
        old.wait_drained()
        hooks["late"] = submit(gateway, receiver, "late", "stuck")
        put(old, message(2, "stuck"))
        body: dict[str, Any] = {"model": "slow", "messages": [{"role": "user", "content": "p"}]}
        batch = batches.begin([line(number, **body) for number in range(LINES)])
        batches.wait_count(batch, 2)
        wait_until(lambda: gateway.request("m2").get("status") == "running", 60, old.process("b").tail)
        worker.kill9()
        summed_up = covers(http)
    for name in ("b", "h", "s", "g"):
        assert old.process(name).stop() == 0
    put(old, message(3, "noop"))
    return Parts(receiver, hooks, ended, batch, line_ends(old), summed_up)


@pytest.fixture(scope="module")
def parts(kafka: Any, second_kafka: EmbeddedKafka, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Parts]:
    folder, receiver = tmp_path_factory.mktemp("mirrored-parts"), Receiver()
    prefix = "parts-"
    options: dict[str, Any] = {
        "sharded": True,
        "gateway_options": {"batch_lines": 4},
        "webhook_options": {"secret": SECRET, "first_retry_s": 2},
        "queues": [{**QUEUE_FORM, "topic": f"{prefix}{QUEUE}", "result_topic": f"{prefix}{ANSWERS}"}],
    }
    with serving_http(receiver.answer) as server:
        receiver.url = server.url
        options["webhook_options"]["internal_hosts"] = [f"127.0.0.1:{server.server_port}"]
        old = System(kafka.bootstrap_servers, prefix, folder / "old", models=MODELS, **options)
        with running(old):
            found = use(old, receiver)
            copy_topics(old.bootstrap, second_kafka.bootstrap_servers, prefix, folder / "mirror")
        receiver.refused.clear()
        quick = [*MODELS[:2], {**MODELS[2], "options": {"tokens": 4}}]
        new = found.new = System(second_kafka.bootstrap_servers, prefix, folder / "new", models=quick, **options)
        new.folder.mkdir()
        shutil.copytree(old.folder / "artifacts", new.folder / "artifacts")
        created = penstock(new, "topics", "create", "--alter")
        assert created.returncode == 0, created.stderr
        assert [reconcile(new)["webhooks"] for _ in range(2)] == [1, 0]
        give_offsets(new)
        try:
            new.start_all(["w1", "g1", "h1", "b1", "s1"])
            yield found
        finally:
            new.stop()
            new.reads.close()


def give_offsets(new: System) -> None:
    """To the bridge: the first message that has no answer."""
    group = f"{new.prefix}queues"
    consumer = Consumer({"bootstrap.servers": new.bootstrap, "group.id": group, "enable.auto.commit": False})
    consumer.commit(offsets=[TopicPartition(f"{new.prefix}{QUEUE}", 0, 2)], asynchronous=False)
    consumer.close()


def test_webhooks_are_sent_once_and_those_that_were_due_go_on(parts: Parts) -> None:
    def states() -> dict[str, Any]:
        return {name: delivery(parts.gateway, request_id)["state"] for name, request_id in parts.hooks.items()}

    wait_until(lambda: {*states().values()} == {"delivered"}, 60, lambda: f"{states()}\n{parts.new.logs(30)}")
    parts.new.wait_drained()
    assert parts.receiver.calls == {"/told": 1, "/refused": 1, "/late": 1}


def test_a_batch_goes_on_and_no_line_that_had_ended_runs_again(parts: Parts) -> None:
    batches = Batches.at(parts.gateway)
    before = parts.ended_batch
    assert batches.get(before.id) == before
    assert len(batches.lines(before.output_file_id)) == 2
    ended = batches.wait(parts.batch)
    assert (ended.status, ended.request_counts.completed) == ("completed", LINES)
    assert sorted(one["custom_id"] for one in batches.lines(ended.output_file_id)) == sorted(
        f"line-{n}" for n in range(LINES)
    )
    assert set(line_ends(parts.new).values()) == {1}
    assert line_ends(parts.new) >= parts.ended_lines


def test_a_bridge_answers_what_had_no_answer(parts: Parts) -> None:
    wait_until(lambda: len(answers(parts.new)) == 4, 60, lambda: parts.new.process("b").tail())
    assert answers(parts.new) == {f"m{number}": 1 for number in range(4)}


def test_conversations_of_a_shared_topic_are_summed_up_further(parts: Parts) -> None:
    with parts.client() as http:
        assert covers(http) == parts.summed_up
        for number in range(6, 10):
            turn(http, "talk", f"q{number}", "noop")
        ends = [one["offset"] for one in items(http, "talk") if one["role"] == "assistant"]
        wanted = ends[1:-4:2]  # the last four turns are kept as they are
        wait_until(lambda: covers(http) == wanted, 60, lambda: str((covers(http), wanted)))
        assert wanted[: len(parts.summed_up)] == parts.summed_up
