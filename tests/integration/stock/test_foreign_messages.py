"""Messages as other services write them, by kcat, kafkajs and Confluent's serializer: outcomes, refusals by name."""

from __future__ import annotations

import json
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from confluent_kafka.admin import AdminClient, NewTopic

from hostile_images import picture
from kit.http_server import serving_http
from penstock.schemas.codec import default_codec
from penstock.schemas.records import StatusEvent
from stock_clients import KAFKAJS, installed_by_npm, tool
from support import wait_until
from system import NOOP, System, running

pytestmark = [pytest.mark.slow, pytest.mark.model]

EXAMPLES = Path(__file__).parents[3] / "examples"
OUTCOME_S = 90.0
LOADED_S = 240.0
"""Models are loaded by their first requests."""
GIB = 2**30
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def picture_url() -> Iterator[str]:
    """The URL of a picture on a server of this machine."""
    with serving_http(lambda _: (200, picture(Random(1)), {})) as server:
        yield f"{server.url}/internal/images/user-456/image-789.png"


@pytest.fixture(scope="module")
def system(kafka: Any, picture_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """A worker with a tiny model for each task and a card that is simulated, a gateway, and a bridge with queues."""
    prepare = pytest.importorskip("penstock.cli.assets").prepare_model
    prefix, folder = f"f{uuid.uuid4().hex[:6]}-", tmp_path_factory.mktemp("foreign")
    folder.joinpath("in").mkdir()
    folder.joinpath("in", "photo.png").write_bytes(picture(Random(1)))
    queues = [
        {"topic": f"{prefix}{form}", "format": form, "result_topic": f"{prefix}{form}-results"}
        for form in ("penstock", "llm-d")
    ]
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
    topics = [NewTopic(queue[name], num_partitions=1) for queue in queues for name in ("topic", "result_topic")]
    for made in admin.create_topics(topics).values():
        made.result(20)
    models = [
        {**NOOP, "id": "smollm2", "options": {"tokens": 4, "delay_ms": 300}},
        {"id": "writer", "source": "tiny-lm", "engine": "text", "aliases": ["food-review", "qwen3-30b"], "priority": 0},
        {"id": "painter", "source": "tiny-image-generation", "engine": "diffusers", "tasks": ["image_generation"]},
        {
            "id": "editor", "source": "tiny-image-editing", "engine": "diffusers", "tasks": ["image_editing"],
            "aliases": ["stabilityai/stable-diffusion-3.5-large"],
        },
        {"id": "imaging", "source": "pillow", "engine": "imaging"},
        {"id": "eyes", "source": "tiny-image-to-text", "engine": "vision", "tasks": ["image_to_text"]},
    ]  # fmt: skip
    for model in models:
        if "tiny" in model["source"]:
            model.update(source=str(prepare(model["source"], print)), device="cpu", preload=False)
    card = {"kind": "simulated", "name": "sim0", "total_bytes": 16 * GIB}
    system = System(
        kafka.bootstrap_servers, prefix, folder, models=models, devices=[card, {"kind": "cpu"}], queues=queues
    )
    stores = {"my-generation-results": {"location": str(folder / "results")}}
    settings = {
        "PENSTOCK_IMAGES__INTERNAL_HOSTS": json.dumps([urlsplit(picture_url).netloc]),
        "PENSTOCK_IMAGES__FOLDERS": json.dumps({"/data/in": str(folder / "in")}),
        "PENSTOCK_ARTIFACTS__STORES": json.dumps(stores),
    }
    with running(system):
        for process in (system.worker(env=settings), system.gateway(env=settings), system.bridge(env=settings)):
            process.wait_ready()
        yield system


def kcat(system: System, topic: str, body: dict[str, Any] | bytes) -> None:
    """The record is the body byte for byte, less a line break at its end."""
    command = [tool("kcat"), "-P", "-b", system.bootstrap, "-t", topic, "-X", "partitioner=murmur2_random", "-D", "\\0"]
    value = body if isinstance(body, bytes) else json.dumps(body).encode()
    subprocess.run(command, input=value, check=True, timeout=30)


def kcat_read(system: System, topic: str) -> list[dict[str, Any]]:
    command = [tool("kcat"), "-C", "-b", system.bootstrap, "-t", topic, "-e", "-q"]
    lines = subprocess.run(command, capture_output=True, check=True, timeout=30).stdout.splitlines()
    return [json.loads(line) for line in lines]


def found(system: System, deadline_s: float = OUTCOME_S, **where: str) -> dict[str, Any]:
    """The one request of a list, once it is done."""
    url = f"{system.processes[1].url}/v1/requests"
    listed: list[dict[str, Any]] = []

    def is_done() -> bool:
        listed[:] = httpx.get(url, params=where, timeout=10).raise_for_status().json()["data"]
        return len(listed) == 1 and listed[0]["done"]

    wait_until(is_done, deadline_s, lambda: f"{where}: {listed}\n{system.logs(10)}", poll_s=0.2)
    return listed[0]


SENT = {path.stem: path.read_bytes() for path in (Path(__file__).parents[2] / "messages").glob("*.json")}
MAISTRO = b"http://maistro:8080/internal/images/user-456/image-789.png"
OUTCOMES: list[tuple[str, str, dict[bytes, bytes | None], str | None, str]] = [
    ("text_generation", "text_000", {}, None, "writer"),
    ("text_generation", "text_000", {b"uuid-123": b"large", b"10737418240": b'"20GB"'}, "the request needs", "writer"),
    ("text_generation", "async_001", {}, None, "writer"),
    ("text_generation", "text2text_002", {}, None, "writer"),
    ("image_editing", "image_editing_000", {}, "payload.image: maistro:8080 is not among the hosts", "editor"),
    ("image_editing", "image_editing_000", {b"uuid-123": b"k-9", MAISTRO: None}, None, "editor"),
    ("image_generation", "image_generation_003", {}, None, "painter"),
    (
        "image_generation", "image_generation_003", {b"5d3f6c6e": b"5d3f6c6f", b"my-generation": b"no"},
        "result_bucket 'no-results' is no configured store of artifacts; there are: my-generation-results", "painter",
    ),
    (
        "image_generation", "image_generation_003", {b"5d3f6c6e": b"5d3f6c60", b"DDIM": b"Dream"},
        "payload.sampler: this model knows ddim", "painter",
    ),
    ("image_generation", "text2image_002", {}, None, "painter"),
    ("image_to_text", "image2text_002", {}, None, "eyes"),
    ("image_to_text", "image2text_002", {b"t-3": b"t-3a", b"/in/": b"/in/../"}, "image_path lies in no folder", "eyes"),
    ("image_processing", "image_processing_002", {}, None, "imaging"),
    (
        "image_processing", "image_processing_002", {b"t-4": b"t-4a", b"photo": b"none"},
        "image_path: there is no such file", "imaging",
    ),
]  # fmt: skip
"""(task, message, what is replaced in it, why it fails or None, the model). None is replaced by the picture's URL."""


@pytest.mark.parametrize(
    ("task", "name", "changes", "reason", "model"),
    OUTCOMES,
    ids=[f"{row[1]}-{(row[3] or 'completed')[:20]}" for row in OUTCOMES],
)
def test_each_message_gets_its_outcome(
    system: System, picture_url: str, task: str, name: str, changes: Any, reason: str | None, model: str
) -> None:
    value = SENT[name]
    for old, new in changes.items():
        value = value.replace(old, new or picture_url.encode())
    body = json.loads(value)
    kcat(system, system.names.request(task, body.get("priority", 5)), value)
    ids = [body[field] for field in ("request_id", "requestId", "task_id", "id") if field in body]
    if ids:
        wait_until(lambda: ids[0] in system.outcomes(), LOADED_S, lambda: f"{ids}\n{system.logs(10)}", poll_s=0.5)
        request_id = ids[0]
    else:
        request_id = found(system, LOADED_S, correlation_id=body["correlation_id"])["request_id"]
    outcome = system.outcomes()[request_id]
    assert outcome.status == ("failed" if reason else "completed"), outcome
    assert (outcome.error.message if outcome.error else "").startswith(reason or "")
    assert outcome.model == model


def test_what_the_messages_ask_for_is_what_is_made(system: System) -> None:
    """After the outcomes above: sizes, the store of a bucket, the one who is called, the turns of a conversation."""
    outcomes = system.outcomes()

    def size(request_id: str) -> tuple[int, int]:
        (image,) = (outcomes[request_id].output or {})["images"]
        return image["width"], image["height"]

    assert [size(name) for name in ("t-2", "t-4")] == [(64, 64), (64, 64)]
    job = json.loads(SENT["image_generation_003"])
    assert size(job["task_id"]) == (512, 512)
    assert any(path.is_file() for path in system.folder.joinpath("results").rglob("*")), "its bucket"
    records = {record.key(): dict(record.headers() or ()) for record in system.read(system.names.result)}
    assert records[job["task_id"].encode()]["penstock-callback"] == job["callback_url"].encode()
    assert "penstock-callback" not in records[b"t-1"]
    edited = found(system, correlation_id="k-9")
    assert (edited["conversation_id"], edited["priority"]) == ("789", 10)
    assert (edited["result"]["images"][0]["width"], edited["model"]) == (1024, "editor")


def test_the_message_without_an_id_goes_over_http_too(system: System, picture_url: str) -> None:
    url = f"{system.processes[1].url}/v1/requests"
    value = (
        SENT["image_editing_000"]
        .replace(MAISTRO, picture_url.encode())
        .replace(b"uuid-123", b"k-10")
        .replace(b"1024", b"64")
    )
    made = httpx.post(url, content=value, params={"wait": 60}, timeout=LOADED_S).json()
    done = found(system, LOADED_S, correlation_id="k-10")
    assert (done["request_id"], done["status"]) == (made["request_id"], "completed")
    for name, field in (("text_000", "requestId"), ("async_001", "id"), ("image_generation_003", "task_id")):
        refused = httpx.post(url, content=SENT[name], timeout=10)
        assert refused.status_code == 400
        assert (refused.json()["error"]["param"], refused.json()["error"]["code"]) == (field, "unsupported_parameter")


def test_a_message_of_llmd_is_answered_with_a_payload_or_an_error(system: System) -> None:
    queue, value = system.queues[1], SENT["async_001"]
    for one in (value, value.replace(b"1993", b"2993").replace(b"food-review", b"nobody")):
        kcat(system, queue["topic"], one)
    answers: dict[str, dict[str, Any]] = {}

    def answered() -> bool:
        answers.update({answer["id"]: answer for answer in kcat_read(system, queue["result_topic"])})
        return len(answers) == 2

    wait_until(answered, LOADED_S, lambda: f"{answers}\n{system.logs(10)}", poll_s=0.5)
    made, refused = answers["19933123533434"], answers["29933123533434"]
    assert (made.keys(), made["payload"]["object"]) == ({"id", "payload"}, "text_completion")
    assert (refused.keys(), "nobody" in refused["error"]) == ({"id", "error"}, True)


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
    queue = system.queues[0]
    kcat(system, queue["topic"], {"task_id": "q-1", "correlation_id": "k-4", "type": "chat", "messages": MESSAGES})
    kcat(system, queue["topic"], {"task_id": "q-2", "correlation_id": "k-5", "type": "dance"})
    answers: dict[str, dict[str, Any]] = {}

    def answered() -> bool:
        answers.update({answer["request_id"]: answer for answer in kcat_read(system, queue["result_topic"])})
        return {"q-1", "q-2"} <= answers.keys()

    wait_until(answered, OUTCOME_S, lambda: f"{answers}\n{system.logs(10)}", poll_s=0.5)
    ran, refused = answers["q-1"], answers["q-2"]
    assert (ran["status"], ran["correlation_id"], len(ran["result"]["text"]) > 0) == ("completed", "k-4", True)
    assert (refused["status"], refused["correlation_id"], refused["done"]) == ("failed", "k-5", True)
    assert (refused["error"]["code"], refused["error"]["param"]) == ("invalid", "type")


def test_outcomes_as_json_for_kafkajs(system: System) -> None:
    queue = system.queues[0]
    program = installed_by_npm(KAFKAJS, EXAMPLES / "json_results.js") / "json_results.js"
    command = [tool("node"), str(program), system.bootstrap, queue["topic"], queue["result_topic"], "from-node"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=OUTCOME_S, check=False)
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout)
    assert (outcome["status"], outcome["correlation_id"]) == ("completed", "from-node")
