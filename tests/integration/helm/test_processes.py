"""The commands and settings of the rendered chart, run as processes: only addresses, ports and paths are replaced.

A Secret is mounted as Kubernetes does it. Volumes are folders: those of one claim are one folder.
"""

from __future__ import annotations

import base64
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from kit.go_tools import MAY_BUILD
from kit.helm_chart import RELEASE, Manifest, containers, environment, of_kind, pods, rendered, values_file
from penstock.cli.paths import cache_dir, free_port
from penstock.common.admin import partition_counts
from penstock.common.settings import KafkaSettings
from penstock.gateway.edge.keys import create_key
from penstock.schemas.topics import TopicNames
from support import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.model, MAY_BUILD]

ENTRYPOINT = ["penstock"]
"""That of both images."""


class Cluster:
    """The containers of a release as processes."""

    def __init__(self, manifests: list[Manifest], folder: Path, secrets: Mapping[str, Mapping[str, str]]) -> None:
        self._files = {
            **{name: one["data"] for name, one in of_kind(manifests, "ConfigMap").items()},
            **{f"secret {name}": files for name, files in secrets.items()},
        }
        self.pods = pods(manifests)
        self._folder = folder
        self.ports: dict[str, int] = {}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def folder_of(self, name: str, volume: Manifest) -> Path:
        """The folder that stands for a volume of a pod; it is made."""
        if claim := volume.get("persistentVolumeClaim"):
            folder = self._folder / "claims" / claim["claimName"]
        else:
            folder = self._folder / name / volume["name"]
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def mount(self, name: str) -> dict[str, Path]:
        """By path in its containers, the folders of a pod's volumes."""
        volumes = {one["name"]: one for one in self.pods[name]["volumes"]}
        mounts = self.pods[name]["containers"][0]["volumeMounts"]
        mounted = {one["mountPath"]: self.folder_of(name, volumes[one["name"]]) for one in mounts}
        for one in mounts:
            files = self._files_of(volumes[one["name"]])
            _write_as_kubernetes(mounted[one["mountPath"]], {file: _replaced(files[file], mounted) for file in files})
        return mounted

    def _files_of(self, volume: Manifest) -> Mapping[str, str]:
        if "configMap" in volume:
            return self._files[volume["configMap"]["name"].removeprefix(f"{RELEASE}-")]
        return self._files[f"secret {volume['secret']['secretName']}"] if "secret" in volume else {}

    def run(self, name: str) -> None:
        """Run a pod's containers: those before the last to their end, the last in the background."""
        mounted = self.mount(name)
        *before, last = containers(self.pods[name])
        for container in before:
            process = self._start(f"{name} {container['name']}", container, mounted)
            assert process.wait(120) == 0, self.log(f"{name} {container['name']}")
        self.processes[name] = self._start(name, last, mounted)

    def _start(self, name: str, container: Manifest, mounted: Mapping[str, Path]) -> subprocess.Popen[bytes]:
        settings = {variable: _replaced(value, mounted) for variable, value in environment(container).items()}
        for port in container.get("ports", ()):
            self.ports[name] = free_port()
            (variable,) = [one for one, value in settings.items() if value == str(port["containerPort"])]
            settings[variable] = str(self.ports[name])
        log = (self._folder / f"{name}.log").open("wb")
        return subprocess.Popen(
            [*container.get("command", ENTRYPOINT), *container["args"]],
            cwd=mounted["/data"],
            env={
                "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
                "PYTHONPATH": os.pathsep.join(sys.path),
                **settings,
            },
            stdout=log,
            stderr=subprocess.STDOUT,
        )

    def log(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text(errors="replace")[-4_000:]

    def probe(self, name: str, probe: str) -> int:
        """The status that the kubelet would get; 0 if nothing listens."""
        (container,) = self.pods[name]["containers"]
        http = container[probe]["httpGet"]
        assert http["port"] in [one["name"] for one in container["ports"]]
        assert self.processes[name].poll() is None, self.log(name)
        try:
            return httpx.get(f"http://127.0.0.1:{self.ports[name]}{http['path']}", timeout=5).status_code
        except httpx.TransportError:
            return 0

    def wait_for(self, name: str, *probes: str) -> None:
        for probe in probes:
            wait_until(lambda probe=probe: self.probe(name, probe) == 200, 180, lambda: self.log(name))

    def stop(self, name: str) -> tuple[int, float]:
        """As the kubelet does. Returns the exit code, and the seconds that were left of the grace period."""
        pod = self.pods[name]
        give_up = time.monotonic() + pod["terminationGracePeriodSeconds"]
        if hook := pod["containers"][0].get("lifecycle"):
            time.sleep(hook["preStop"]["sleep"]["seconds"])
            assert self.probe(name, "readinessProbe") == 200, "it serves until SIGTERM"
        self.processes[name].send_signal(signal.SIGTERM)
        code = self.processes[name].wait(give_up - time.monotonic())
        return code, give_up - time.monotonic()

    def kill(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
                process.wait(20)


def _replaced(text: str, mounted: Mapping[str, Path]) -> str:
    """The text with folders in place of the mount paths that it is, begins with, or has in quotes."""
    paths = "|".join(sorted(mounted, key=len, reverse=True))
    return re.sub(rf'(^|")({paths})(?=[/"]|$)', lambda found: f"{found[1]}{mounted[found[2]]}", text)


def _write_as_kubernetes(folder: Path, files: Mapping[str, str]) -> None:
    if not files:
        return
    mounted = folder / "..1"
    mounted.mkdir(exist_ok=True)
    for name, text in files.items():
        (mounted / name).write_text(text)
        if not (folder / name).is_symlink():
            (folder / name).symlink_to(f"..1/{name}")


@pytest.fixture
def key(tmp_path: Path) -> str:
    return create_key(tmp_path / "keys.json")


@pytest.fixture
def install(kafka: Any, kafka_prefix: str, tmp_path: Path, key: str) -> Iterator[Callable[[str], Cluster]]:
    """Makes the cluster of a values file, in which nothing runs yet."""
    secrets = {
        "penstock-keys": {"keys.json": (tmp_path / "keys.json").read_text()},
        "penstock-settings": {
            "PENSTOCK_WEBHOOKS__SECRET": f"whsec_{base64.b64encode(os.urandom(32)).decode()}",
            "PENSTOCK_AUTH__TICKET_KEY": "k" * 40,
        },
    }
    addresses = {"kafka.bootstrapServers": kafka.bootstrap_servers, "kafka.topicPrefix": kafka_prefix}
    made: list[Cluster] = []

    def install(name: str) -> Cluster:
        options = [f"--set-string={name}={value}" for name, value in addresses.items()]
        made.append(Cluster(rendered(values_file(name), *options), tmp_path / "cluster", secrets))
        return made[-1]

    yield install
    for cluster in made:
        cluster.kill()


@pytest.fixture
def cluster(install: Callable[[str], Cluster], smollm2: Path, minilm: Path) -> Cluster:
    """That of values-small.yaml, with models in its cache."""
    made = install("values-small.yaml")
    (cache,) = [one for one in made.pods["worker-common"]["volumes"] if one["name"] == "cache"]
    (made.folder_of("worker-common", cache) / "models").symlink_to(cache_dir() / "models")
    return made


def test_the_topic_job_checks_the_configuration_and_creates_the_topics_of_all_pools(
    install: Callable[[str], Cluster], kafka: Any, kafka_prefix: str
) -> None:
    cluster = install("values-gpu.yaml")
    cluster.run("topics")
    assert cluster.processes["topics"].wait(120) == 0, cluster.log("topics")
    names = TopicNames(kafka_prefix)
    topics = [topic for pool in (None, "chat", "images") for topic in names.request_topics(pool)]
    counts = partition_counts(KafkaSettings(bootstrap_servers=kafka.bootstrap_servers), topics)
    assert counts == dict.fromkeys(topics, 64)


def test_the_rendered_chart_serves_a_chat_and_stops_within_its_grace_periods(cluster: Cluster, key: str) -> None:
    """Every container of values-small.yaml, in the order of an install: the topic job, then all others."""
    cluster.run("topics")
    assert cluster.processes["topics"].wait(120) == 0, cluster.log("topics")
    parts = [name for name in cluster.pods if name != "topics"]
    assert {"gateway", "worker-common", "webhooks", "bridge", "summarizer"} == {*parts}
    for name in parts:
        cluster.run(name)
    for name in parts:
        cluster.wait_for(name, "startupProbe", "livenessProbe", "readinessProbe")
    gateway = f"http://127.0.0.1:{cluster.ports['gateway']}"
    with httpx.Client(base_url=gateway, headers={"authorization": f"Bearer {key}"}, timeout=120) as http:
        wait_until(
            lambda: http.get("/readyz?require=workers").status_code == 200, 180, lambda: http.get("/readyz").text
        )
        chat = {"model": "default", "max_tokens": 4, "messages": [{"role": "user", "content": "Hello"}]}
        answer = http.post("/v1/chat/completions", json=chat)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] > 0
        uploaded = http.post("/v1/artifacts", content=b"mine", headers={"content-type": "text/plain"})
        assert http.get(uploaded.json()["content_url"]).content == b"mine"
    for name in parts:
        code, left_s = cluster.stop(name)
        assert (code, left_s > 0) == (0, True), f"{name}: {code}\n{cluster.log(name)}"
