"""What the images contain, and a chat through containers of both."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from penstock.cli.paths import free_port
from support import wait_until

ROOT = Path(__file__).parents[3]
MOST_BYTES = 400e6
PORTS = {
    "gateway": "PENSTOCK_GATEWAY__PORT",
    "worker": "PENSTOCK_WORKER__HEALTH_PORT",
    "bridge": "PENSTOCK_BRIDGE__HEALTH_PORT",
    "webhooks": "PENSTOCK_WEBHOOKS__HEALTH_PORT",
    "summarizer": "PENSTOCK_SUMMARIZER__HEALTH_PORT",
}
HEALTHY = ("python", "-IS", "/app/build/healthy.py")
# Two cores that other work keeps busy: from nothing, the worker's packages alone take some minutes.
pytestmark = [pytest.mark.slow, pytest.mark.model, pytest.mark.timeout(1800)]


def test_the_slim_image_is_small_and_has_no_engines(slim: Any, data: Path) -> None:
    assert bytes_of(slim.root) < MOST_BYTES
    parts = ["cli.topics", "gateway.app", "gateway.bridge.app", "gateway.webhooks.app", "gateway.summarizer.app"]
    imported = slim.run("python", "-c", "import " + ", ".join(f"penstock.{part}" for part in parts), data=data)
    assert imported.returncode == 0, imported.stdout
    without = slim.run("penstock", "worker", data=data)
    assert without.returncode == 2
    assert "the worker is not installed here" in without.stdout


def test_a_release_has_tags_labels_and_a_bill(images: Any, slim: Any) -> None:
    """It is the same image as far as its layers are concerned, so this takes seconds."""
    bill = ROOT / "dist/penstock-9.8.7-slim.sbom.json"
    try:
        labels = images.release("slim", "9.8.7")
        assert labels["org.opencontainers.image.version"] == "9.8.7"
        assert json.loads(bill.read_text()) == json.loads((slim.root / "app/sbom.json").read_text())
    finally:
        bill.unlink(missing_ok=True)


def bytes_of(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir() or path.is_symlink())


@pytest.mark.parametrize("name", ["slim", "worker"])
def test_an_image_writes_to_its_volume_alone_and_lists_what_is_in_it(
    name: str, data: Path, request: pytest.FixtureRequest
) -> None:
    image: Any = request.getfixturevalue(name)
    config = image.config
    assert (config["User"], config["Entrypoint"], config["StopSignal"]) == ("penstock", ["penstock"], "SIGTERM")
    assert config["Volumes"] == {"/data": {}}
    assert config["Healthcheck"]["Test"] == ["CMD", *HEALTHY]
    found = image.run("find", "/", "-xdev", "-writable", "!", "-type", "l", data=data).stdout.splitlines()
    assert {line for line in found if line.startswith("/") and not line.startswith("/proc")} == {"/data", "/tmp"}
    # With a runtime whose root is writable too, nothing else is the user's.
    own = image.run("find", "/", "-xdev", "-user", "penstock", data=data).stdout.splitlines()
    assert {line for line in own if line.startswith("/") and not line.startswith("/proc")} == {"/data"}

    listed = json.loads((image.root / "app/sbom.json").read_text())["components"]
    places = image.root.glob("app/lib/python3*/site-packages")
    installed = {one.name for place in places for one in importlib.metadata.distributions(path=[str(place)])}
    assert {one["name"] for one in listed if one["purl"].startswith("pkg:pypi/")} == installed
    assert ("torch" in installed) == (name == "worker")
    assert all(one["version"] and one["licenses"][0]["license"]["name"] for one in listed)
    assert {"bash", "python3"} <= {one["name"] for one in listed if one["purl"].startswith("pkg:deb/")}
    unknown = {one["name"] for one in listed if one["licenses"][0]["license"]["name"] == "not stated"}
    assert unknown <= {"cuda-toolkit"}


class Run:
    """Containers on one volume, with the commands of docker-compose.yml."""

    def __init__(self, kafka: str, data: Path) -> None:
        self.services: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
        self.data = data
        self.ports = {"gateway": free_port(), "worker": free_port()}
        prefix = f"t{uuid.uuid4().hex[:6]}-"
        self.env = {
            "PENSTOCK_KAFKA__BOOTSTRAP_SERVERS": kafka,
            "PENSTOCK_KAFKA__TOPIC_PREFIX": prefix,
            "PENSTOCK_TOPICS__PARTITIONS": "4",
            "PENSTOCK_WORKER__GROUP_ID": f"{prefix}worker",
            # Containers here share the network of this machine.
            **{PORTS[name]: str(port) for name, port in self.ports.items()},
        }
        self.containers: dict[str, Any] = {}

    def start(self, name: str, image: Any) -> None:
        words = [*image.config["Entrypoint"], *self.services[name]["command"]]
        log = self.data.with_name(f"{name}.log")
        self.containers[name] = image.start(*words, data=self.data, env=self.env, log=log)

    def wait_healthy(self, name: str, image: Any) -> None:
        """By the image's own health check, in a container that shares the port."""
        env = {variable: self.env[variable] if part == name else "1" for part, variable in PORTS.items()}

        def is_healthy() -> bool:
            container = self.containers[name]
            assert container.process.poll() is None, container.text()
            return image.run(*HEALTHY, data=self.data, env=env).returncode == 0

        wait_until(is_healthy, 180, lambda: self.containers[name].text(), poll_s=1)

    def stop(self, name: str) -> int:
        self.containers[name].signal(signal.SIGTERM)
        grace_s = float(self.services[name]["stop_grace_period"].removesuffix("s"))
        return self.containers[name].process.wait(grace_s)


