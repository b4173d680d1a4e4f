"""The system of one row: a broker that several rows share, and a worker, a gateway and a sender of webhooks of its own.

All are supervised as `penstock up` does it: what is killed is started again.
"""

from __future__ import annotations

import base64
import os
import threading
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
from confluent_kafka import Consumer, TopicPartition

from penstock.cli.config import to_toml
from penstock.cli.embedded_kafka import EmbeddedKafka
from penstock.cli.faults.targets import Target
from penstock.cli.local_system import EMBEDDED_PARTITIONS, look_at_broker, penstock_command
from penstock.cli.paths import free_port, silent
from penstock.cli.readiness import ask_process
from penstock.cli.supervisor import Backoff, Part, Supervisor, command_part
from penstock.cli.topics import create_topics
from penstock.common.admin_clients import admin_client
from penstock.common.configuration import ENV_CONFIG
from penstock.common.kafka_errors import client_logger
from penstock.common.settings import KafkaSettings

READY_S = 120.0
SESSION_S, HEARTBEAT_S = 6.0, 1.0
"""Of the worker's group: kafka's own lower limit for a session is 6 s."""


class Supervised:
    """Parts that a thread keeps alive."""

    def __init__(self) -> None:
        self.supervisor = Supervisor(silent)
        self._thread: threading.Thread | None = None

    def start(self, *parts: Part) -> None:
        """Start them side by side; return when all are ready. From then on they are kept alive.

        If that fails, all are stopped.
        """
        try:
            for part in parts:
                part.backoff = Backoff(steady_s=0.0)  # each kill is the first one
                self.supervisor.start(part)
            for part in parts:
                self.supervisor.wait_ready(part, READY_S)
            self._thread = threading.Thread(target=self.supervisor.run, daemon=True)
            self._thread.start()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        self.supervisor.stopping = True
        if self._thread is not None and self._thread.is_alive():
            self._thread.join()
        self.supervisor.kill()


class Broker(Supervised):
    """A real Kafka in a folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.kafka = EmbeddedKafka(folder, free_port())
        self.part = Part(
            name="broker",
            launch=self.kafka.launch,
            log=self.kafka.log,
            look=lambda pid: look_at_broker(pid, self.kafka),
            grace_s=10.0,
        )
        self.start(self.part)


class Site(Supervised):
    """Worker, gateway and webhooks on topics with a prefix of their own. `faults`: of the worker's first life."""

    def __init__(
        self, broker: Broker, folder: Path, prefix: str, *, models: list[dict[str, Any]], receiver: str, faults: str
    ) -> None:
        super().__init__()
        self.broker, self.folder = broker, folder
        self.kafka = KafkaSettings(bootstrap_servers=broker.kafka.bootstrap_servers, topic_prefix=prefix)
        self.group = f"{prefix}worker"
        self.artifacts = folder / "artifacts"
        self._ports = {name: free_port() for name in ("worker", "gateway", "webhooks")}
        self._faults = faults
        folder.mkdir(parents=True)
        self._environment = self._configured(models, receiver)
        create_topics(self.kafka, partitions=EMBEDDED_PARTITIONS, durability="replicas")
        self.parts = {name: self._part(name) for name in self._ports}
        self.start(*self.parts.values())

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self._ports[name]}"

    def target(self, name: str) -> Target:
        """The process of a part as it is now. Waits while it is being started."""
        part = self.broker.part if name == "broker" else self.parts[name]
        give_up = time.monotonic() + READY_S
        while part.process is None or not part.running:
            if time.monotonic() > give_up:
                raise TimeoutError(f"the {name} was not started again")
            time.sleep(0.02)
        return Target(part.process.pid)

    def asked(self, name: str, path: str) -> httpx.Response | None:
        """The answer of a part; None while it is away."""
        with suppress(httpx.HTTPError):
            return httpx.get(self.url(name) + path, timeout=5, trust_env=False)
        return None

    def metric(self, name: str) -> float | None:
        """A metric of the worker, over all its labels; None while it is away."""
        answer = self.asked("worker", "/metrics")
        if answer is None:
            return None
        lines = (line for line in answer.text.splitlines() if line.partition("{")[0].partition(" ")[0] == name)
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    def committed_and_lag(self) -> tuple[int, int]:
        """Of the request topics: records that the worker's group has committed, and those that it has not."""
        reader = Consumer(
            {**self.kafka.librdkafka(), "group.id": self.group, "enable.auto.commit": False}, logger=client_logger
        )
        try:
            known = reader.list_topics(timeout=20).topics
            places = [(topic, n) for topic in self.kafka.names.request_topics() for n in known[topic].partitions]
            found = reader.committed([TopicPartition(*place) for place in places], timeout=20)
            committed = sum(max(at.offset, 0) for at in found)
            ends = (reader.get_watermark_offsets(TopicPartition(*place), timeout=20)[1] for place in places)
            return committed, sum(ends) - committed
        finally:
            reader.close()

    def delete_topics(self) -> None:
        """So that the broker starts again as fast in the last row as in the first."""
        client = admin_client(self.kafka)
        names = [name for name in client.list_topics(timeout=10).topics if name.startswith(self.kafka.topic_prefix)]
        for deleted in client.delete_topics(names, operation_timeout=30).values():
            deleted.result(60)

    def _part(self, name: str) -> Part:
        url = self.url(name)
        armed = iter([{"PENSTOCK_FAULTS": self._faults}] if name == "worker" and self._faults else [])

        def env() -> Mapping[str, str]:
            return {**self._environment, **next(armed, {})}

        return command_part(
            name,
            penstock_command(name),
            log=self.folder / f"{name}.log",
            look=lambda pid: ask_process(pid, url),
            grace_s=30.0,
            env=env,
        )

    def _configured(self, models: list[dict[str, Any]], receiver: str) -> Mapping[str, str]:
        prefix, folder = self.kafka.topic_prefix, self.folder
        tables: dict[str, Any] = {
            "kafka": {"bootstrap_servers": self.kafka.bootstrap_servers, "topic_prefix": prefix},
            "artifacts": {"location": str(self.artifacts)},
            "worker": {
                "group_id": self.group,
                "data_dir": str(folder / "worker"),
                "health_port": self._ports["worker"],
                "session_timeout_s": SESSION_S,
                "heartbeat_s": HEARTBEAT_S,
                "state_interval_s": 1.0,
            },
            "gateway": {"port": self._ports["gateway"], "view_path": str(folder / "gateway" / "view.sqlite")},
            "webhooks": {
                "secret": "whsec_" + base64.b64encode(os.urandom(32)).decode(),
                "internal_hosts": [receiver],
                "group_id": f"{prefix}webhooks",
                "health_port": self._ports["webhooks"],
                "first_retry_s": 0.5,
            },
            "models": models,
        }
        (folder / "gateway").mkdir()
        path = folder / "penstock.toml"
        path.write_text(to_toml(tables))
        # Settings of whoever runs the table are not those of its systems.
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_") or name in _KEPT}
        return {**kept, ENV_CONFIG: str(path), "PYTHONUNBUFFERED": "1"}


_KEPT = frozenset({"PENSTOCK_CACHE"})


@contextmanager
def broker(folder: Path) -> Generator[Broker]:
    found = Broker(folder)
    try:
        yield found
    finally:
        found.stop()
