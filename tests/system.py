"""A whole Penstock for tests: real worker and gateway processes on the session's broker, each killable by itself."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import psutil
from confluent_kafka import Message
from prometheus_client.parser import text_string_to_metric_families

from broker_reads import BrokerReads
from kit.fork_server import starts_alike
from kit.zygote import Forked, zygote
from penstock.cli import children
from penstock.cli.paths import free_port
from penstock.common.engine_kinds import KINDS
from penstock.common.settings import KafkaSettings
from penstock.schemas.codec import default_codec
from penstock.schemas.fold import ResultFold
from penstock.schemas.records import DeadLetter, ResultEvent, WorkerState
from penstock.schemas.topics import TopicNames, is_of_gateway
from support import alive, create_topics, wait_until

if TYPE_CHECKING:
    from penstock.cli.embedded_kafka import EmbeddedKafka

NOOP = {"id": "noop", "source": "noop", "engine": "noop", "tasks": ["text_generation"], "options": {"tokens": 4}}


@dataclass
class Process:
    """One child with its log; ended by its own pid and never by name."""

    name: str
    popen: Forked | subprocess.Popen[bytes]
    log: Path
    port: int
    command: str

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def tail(self, lines: int = 40) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def alive(self) -> bool:
        return self.popen.poll() is None

    def ready(self) -> bool:
        if not self.alive():
            raise AssertionError(f"{self.name} exited with {self.popen.returncode}:\n{self.tail()}")
        try:
            return httpx.get(self.url + "/readyz", timeout=2).status_code == 200
        except httpx.HTTPError:
            return False

    def wait_ready(self, deadline_s: float = 90) -> Process:
        wait_until(self.ready, deadline_s, lambda: f"{self.name} is not ready:\n{self.tail()}")
        assert self.port in self._listens_on(), f"another process answers on the port {self.port} of {self.name}"
        return self

    def _listens_on(self) -> set[int]:
        connections = psutil.Process(self.popen.pid).net_connections("tcp")
        return {one.laddr.port for one in connections if one.status == psutil.CONN_LISTEN}

    def submit(self, prompt: str = "go", **fields: Any) -> str:
        """Have this gateway accept a request, of text unless `fields` say something else. Returns its id."""
        body = {"task": "text_generation", "payload": {"prompt": prompt}, **fields}
        answer = httpx.post(f"{self.url}/v1/requests", json=body, timeout=30)
        assert answer.status_code == 202, answer.text
        return str(answer.json()["request_id"])

    def request(self, request_id: str, wait: int = 0) -> dict[str, Any]:
        """The request as this gateway shows it when it has ended, or after `wait` seconds."""
        where = f"{self.url}/v1/requests/{request_id}"
        return httpx.get(where, params={"wait": wait}, timeout=wait + 30).json()

    def kill9(self) -> None:
        """In the middle of its work: it has not ended before, and it is gone afterwards."""
        self.popen.send_signal(signal.SIGKILL)
        assert self.popen.wait(20) == -signal.SIGKILL, f"{self.name} had ended before it was killed:\n{self.tail()}"
        assert not alive(self.popen.pid)

    def metric(self, name: str, **labels: str) -> float:
        """The sum of its samples that have these labels."""
        families = text_string_to_metric_families(httpx.get(f"{self.url}/metrics", timeout=10).text)
        samples = [sample for family in families for sample in family.samples if sample.name == name]
        return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())

    def assigned(self) -> int:
        """How many partitions a worker has."""
        return int(httpx.get(self.url + "/healthz", timeout=60).json()["assigned"])

    def wait_dead(self, deadline_s: float = 60) -> int:
        wait_until(lambda: not self.alive(), deadline_s, lambda: f"{self.name} did not end:\n{self.tail()}")
        assert self.popen.returncode is not None
        return self.popen.returncode

    def stop(self, deadline_s: float = 70) -> int:
        if self.alive():
            self.popen.send_signal(signal.SIGTERM)
        try:
            return self.popen.wait(deadline_s)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait(10)
            raise AssertionError(f"{self.name} ignored SIGTERM:\n{self.tail()}") from None


def toml_value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(key)} = {toml_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    return json.dumps(value)


@dataclass
class System:
    """Topics under a prefix of their own and any number of workers and gateways on them."""

    bootstrap: str
    prefix: str
    folder: Path
    models: Sequence[Mapping[str, Any]] = (NOOP,)
    devices: Sequence[Mapping[str, Any]] = ()
    worker_options: Mapping[str, Any] = field(default_factory=dict)
    gateway_options: Mapping[str, Any] = field(default_factory=dict)
    auth: Mapping[str, Any] = field(default_factory=dict)
    queues: Sequence[Mapping[str, Any]] = ()
    queue_merge: Mapping[str, Any] = field(default_factory=dict)
    queue_policy: str = "weighted"
    webhook_options: Mapping[str, Any] = field(default_factory=dict)
    summarizer_options: Mapping[str, Any] = field(default_factory=dict)
    sharded: bool = False
    """Conversations share a topic."""
    kafka_options: Mapping[str, Any] = field(default_factory=dict)
    """How processes reach the broker, where that is not as the tests do."""
    keys: dict[str, str] = field(default_factory=dict)
    """Of tenants, by tenant."""
    processes: list[Process] = field(default_factory=list)
    forked: bool = True
    """False: processes are started by a command line of their own, which they can execute again."""
    python_path: str = ""
    """Of an older release, which processes that are started from then on run."""

    @cached_property
    def reads(self) -> BrokerReads:
        return BrokerReads(self.bootstrap)

    @property
    def names(self) -> TopicNames:
        return TopicNames(prefix=self.prefix)

    @property
    def group(self) -> str:
        return f"{self.prefix}worker"

    @property
    def kafka(self) -> KafkaSettings:
        return KafkaSettings(bootstrap_servers=self.bootstrap, topic_prefix=self.prefix)

    def process(self, name: str) -> Process:
        """The process started last of those whose names begin so: "g1", or "g" for any gateway."""
        return [one for one in self.processes if one.name.startswith(name)][-1]

    def start_all(self, names: Sequence[str]) -> System:
        """Start the processes of these names at once, and wait until all are ready."""
        start = {"w": self.worker, "g": self.gateway, "b": self.bridge, "h": self.webhooks, "s": self.summarizer}
        for process in [start[name[0]](name) for name in names]:
            process.wait_ready(180)
        return self

    def create_topics(self) -> System:
        create_topics(self.bootstrap, self.prefix, sharded=self.sharded)
        return self

    def config(self) -> Path:
        sections: dict[str, Mapping[str, Any]] = {
            "kafka": {"bootstrap_servers": self.bootstrap, "topic_prefix": self.prefix, **self.kafka_options},
            # The least that Kafka allows: the work of each worker that is killed waits for so long.
            "worker": {"group_id": self.group, "session_timeout_s": 6, **self.worker_options},
            "gateway": {"host": "127.0.0.1", **self.gateway_options},
            "auth": self.auth,
            "queue_merge": {"group_id": f"{self.prefix}queues", **self.queue_merge},
            "webhooks": {"group_id": f"{self.prefix}webhooks", **self.webhook_options},
            "summarizer": {"group_id": f"{self.prefix}summarizer", "look_s": 0.2, **self.summarizer_options},
        }
        lines = [f"queue_policy = {toml_value(self.queue_policy)}"]
        for name, values in sections.items():
            lines += [
                f"[{name}]",
                *(f"{key} = {toml_value(value)}" for key, value in values.items() if value is not None),
                "",
            ]
        for name, tables in (("devices", self.devices), ("models", self.models), ("queues", self.queues)):
            for table in tables:
                lines += [f"[[{name}]]", *(f"{key} = {toml_value(value)}" for key, value in table.items()), ""]
        path = self.folder / "penstock.toml"
        written = path.with_suffix(".new")
        written.write_text("\n".join(lines))
        return written.replace(path)  # at once: another process that starts may be reading it

    def start(self, command: str, name: str, port: int, env: Mapping[str, str]) -> Process:
        log = self.folder / f"{name}.log"
        whole = {**os.environ, "PENSTOCK_CONFIG": str(self.config()), "PYTHONUNBUFFERED": "1", **env}
        if self.forked:
            engines = command == "worker" and self._imports_torch() and starts_alike(whole)
            popen = zygote(engines=engines, path=self.python_path).start([command], whole, log)
        else:
            popen = children.spawn([sys.executable, "-m", "penstock.cli.main", command], log=log, env=whole)
        process = Process(name, popen, log, port, command)
        self.processes.append(process)
        return process

    def _imports_torch(self) -> bool:
        return any(KINDS[model["engine"]].backend is not None for model in self.models)

    def worker(self, name: str = "w1", *, faults: str = "", env: Mapping[str, str] | None = None) -> Process:
        port = free_port()
        extra = {
            "PENSTOCK_WORKER__HEALTH_PORT": str(port),
            "PENSTOCK_WORKER__DATA_DIR": str(self.folder / name),
            "PENSTOCK_WORKER__ARTIFACTS_DIR": str(self.folder / "artifacts"),
            **({"PENSTOCK_FAULTS": faults} if faults else {}),
            **(env or {}),
        }
        return self.start("worker", name, port, extra)

    def gateway(self, name: str = "g1", *, port: int | None = None, env: Mapping[str, str] | None = None) -> Process:
        port = port or free_port()
        extra = {
            "PENSTOCK_GATEWAY__PORT": str(port),
            "PENSTOCK_GATEWAY__VIEW_PATH": str(self.folder / f"{name}.sqlite"),
            "PENSTOCK_GATEWAY__ARTIFACTS_DIR": str(self.folder / "artifacts"),
            **(env or {}),
        }
        return self.start("gateway", name, port, extra)

    def bridge(self, name: str = "b1", *, port: int | None = None, env: Mapping[str, str] | None = None) -> Process:
        port = port or free_port()
        extra = {
            "PENSTOCK_BRIDGE__HEALTH_PORT": str(port),
            "PENSTOCK_BRIDGE__ARTIFACTS_DIR": str(self.folder / "artifacts"),
            **(env or {}),
        }
        return self.start("bridge", name, port, extra)

    def webhooks(self, name: str = "h1", *, env: Mapping[str, str] | None = None) -> Process:
        port = free_port()
        return self.start("webhooks", name, port, {"PENSTOCK_WEBHOOKS__HEALTH_PORT": str(port), **(env or {})})

    def summarizer(self, name: str = "s1", *, env: Mapping[str, str] | None = None) -> Process:
        port = free_port()
        extra = {
            "PENSTOCK_SUMMARIZER__HEALTH_PORT": str(port),
            "PENSTOCK_SUMMARIZER__DATA_DIR": str(self.folder / name),
            **(env or {}),
        }
        return self.start("summarizer", name, port, extra)

    def stop(self) -> None:
        for process in self.processes:
            if process.alive():
                process.popen.kill()
                process.popen.wait(10)

    def read(self, topic: str, deadline_s: float = 30) -> list[Message]:
        """All records of a topic, from its start to the end it has now, by a stock consumer."""
        return self.reads.records(topic, deadline_s)

    def results(self) -> list[ResultEvent]:
        codec = default_codec()
        ordered = sorted(self.read(self.names.result), key=lambda m: (m.partition() or 0, m.offset() or 0))
        return [codec.decode(message.value() or b"", ResultEvent) for message in ordered]

    def outcomes(self) -> dict[str, ResultEvent]:
        """What a reader sees: the fold of the result topic, one terminal event a request."""
        folds: dict[tuple[str, str], ResultFold] = {}
        for event in self.results():
            key = (event.tenant, event.request_id)
            folds.setdefault(key, ResultFold(request_id=event.request_id, tenant=event.tenant)).apply(event)
        return {key[1]: fold.terminal for key, fold in folds.items() if fold.terminal is not None}

    def worker_states(self) -> list[WorkerState]:
        """What its workers have reported, the newest last."""
        values = [one.value() for one in self.read(self.names.worker) if not is_of_gateway(one.key())]
        return [default_codec().decode(value, WorkerState) for value in values if value]

    def dead_letters(self) -> list[DeadLetter]:
        codec = default_codec()
        return [codec.decode(message.value() or b"", DeadLetter) for message in self.read(self.names.dlq)]

    def committed(self) -> dict[tuple[str, int], int]:
        """The offsets that the group has committed."""
        return self.reads.committed(self.group, self.names.request_topics())

    def ends(self, topics: Sequence[str]) -> dict[tuple[str, int], int]:
        return self.reads.ends(topics)

    def lag(self) -> int:
        committed = self.committed()
        return sum(end - committed.get(key, 0) for key, end in self.ends(self.names.request_topics()).items())

    def wait_drained(self, deadline_s: float = 90) -> None:
        def state() -> str:
            return f"lag {self.lag()}, committed {self.committed()}\n{self.logs(15)}"

        wait_until(lambda: self.lag() == 0, deadline_s, state)

    def logs(self, lines: int) -> str:
        """The ends of all processes' logs, and whether each is alive."""
        return "\n\n".join(f"--- {p.name} alive={p.alive()}\n{p.tail(lines)}" for p in self.processes)


@contextmanager
def running(system: System) -> Iterator[System]:
    system.folder.mkdir(parents=True, exist_ok=True)
    system.create_topics()
    RUNNING.append(system)
    try:
        yield system
    finally:
        RUNNING.remove(system)
        system.stop()
        system.reads.close()


RUNNING: list[System] = []
BROKERS: list[EmbeddedKafka] = []
"""Those whose logs are kept beside a test that fails; whoever starts one adds it."""


def eventually(condition: Callable[[], bool], deadline_s: float, describe: Callable[[], str]) -> None:
    wait_until(condition, deadline_s, describe)
