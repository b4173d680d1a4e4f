"""What was erased stands nowhere on the disk: every byte of a system's folder is looked at, the broker's too."""

from __future__ import annotations

import base64
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType

from aged_conversations import make_older
from penstock.cli.embedded_kafka import EmbeddedKafka
from penstock.cli.paths import free_port
from penstock.common.settings import KafkaSettings
from support import wait_until
from system import NOOP, System, running

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
BOTH = ["text_generation", "summarization"]
MODELS = [
    {**NOOP, "id": "talk", "tasks": BOTH, "options": {"echo": True}},
    {"id": "imaging", "source": "pillow", "engine": "imaging", "tasks": ["image_processing"]},
]
# What passes in days passes in seconds here: segments close, logs are compacted, files of deleted records go.
SOON = {
    "log.roll.ms": "1000",
    "log.cleaner.backoff.ms": "100",
    "log.cleaner.min.cleanable.ratio": "0.0",
    "log.cleaner.delete.retention.ms": "0",
    "log.retention.check.interval.ms": "200",
    "log.initial.task.delay.ms": "0",
    "log.segment.delete.delay.ms": "0",
    "log.index.size.max.bytes": "4096",  # else each index is 10 MB of nothing, which is read too
}
Json = dict[str, Any]


@pytest.fixture
def system(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[System]:
    sharded = getattr(request, "param", "topics") == "sharded"
    broker = EmbeddedKafka(tmp_path / "kafka", free_port(), properties=SOON).start()
    try:
        options = {"limits": {"conversation_retention_s": "1h"}, "sweep_conversations_s": 1}
        made = System(broker.bootstrap_servers, "", tmp_path, models=MODELS, gateway_options=options, sharded=sharded)
        with running(made) as started:
            started.worker().wait_ready()
            started.gateway().wait_ready()
            yield started
    finally:
        broker.kill()


def ended(client: httpx.Client, body: Json, path: str = "/v1/requests") -> Json:
    answer = client.post(f"{path}?wait=50", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["status"] == "completed", answer.text
    return answer.json()


def text(content: str, conversation: str | None = None) -> Json:
    payload = {"messages": [{"role": "user", "content": content}]}
    told = {} if conversation is None else {"conversation_id": conversation}
    return {"task": "text_generation", "model": "talk", "payload": payload, **told}


def files_with(folder: Path, marks: list[bytes]) -> list[str]:
    """The files below the folder that hold one of these, read byte by byte."""
    found: list[str] = []
    for path in (Path(within) / name for within, _, names in os.walk(folder) for name in names):
        try:
            content = path.read_bytes() if path.is_file() else b""
        except FileNotFoundError:  # Kafka or the store has removed it just now
            continue
        found += [str(path.relative_to(folder)) for mark in marks if mark in content]
    return found


def let_retention_pass(system: System) -> None:
    """The three days of requests, results and statuses, and the thirty of dead letters, are over."""
    admin = AdminClient(KafkaSettings(bootstrap_servers=system.bootstrap).librdkafka())
    names = system.names
    topics = [*names.request_topics(), names.result, names.status, names.control, names.dlq]
    over = ConfigEntry("retention.ms", "1", incremental_operation=AlterConfigOpType.SET)
    asked = [ConfigResource(ResourceType.TOPIC, topic, incremental_configs=[over]) for topic in topics]
    for future in admin.incremental_alter_configs(asked).values():
        future.result(20)


@contextmanager
def without_store(folder: Path) -> Iterator[None]:
    """Within it a file stands in the place of the artifacts' folder."""
    away = folder.with_suffix(".away")
    folder.rename(away)
    folder.write_text("no folder")
    try:
        yield
    finally:
        folder.unlink()
        away.rename(folder)


@pytest.mark.parametrize("system", ["topics", "sharded"], indirect=True)
def test_no_byte_of_it_is_left(system: System, tmp_path: Path) -> None:
    said, image = secrets.token_hex(16), secrets.token_bytes(16)
    picture = {"data": base64.b64encode(PNG + image).decode()}
    gateway = system.process("g1")
    with httpx.Client(base_url=gateway.url, timeout=90) as client:
        talked = [ended(client, text(f"It is {said}.", "c")), ended(client, text("And now?", "c"))]
        summary = ended(client, {"model": "talk"}, "/v1/conversations/c/summarize")
        long = ended(client, text(f"{said} {'word ' * 60_000}"))
        resize = {"op": "resize", "width": 4, "height": 4}
        drawn = ended(client, {"task": "image_processing", "payload": {"image": picture, "operations": [resize]}})
        url = f"data:image/png;base64,{picture['data']}"
        item = {"type": "message", "role": "user", "content": [{"type": "input_image", "image_url": url}]}
        shown = client.post("/v1/conversations/c/items", json={"items": [item]})
        assert shown.status_code == 200, shown.text
        marks = [said.encode(), image]
        before = files_with(tmp_path, marks)
        assert {one.partition("/")[0] for one in before} >= {"kafka", "artifacts"}, before

        erase = [one["request_id"] for one in (*talked, summary, long, drawn)]
        erase.append(shown.json()["data"][0]["request_id"])
        with without_store(tmp_path / "artifacts"):
            refused = [client.delete(f"/v1/requests/{request_id}").status_code for request_id in erase]
            assert 503 in refused, refused
        for request_id in erase:
            wait_until(
                lambda request_id=request_id: client.delete(f"/v1/requests/{request_id}").status_code in (200, 410),
                60,
                lambda request_id=request_id: f"{request_id} is not erased",
            )
        let_retention_pass(system)
        deadline = time.monotonic() + 90
        while left := files_with(tmp_path, marks):
            assert time.monotonic() < deadline, left
            # A segment of a log closes when the next record comes. The retention may take a request unread.
            assert client.post("/v1/requests?wait=2", json=text("Go on.", "c")).status_code in (200, 202)
        items = client.get("/v1/conversations/c/items?limit=100").json()["data"]
        assert items, "what was not erased stands there"


def test_no_byte_of_a_conversation_that_expired_is_left(system: System, tmp_path: Path) -> None:
    """Without anybody's doing: the gateway sweeps by itself."""
    said, titled = secrets.token_hex(16), secrets.token_hex(16)
    marks = [said.encode(), titled.encode()]
    gateway = system.process("g1")
    with httpx.Client(base_url=gateway.url, timeout=90) as client:
        ended(client, text(f"It is {said}.", "old"))
        ended(client, {"model": "talk"}, "/v1/conversations/old/summarize")
        assert client.post("/v1/conversations/old", json={"title": titled}).status_code == 200
        before = files_with(tmp_path, marks)
        assert {Path(one).parent.name for one in before} >= {"conversation.old-0", "inference.conversation-0"}, before
        make_older(system, "default", ["old"], 7_200)
        wait_until(lambda: client.get("/v1/conversations/old").status_code == 404, 60, gateway.tail)
        let_retention_pass(system)
        assert client.post("/v1/conversations", json={"id": "young"}).status_code == 200
        deadline = time.monotonic() + 90
        while left := files_with(tmp_path, marks):
            assert time.monotonic() < deadline, left
            # A segment of a compacted log closes when the next record comes.
            assert client.post("/v1/conversations/young", json={"title": secrets.token_hex(4)}).status_code == 200
        assert client.get("/v1/conversations/young").status_code == 200, "what is young stays"