@pytest.fixture
def run(kafka: Any, data: Path, smollm2: Path, minilm: Path) -> Iterator[Run]:
    for model in (smollm2, minilm):
        shutil.copytree(model, data / "cache/models" / model.name)
    for path in data.rglob("*"):
        os.chown(path, data.stat().st_uid, data.stat().st_gid)
    made = Run(kafka.bootstrap_servers, data)
    yield made
    for container in made.containers.values():
        if container.process.poll() is None:
            container.process.kill()
            container.process.wait(20)


def test_a_chat_through_containers_of_both_images_and_their_end(slim: Any, worker: Any, run: Run) -> None:
    topics, _, keys = run.services["init"]["command"][0].strip().splitlines()
    assert slim.run(*topics.split(), data=run.data, env=run.env).returncode == 0
    made = slim.run(*keys.partition("|| ")[2].split(), data=run.data, env=run.env)
    key = next(line for line in made.stdout.splitlines() if line.startswith("pk"))
    run.start("gateway", slim)
    run.start("worker", worker)
    run.wait_healthy("gateway", slim)
    run.wait_healthy("worker", worker)
    chat = {"model": "default", "max_tokens": 4, "messages": [{"role": "user", "content": "Hello"}]}
    url = f"http://127.0.0.1:{run.ports['gateway']}"
    with httpx.Client(base_url=url, headers={"authorization": f"Bearer {key}"}, timeout=120) as http:
        answer = http.post("/v1/chat/completions", json=chat)
        assert answer.status_code == 200, run.containers["worker"].text()
        assert answer.json()["usage"]["completion_tokens"] > 0
        with http.stream("POST", "/v1/chat/completions", json={**chat, "max_tokens": 40, "stream": True}) as stream:
            lines = (line for line in stream.iter_lines() if line)
            assert '"content"' in next(lines) + next(lines), "it runs"
            assert run.stop("worker") == 0, run.containers["worker"].text()
            *_, end, done = lines
        assert '"finish_reason":null' not in end.replace(" ", ""), "the worker drained: nobody else could end it"
        assert done == "data: [DONE]"
    assert run.stop("gateway") == 0, run.containers["gateway"].text()
