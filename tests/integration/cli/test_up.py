"""`penstock up` as a person runs it: everything starts, what dies is started again, one signal stops all in order."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from confluent_kafka import Producer

from penstock.cli.paths import free_port, port_in_use
from penstock.common.admin import partition_counts
from penstock.common.reader import read_to_end
from penstock.common.settings import KafkaSettings
from support import alive, wait_until

ORDER = ("summarizer", "webhooks", "bridge", "gateway", "worker", "broker")
"""In which its parts are stopped."""
CONFIG = """
[worker]
group_id = "up-test"

[[models]]
id = "noop"
source = "noop"
engine = "noop"
tasks = ["text_generation"]
options = {tokens = 3}

[[models]]
id = "slow"
source = "noop"
engine = "noop"
tasks = ["text_generation"]
options = {tokens = 60, delay_ms = 100}
"""


class Up:
    """One `penstock up` in a folder of its own, on free ports."""

    def __init__(self, folder: Path) -> None:
        self.data = folder / "data"
        self.port, self.kafka_port = free_port(), free_port()
        self.config = folder / "penstock.toml"
        self.config.write_text(CONFIG)
        self.log = folder / "up.out"
        self.browser, self.opened = folder / "browser", folder / "opened"
        self.browser.write_text(f'#!/bin/sh\necho "$@" > {self.opened}\n')
        self.browser.chmod(0o755)
        self.process: subprocess.Popen[bytes] | None = None

    def command(self, *arguments: str, input: str | None = None) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "penstock.cli.main", *arguments, "--data-dir", str(self.data)]
        return subprocess.run(argv, capture_output=True, text=True, timeout=240, input=input)

    def options(self) -> list[str]:
        ports = ["--port", str(self.port), "--kafka-port", str(self.kafka_port)]
        return [*ports, "--config", str(self.config)]

    def start(self) -> None:
        argv = [sys.executable, "-m", "penstock.cli.main", "up", "--data-dir", str(self.data), *self.options()]
        env = {**os.environ, "BROWSER": f"{self.browser} %s"}
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(
                [*argv, "--open"], stdout=out, stderr=subprocess.STDOUT, start_new_session=True, env=env
            )

    def says(self, words: str) -> bool:
        assert self.process is not None
        text = self.log.read_text()
        assert self.process.poll() is None or words in text, text
        return words in text

    def logs(self) -> str:
        """The ends of what its parts have said."""
        files = sorted(self.data.rglob("*.log"))
        return "\n".join(f"{one.name}: {one.read_text(errors='replace')[-4_000:]}" for one in files)

    def status(self) -> dict[str, Any]:
        return json.loads(self.command("status", "--json").stdout)

    def pids(self) -> dict[str, int]:
        return {part["name"]: part["pid"] for part in self.status()["parts"]}

    def ask(self) -> dict[str, Any]:
        body = {"task": "text_generation", "payload": {"prompt": "hello", "max_tokens": 3}}
        with httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=70, trust_env=False) as http:
            accepted = http.post("/v1/requests", json=body).raise_for_status().json()
            return http.get(accepted["status_url"], params={"wait": 60}).raise_for_status().json()


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Up]:
    up = Up(tmp_path)
    yield up
    if up.process is not None and up.process.poll() is None:
        up.process.kill()  # its parts die with it
        up.process.wait(20)


def members(pids: list[int]) -> list[int]:
    """All living processes of the sessions that these processes lead."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                session = int((entry / "stat").read_text().rpartition(")")[2].split()[3])
            except OSError:
                continue
            if session in pids and alive(int(entry.name)):
                found.append(int(entry.name))
    return found


@pytest.mark.slow
def test_up_serves_mends_itself_and_stops_in_order(up: Up) -> None:
    """With a queue, and so with a bridge. `[topics]` was not followed, and it was up while the bridge was not."""
    up.config.write_text(
        '[topics]\npartitions = 3\npools = ["gpu"]\n'
        + CONFIG
        + '[[queues]]\ntopic = "jobs"\nresult_topic = "answers"\n'
    )
    up.start()
    wait_until(lambda: up.says("Penstock is up"), 120, lambda: up.log.read_text())
    assert all(part["readiness"]["status"] == "ready" for part in up.status()["parts"]), up.status()
    assert "parts  broker, worker, gateway, bridge, webhooks, summarizer: ready" in up.log.read_text()
    wait_until(up.opened.exists, 10, "--open opens the console")
    assert up.opened.read_text() == f"http://127.0.0.1:{up.port}\n"
    assert up.ask()["status"] == "completed"
    pids = up.pids()
    assert set(pids) == {"broker", "worker", "gateway", "bridge", "webhooks", "summarizer"}
    serve_queue(up)
    secret = up.data / "webhook-secret"
    assert secret.stat().st_mode & 0o777 == 0o600
    assert f"signed by the secret in {secret}" in up.log.read_text()
    assert secret.read_text().strip() not in up.logs() + up.log.read_text()

    second = up.command("up", *up.options())
    assert second.returncode == 1
    assert second.stderr.count("\n") == 1
    assert "already runs" in second.stderr

    shown = up.command("demo", "kill", "--model", "slow", "--after", "2")
    assert shown.returncode == 0, shown.stderr
    assert f"kill -9 of the worker, pid {pids['worker']}: it is gone" in shown.stderr
    assert "nothing twice, nothing missing" in shown.stderr
    assert not alive(pids["worker"])
    wait_until(lambda: up.says("the worker is started again (restart 1)"), 30, lambda: up.log.read_text())
    assert up.ask()["status"] == "completed"
    wait_until(lambda: up.status()["ready"], 60, lambda: up.status())
    pids = up.pids()

    assert up.process is not None
    up.process.send_signal(signal.SIGTERM)
    assert up.process.wait(90) == 0
    text = up.log.read_text()
    order = [text.index(f"stopping the {name}") for name in ORDER]
    assert order == sorted(order)
    assert "was killed" not in text, f"{text}\n{up.logs()}"
    wait_until(lambda: not members(list(pids.values())), 10, lambda: members(list(pids.values())))
    assert not port_in_use(up.port)
    assert not port_in_use(up.kafka_port)


