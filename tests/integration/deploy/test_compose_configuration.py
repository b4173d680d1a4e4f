"""What docker-compose.yml and deploy/penstock.toml say, run here without containers.

Each service is a process of its own, with the commands of the compose file and the very penstock.toml of the image. The
user is the image's, 10001: it may read everything and write to nothing but the volumes, which stand in folders here.
"""

from __future__ import annotations

import io
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from PIL import Image

from penstock.cli.paths import cache_dir
from support import wait_until
from system import free_port

ROOT = Path(__file__).parents[3]
USER = 10001

SETPRIV = [
    "setpriv",
    f"--reuid={USER}",
    f"--regid={USER}",
    "--clear-groups",
    # The interpreter may lie in root's home; what may be read is not what is asked here.
    "--inh-caps=+dac_read_search",
    "--ambient-caps=+dac_read_search",
]


class Compose:
    """The services of the compose file as processes; `fill` puts folders in place of the volumes' mount points."""

    def __init__(self, folder: Path, kafka: str, prefix: str) -> None:
        self.services: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
        self.folder = folder
        self.app = folder / "app"
        self.app.mkdir()  # root's, as /app in the image
        mounts = [volume.partition(":")[::2] for volume in self.services["gateway"]["volumes"]]
        assert mounts == [volume.partition(":")[::2] for volume in self.services["worker"]["volumes"]]
        self.volumes = {mount: folder / "volumes" / name for name, mount in mounts}
        for volume in self.volumes.values():
            volume.mkdir(parents=True)
        self.config = folder / "penstock.toml"
        self.config.write_text(self.fill((ROOT / "deploy/penstock.toml").read_text()).replace("kafka:9092", kafka))
        self.ports = {"worker": free_port(), "worker 2": free_port(), "gateway": free_port()}
        self.environment = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join(sys.path),
            "PYTHONUNBUFFERED": "1",
            "HOME": "/nonexistent",
            "PENSTOCK_CACHE": str(self.volumes["/cache"]),
            "PENSTOCK_CONFIG": str(self.config),
            # What differs from the containers: one broker for all tests, one network.
            "PENSTOCK_KAFKA__TOPIC_PREFIX": prefix,
            "PENSTOCK_TOPICS__PARTITIONS": "4",
            "PENSTOCK_WORKER__GROUP_ID": f"{prefix}worker",
            "PENSTOCK_GATEWAY__PORT": str(self.ports["gateway"]),
        }
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def fill(self, text: str) -> str:
        for mount, folder in self.volumes.items():
            text = text.replace(f"{mount}/", f"{folder}/")
        return text

    def start(self, name: str) -> None:
        """`worker 2`: another container of the service, with the same volumes and settings."""
        service = self.services[name.partition(" ")[0]]
        argv = [self.fill(word) for word in [*service.get("entrypoint", ["penstock"]), *service["command"]]]
        with (self.folder / f"{name}.log").open("wb") as log:
            self.processes[name] = subprocess.Popen(
                [*SETPRIV, *argv],
                cwd=self.app,
                env={**self.environment, "PENSTOCK_WORKER__HEALTH_PORT": str(self.ports.get(name, 0))},
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.ports[name]}"

    def wait_ready(self, name: str, assigned: int = 0) -> dict[str, Any]:
        """What it says when it is ready, and has so many partitions."""
        said: dict[str, Any] = {}

        def ready() -> bool:
            assert self.processes[name].poll() is None, self.log(name)
            try:
                answer = httpx.get(self.url(name) + "/readyz", timeout=2)
            except httpx.HTTPError:
                return False
            said.update(answer.json())
            return answer.status_code == 200 and (not assigned or said["assigned"] == assigned)

        wait_until(ready, 120, lambda: (said, self.log(name)))
        return said

    def stop(self, name: str) -> int:
        self.processes[name].send_signal(signal.SIGTERM)
        grace_s = float(self.services[name.partition(" ")[0]]["stop_grace_period"].removesuffix("s"))
        return self.processes[name].wait(grace_s)


