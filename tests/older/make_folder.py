"""Writes the data folder of an older release, to be packed and kept: `python make_folder.py f417c1a.tar.xz`.

Run it with PYTHONPATH on a checkout of that release. It uses only what that release has.
The folder is what its `penstock up` writes: finished requests of several tasks, a conversation, an artifact, a dead
letter; and, as its worker was killed, two requests that had begun and four that had not.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
from confluent_kafka import Consumer, Producer, TopicPartition
from PIL import Image

from penstock.cli.embedded_kafka import EmbeddedKafka
from penstock.cli.paths import free_port

PARTITIONS, WORDS = 4, 40
MODELS = f"""
[[models]]
id = "noop"
source = "noop"
engine = "noop"
tasks = ["text_generation", "embedding", "summarization"]
options = {{tokens = 4}}

[[models]]
id = "slow"
source = "noop"
engine = "noop"
tasks = ["text_generation"]
options = {{tokens = {WORDS}, delay_ms = 500, slots = 2}}

[[models]]
id = "imaging"
source = "pillow"
engine = "imaging"
tasks = ["image_processing"]
preload = false
"""
LEFT_OUT = ("server.properties", "broker.log")


def main(archive: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        data.mkdir()
        began = time.time()
        notes = fill(data, Path(folder))
        notes |= {"began_ms": int(began * 1000), "ended_ms": int(time.time() * 1000)}
        (data / "notes.json").write_text(json.dumps(notes, indent=1))
        with tarfile.open(archive, "w:xz", preset=9) as file:
            file.add(data, "data", filter=lambda entry: None if entry.name.endswith(LEFT_OUT) else entry)
    print(f"{archive}: {archive.stat().st_size:,} bytes")


def fill(data: Path, folder: Path) -> dict[str, Any]:
    kafka = EmbeddedKafka(data / "kafka", free_port())
    kafka.start()
    config = folder / "penstock.toml"
    config.write_text(MODELS)
    port, health = free_port(), free_port()
    env = {
        **os.environ,
        "PENSTOCK_CONFIG": str(config),
        "PENSTOCK_KAFKA__BOOTSTRAP_SERVERS": kafka.bootstrap_servers,
        "PENSTOCK_ARTIFACTS__LOCATION": str(data / "artifacts"),
        "PENSTOCK_WORKER__DATA_DIR": str(data / "worker"),
        "PENSTOCK_WORKER__HEALTH_PORT": str(health),
        "PENSTOCK_GATEWAY__PORT": str(port),
        "PENSTOCK_GATEWAY__VIEW_PATH": str(data / "gateway" / "view.sqlite"),
    }
    command = [sys.executable, "-m", "penstock.cli.main"]
    subprocess.run([*command, "topics", "create", "--partitions", str(PARTITIONS)], env=env, check=True)
    worker = subprocess.Popen([*command, "worker"], env=env)
    gateway = subprocess.Popen([*command, "gateway"], env=env)
    try:
        for at in (port, health):
            wait_ready(f"http://127.0.0.1:{at}/readyz")
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=70) as http:
            done = finished(http, kafka.bootstrap_servers)
            begun = [submit(http, prompt("slow"), stream=True), submit(http, turn("the one that began"), model="slow")]
            for one in begun:
                until(http, one, "running")
            read_some(http, begun[0])
            worker.kill()
            worker.wait(20)
            waiting = [submit(http, prompt("noop"), priority=priority) for priority in (1, 5, 9)]
            waiting.append(submit(http, turn("the one that waited")))
        return {"done": done, "begun": begun, "waiting": waiting, "words": WORDS}
    finally:
        worker.kill()
        gateway.terminate()
        gateway.wait(30)
        kafka.stop()


def finished(http: httpx.Client, bootstrap: str) -> dict[str, Any]:
    """What has an outcome: each request as the older gateway showed it."""
    uploaded = http.post("/v1/artifacts", content=picture(), headers={"content-type": "image/png"})
    image = uploaded.raise_for_status().json()["artifact_id"]
    ids = [
        submit(http, prompt("noop"), stream=True),
        submit(http, {"task": "embedding", "payload": {"input": ["one", "two"]}}, model="noop"),
        submit(http, {"task": "summarization", "payload": {"text": "A long text."}}, model="noop"),
        submit(
            http,
            {
                "task": "image_processing",
                "payload": {"image": {"artifact_id": image}, "operations": [{"op": "rotate", "degrees": 90}]},
            },
        ),
        *(submit(http, turn(f"turn {number}")) for number in range(3)),
    ]
    done = {one: http.get(f"/v1/requests/{one}", params={"wait": 60}).raise_for_status().json() for one in ids}
    producer = Producer({"bootstrap.servers": bootstrap})
    producer.produce("inference.request.medium", b"\x00not a record", key=b"broken")
    assert producer.flush(20) == 0
    read_letter(bootstrap)
    return done


def read_letter(bootstrap: str) -> None:
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "maker"})
    consumer.assign([TopicPartition("inference.dlq", number, 0) for number in range(PARTITIONS)])
    assert consumer.poll(60) is not None
    consumer.close()


def prompt(model: str) -> dict[str, Any]:
    return {"task": "text_generation", "model": model, "payload": {"prompt": "go", "max_tokens": WORDS}}


def turn(text: str) -> dict[str, Any]:
    payload = {"messages": [{"role": "user", "content": text}]}
    return {"task": "text_generation", "model": "noop", "conversation_id": "c1", "payload": payload}


def submit(http: httpx.Client, body: dict[str, Any], **fields: Any) -> str:
    return str(http.post("/v1/requests", json={**body, **fields}).raise_for_status().json()["request_id"])


def until(http: httpx.Client, request_id: str, status: str) -> None:
    deadline = time.monotonic() + 60
    while (found := http.get(f"/v1/requests/{request_id}").json())["status"] != status:
        assert time.monotonic() < deadline, found
        time.sleep(0.05)


def read_some(http: httpx.Client, request_id: str) -> None:
    """Until three chunks are in the log."""
    seen = 0
    with http.stream("GET", f"/v1/requests/{request_id}/events") as stream:
        for line in stream.iter_lines():
            seen += line.startswith("data:") and json.loads(line[5:])["type"] == "chunk"
            if seen >= 3:
                return


def wait_ready(url: str) -> None:
    deadline = time.monotonic() + 90
    while True:
        try:
            if httpx.get(url, timeout=2).status_code == 200:
                return
        except httpx.HTTPError:
            assert time.monotonic() < deadline, url
        time.sleep(0.2)


def picture() -> bytes:
    with tempfile.NamedTemporaryFile(suffix=".png") as file:
        Image.new("RGB", (8, 4), (200, 30, 30)).save(file.name)
        return Path(file.name).read_bytes()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
