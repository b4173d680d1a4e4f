"""Messages as other services write them, by kcat, kafkajs and Confluent's serializer: outcomes, refusals by name."""

from __future__ import annotations

import json
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from confluent_kafka.admin import AdminClient, NewTopic

from penstock.schemas.codec import default_codec
from penstock.schemas.records import StatusEvent
from stock_clients import KAFKAJS, installed_by_npm, tool
from support import wait_until
from system import NOOP, System, running

pytestmark = [pytest.mark.slow, pytest.mark.model]

EXAMPLES = Path(__file__).parents[3] / "examples"
OUTCOME_S = 90.0
LOADED_S = 240.0
"""The painter is loaded by its first request."""
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def system(kafka: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """A worker of text and images, a gateway, and a bridge with a queue whose outcomes are JSON."""
    folder = pytest.importorskip("penstock.cli.assets").prepare_model("tiny-image-generation", print)
    prefix = f"f{uuid.uuid4().hex[:6]}-"
    painter = {"id": "painter", "source": str(folder), "engine": "diffusers", "tasks": ["image_generation"]}
    text = {**NOOP, "id": "smollm2", "options": {"tokens": 4, "delay_ms": 300}}
    queue = {"topic": f"{prefix}q", "format": "penstock", "result_topic": f"{prefix}q-results"}
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
    topics = [NewTopic(queue[name], num_partitions=1) for name in ("topic", "result_topic")]
    for made in admin.create_topics(topics).values():
        made.result(20)
    system = System(
        kafka.bootstrap_servers, prefix, tmp_path_factory.mktemp("foreign"), models=[text, painter], queues=[queue]
    )
    with running(system):
        for process in (system.worker(), system.gateway(), system.bridge()):
            process.wait_ready()
        yield system


def kcat(system: System, topic: str, body: dict[str, Any]) -> None:
    command = [tool("kcat"), "-P", "-b", system.bootstrap, "-t", topic, "-X", "partitioner=murmur2_random"]
    subprocess.run(command, input=json.dumps(body).encode() + b"\n", check=True, timeout=30)


def found(system: System, deadline_s: float = OUTCOME_S, **where: str) -> dict[str, Any]:
    """The one request of a list, once it is done."""
    url = f"{system.processes[1].url}/v1/requests"
    listed: list[dict[str, Any]] = []

    def is_done() -> bool:
        listed[:] = httpx.get(url, params=where, timeout=10).raise_for_status().json()["data"]
        return len(listed) == 1 and listed[0]["done"]

    wait_until(is_done, deadline_s, lambda: f"{where}: {listed}\n{system.logs(10)}", poll_s=0.2)
    return listed[0]


def test_camel_case_without_a_task(system: System) -> None:
    """Its ids are in its statuses and its outcome too, and each of them finds it."""
    requirements = {"vram": "0GB", "cpuMemory": "1MB"}
    body = {
        "requestId": "camel-1", "userId": "u-1", "sessionId": "s-1", "conversationId": "c-1", "correlationId": "k-1",
        "modelProfile": {"modelName": "smollm2", "requirements": requirements}, "messages": MESSAGES,
        "streamResponse": True, "timestamp": "2026-01-01T00:00:00Z",
    }  # fmt: skip
    kcat(system, system.names.request("text_generation", 5), body)
    labels = {"user_id": "u-1", "session_id": "s-1", "correlation_id": "k-1"}
    for where in ({"user_id": "u-1"}, {"session_id": "s-1", "class": "medium"}, {"correlation_id": "k-1"}):
        shown = found(system, **where)
        assert (shown["request_id"], shown["status"], shown["model"]) == ("camel-1", "completed", "smollm2")
        assert {name: shown[name] for name in labels} == labels
    events = [event for event in system.results() if event.request_id == "camel-1"]
    assert len(events) > 1, "it streams"
    statuses = [default_codec().decode(one.value() or b"", StatusEvent) for one in system.read(system.names.status)]
    events += [event for event in statuses if event.request_id == "camel-1"]
    assert {(event.user_id, event.session_id, event.correlation_id) for event in events} == {("u-1", "s-1", "k-1")}
    conversation = httpx.get(f"{system.processes[1].url}/v1/conversations/c-1/items", timeout=10).json()
    assert len(conversation["data"]) == 2


def test_a_type_with_all_in_the_payload(system: System) -> None:
    payload = {"model": "smollm2", "conversation_id": "c-2", "messages": MESSAGES}
    kcat(
        system,
        system.names.request("text_generation", 9),
        {"correlation_id": "k-2", "type": "chat", "payload": payload},
    )
    shown = found(system, correlation_id="k-2", task="text_generation", model="smollm2")
    assert (shown["status"], shown["conversation_id"], shown["model"]) == ("completed", "c-2", "smollm2")
    assert found(system, conversation_id="c-2")["request_id"] == shown["request_id"]


def test_a_job_with_a_version(system: System) -> None:
    payload = {"prompt": "a dam", "steps": 2, "width": 32, "height": 32}
    job = {"version": "1.0", "task_id": "job-1", "submitted_at": "2026-01-01T00:00:00Z", "payload": payload}
    kcat(system, system.names.request("image_generation", 5), job)
    shown = found(system, LOADED_S, task="image_generation")
    assert (shown["request_id"], shown["status"]) == ("job-1", "completed"), shown
    assert shown["metadata"] == {"version": "1.0"}
    assert (shown["result"]["images"][0]["width"], shown["model"]) == (32, "painter")


def test_two_names_for_one_field_are_a_dead_letter_that_names_both(system: System) -> None:
    body = {"requestId": "twice", "task_id": "twice", "correlation_id": "k-3", "prompt": "x"}
    kcat(system, system.names.request("text_generation", 5), body)
    wait_until(lambda: "twice" in [letter.request_id for letter in system.dead_letters()], OUTCOME_S, "its letter")
    letter = next(letter for letter in system.dead_letters() if letter.request_id == "twice")
    assert letter.reason_code == "invalid"
    assert letter.reason == "requestId and task_id name the same field: give one of them"
    outcome = system.outcomes()["twice"]
    assert (outcome.status, outcome.correlation_id) == ("dead_lettered", "k-3")


def test_confluents_serializer_with_its_defaults(system: System) -> None:
    topic = system.names.request("text_generation", 5)
    command = [sys.executable, str(EXAMPLES / "avro_request.py"), system.bootstrap, system.processes[1].url, topic]
    done = subprocess.run([*command, "avro-1"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    shown = found(system, correlation_id="from-avro")
    assert (shown["request_id"], shown["status"]) == ("avro-1", "completed")


def test_outcomes_as_json_for_kcat(system: System) -> None:
    """In a queue's result topic: of what ran, and of what cannot be read."""
    (queue,) = system.queues
    kcat(system, queue["topic"], {"task_id": "q-1", "correlation_id": "k-4", "type": "chat", "messages": MESSAGES})
    kcat(system, queue["topic"], {"task_id": "q-2", "correlation_id": "k-5", "type": "dance"})
    answers: dict[str, dict[str, Any]] = {}

    def answered() -> bool:
        command = [tool("kcat"), "-C", "-b", system.bootstrap, "-t", queue["result_topic"], "-e", "-q"]
        lines = subprocess.run(command, capture_output=True, check=True, timeout=30).stdout.splitlines()
        answers.update({answer["request_id"]: answer for answer in map(json.loads, lines)})
        return {"q-1", "q-2"} <= answers.keys()

    wait_until(answered, OUTCOME_S, lambda: f"{answers}\n{system.logs(10)}", poll_s=0.5)
    ran, refused = answers["q-1"], answers["q-2"]
    assert (ran["status"], ran["correlation_id"], len(ran["result"]["text"]) > 0) == ("completed", "k-4", True)
    assert (refused["status"], refused["correlation_id"], refused["done"]) == ("failed", "k-5", True)
    assert (refused["error"]["code"], refused["error"]["param"]) == ("invalid", "type")


def test_outcomes_as_json_for_kafkajs(system: System) -> None:
    (queue,) = system.queues
    program = installed_by_npm(KAFKAJS, EXAMPLES / "json_results.js") / "json_results.js"
    command = [tool("node"), str(program), system.bootstrap, queue["topic"], queue["result_topic"], "from-node"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=OUTCOME_S, check=False)
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout)
    assert (outcome["status"], outcome["correlation_id"]) == ("completed", "from-node")