@pytest.fixture
def compose(kafka: Any, kafka_prefix: str, tmp_path: Path, smollm2: Path, minilm: Path) -> Iterator[Compose]:
    if os.getuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("only root, with setpriv, can run processes as the image's user")
    made = Compose(tmp_path, kafka.bootstrap_servers, kafka_prefix)
    shutil.copytree(cache_dir() / "models", made.volumes["/cache"] / "models", copy_function=link_or_copy)
    for volume in made.volumes.values():
        os.chown(volume, USER, USER)
        for path in volume.rglob("*"):
            if path.is_dir():
                os.chown(path, USER, USER)
    yield made
    for process in made.processes.values():
        if process.poll() is None:
            process.kill()
            process.wait(20)


def png() -> bytes:
    made = io.BytesIO()
    Image.new("RGB", (8, 8), "red").save(made, "PNG")
    return made.getvalue()


def link_or_copy(source: str, target: str) -> None:
    """Models are large; they are only read. A lock file is written to: it must be the user's own."""
    if source.endswith(".lock"):
        return
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


@pytest.mark.slow
@pytest.mark.model
def test_the_containers_serve_and_share_artifacts(compose: Compose) -> None:
    compose.start("init")
    assert compose.processes["init"].wait(120) == 0, compose.log("init")
    key = next(line for line in compose.log("init").splitlines() if line.startswith("pk"))
    workers = ["worker", "worker 2"]  # docker compose up --scale worker=2
    for worker in workers:
        compose.start(worker)
    compose.start("gateway")
    compose.wait_ready("gateway")
    half = 5 * 4 // 2
    said = [compose.wait_ready(worker, assigned=half) for worker in workers]
    assert said[0]["worker_id"] != said[1]["worker_id"]
    assert sorted(path.parent.name for path in compose.volumes["/data"].glob("*/journal")) == ["worker", "worker-2"]

    headers = {"authorization": f"Bearer {key}"}
    with httpx.Client(base_url=compose.url("gateway"), headers=headers, timeout=120) as http:
        uploaded = http.post("/v1/artifacts", content=b"mine", headers={"content-type": "text/plain"})
        assert uploaded.status_code == 201, uploaded.text
        assert http.get(uploaded.json()["content_url"]).content == b"mine"
        # 200 embeddings are over 256 KiB: the worker writes them as an artifact, the gateway reads it.
        words = [f"word {number}" for number in range(200)]
        answer = http.post("/v1/embeddings", json={"model": "all-minilm-l6-v2", "input": words})
        assert answer.status_code == 200, answer.text
        assert len(answer.json()["data"]) == 200
        chat = {"model": "default", "max_tokens": 4, "messages": [{"role": "user", "content": "Hello"}]}
        assert http.post("/v1/chat/completions", json=chat).json()["usage"]["completion_tokens"] > 0
        picture = http.post("/v1/artifacts", content=png(), headers={"content-type": "image/png"}).json()
        for task, payload in {
            "summarization": {"text": "A long text. " * 20, "max_tokens": 8},
            "image_processing": {
                "image": {"artifact_id": picture["artifact_id"]},
                "operations": [{"op": "resize", "width": 2, "height": 2}],
            },
        }.items():
            sent = http.post("/v1/requests", json={"task": task, "payload": payload}).json()
            done = http.get(f"/v1/requests/{sent['request_id']}", params={"wait": 60}).json()
            assert done["status"] == "completed", done

    kept = list((compose.volumes["/data"] / "artifacts").rglob("about.json"))
    assert len(kept) == 4, "two uploads, the vectors, the processed image"
    assert {path.stat().st_uid for path in kept} == {USER}
    assert compose.stop("gateway") == 0, compose.log("gateway")
    for worker in workers:
        assert compose.stop(worker) == 0, compose.log(worker)