def serve_queue(up: Up) -> None:
    """The topics were created with the others, as the configuration says."""
    kafka = f"127.0.0.1:{up.kafka_port}"
    counts = partition_counts(KafkaSettings(bootstrap_servers=kafka))
    wanted = ("jobs", "answers", "inference.request.high", "inference.request.high.gpu")
    assert [counts.get(topic) for topic in wanted] == [3, 3, 3, 3]
    producer = Producer({"bootstrap.servers": kafka})
    producer.produce("jobs", json.dumps({"id": "1", "payload": {"prompt": "hello"}}).encode())
    producer.flush(20)
    settings = KafkaSettings(bootstrap_servers=kafka)
    (answer,) = wait_until(lambda: read_to_end(settings, "answers"), 60, up.logs)
    assert json.loads(answer.value or b"")["payload"]["object"] == "text_completion"


@pytest.mark.slow
def test_detached_and_killed_nothing_outlives_it(up: Up) -> None:
    started = up.command("up", "--detach", *up.options())
    assert started.returncode == 0, started.stderr
    assert "Penstock is up" in started.stderr
    state = wait_until(lambda: found if (found := up.status())["ready"] else None, 30, up.status)
    pids = list(up.pids().values())
    assert "broker" in up.command("logs", "-n", "1").stdout

    os.kill(state["pid"], signal.SIGKILL)
    wait_until(lambda: not members(pids), 20, lambda: members(pids))
    assert up.command("status").returncode == 3

    # What was there is there again but for a model that left the configuration, and `down` ends it.
    up.config.write_text(CONFIG.partition('\n[[models]]\nid = "slow"')[0])
    again = up.command("up", "--detach", *up.options())
    assert (again.returncode, "models of an earlier start are not served: slow\n" in again.stderr) == (0, True)
    assert up.ask()["status"] == "completed"
    assert up.status()["ready"], up.status()
    pids = list(up.pids().values())
    down = up.command("down")
    assert (down.returncode, down.stdout) == (0, "Penstock has stopped\n")
    assert members(pids) == []


@pytest.mark.thorough
@pytest.mark.slow
def test_a_model_that_cannot_be_loaded_is_told_and_takes_nothing_along(up: Up) -> None:
    """`up --detach` said that it was up, and ended with 0."""
    embedder = '[[models]]\nid = "e"\nsource = "noop"\nengine = "noop"\ntasks = ["embedding"]\n'
    up.config.write_text(f'[worker]\ngroup_id = "up-test"\n{embedder}')
    port = free_port()
    started = up.command("up", "--detach", "--model", "no/such-model", "--worker-port", str(port), *up.options())
    last = started.stderr.splitlines()[-1]
    assert (started.returncode, last.startswith("penstock: such-model could not be loaded")) == (1, True), (
        started.stderr + up.logs()
    )
    assert "no/such-model" in last
    assert f"penstock down --data-dir {up.data}" in last
    try:
        assert httpx.get(f"http://127.0.0.1:{port}/readyz", trust_env=False).json()["models"]["such-model"] == "failed"
        submitted = subprocess.run(
            [sys.executable, "-m", "penstock.cli.main", "submit", "embed", "-", "--url", f"http://127.0.0.1:{up.port}"],
            input="a text\n", capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert submitted.returncode == 0, submitted.stderr
        assert isinstance(json.loads(submitted.stdout)[0], float)
    finally:
        assert up.command("down").returncode == 0


def test_a_broken_config_is_one_line_that_names_the_field(up: Up) -> None:
    up.config.write_text(CONFIG + "\n[topics]\npartitions = -1\n")
    done = up.command("up", *up.options())
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "topics.partitions" in done.stderr
    assert str(up.config) in done.stderr


def test_no_kafka_at_the_named_address_is_unreachable(up: Up) -> None:
    done = up.command("up", *up.options(), "--bootstrap-servers", f"127.0.0.1:{free_port()}")
    assert done.returncode == 3
    assert "no Kafka answers at" in done.stderr.splitlines()[-1]
