"""Replaces all parts of a system one after another, under load, and says what that cost its clients.

Three gateways behind nginx, two workers of the common pool, one of another pool, a bridge, a sender of webhooks and a
summarizer. A further gateway of this release is the schema registry of all, as docs/runbook.md has it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

from kit.http_server import Answer, Call, serving_http
from kit.nginx import documented, running_nginx, without_tls
from older.release import python_path
from penstock.cli.paths import free_port
from support import create_topics, wait_until
from system import NOOP, Process, System
from update_clients import WORDS, Clients, Load, Seen, producing

TEXT = {**NOOP, "options": {"tokens": WORDS, "delay_ms": 50, "slots": 64}}
CHAT = {**TEXT, "id": "chat", "aliases": ["talker"]}
ECHO = {**NOOP, "id": "echo", "options": {"echo": True, "delay_ms": 5, "slots": 16}}
SUM = {**ECHO, "id": "sum", "tasks": ["text_generation", "summarization"]}
SIDE = {**TEXT, "id": "side", "pool": "side"}
LEAVING = {**TEXT, "id": "leaving"}
ADDED = {**TEXT, "id": "added"}
LATE = {**TEXT, "id": "late", "pool": "late"}

POOLS = {"w3": "side", "w4": "late"}
WORKER = {"session_timeout_s": 6, "heartbeat_s": 1, "state_interval_s": 0.5, "drain_s": 1}
TERM, KILL = "SIGTERM", "SIGKILL"
GATEWAYS = ("g1", "g2", "g3")
WORKERS = ("w1", "w2", "w3")
BESIDE = ("b1", "h1", "s1")


@dataclass(frozen=True)
class Step:
    name: str
    killed: str | None
    """The kind of process that got SIGKILL."""
    begin: float
    end: float


class Drill:
    """Runs the parts of a system with its clients, and replaces them."""

    def __init__(self, system: System, stack: ExitStack) -> None:
        self.system, self.seen, self.steps = system, Seen(), list[Step]()
        self.called: list[str] = []
        """Requests that the receiver of webhooks was called for."""
        self.asked: list[str] = []
        """Messages that were put on the queue."""
        self.queue = f"{system.prefix}queue"
        self._ports = {name: free_port() for name in GATEWAYS}
        self._parts: dict[str, Process] = {}
        self._producer = Producer({"bootstrap.servers": system.bootstrap})
        receiver = stack.enter_context(serving_http(self._called))
        self._configure(receiver.server_port)
        self._registry = system.gateway("registry").wait_ready()
        proxy = free_port()
        text = without_tls(documented(proxy, [*self._ports.values()]))
        stack.enter_context(running_nginx(system.folder, text))
        self.clients = Clients(f"http://127.0.0.1:{proxy}", self.seen, receiver.url)

    def _configure(self, receiver: int) -> None:
        system, results = self.system, f"{self.queue}-results"
        system.models, system.worker_options = (CHAT, ECHO, SUM, SIDE, LEAVING), WORKER
        system.webhook_options = {
            "secret": "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw",
            "internal_hosts": [f"127.0.0.1:{receiver}"],
            "first_retry_s": 0.2,
        }
        system.queues = [{"topic": self.queue, "tenant": "team", "result_topic": results}]
        create_topics(system.bootstrap, system.prefix, pool="side")
        topics = [NewTopic(topic, num_partitions=1) for topic in (self.queue, results)]
        admin = AdminClient({"bootstrap.servers": system.bootstrap})
        for made in admin.create_topics(topics).values():
            made.result(20)

    def _called(self, call: Call) -> Answer:
        self.called.append(call.json["data"]["request_id"])
        return 204, b""

    # -- parts

    def start(self, *names: str) -> None:
        """Start these parts at once, and wait until they are ready."""
        system = self.system
        begin = {"w": system.worker, "b": system.bridge, "h": system.webhooks, "s": system.summarizer}
        env = {"PENSTOCK_SCHEMA_REGISTRY__URL": f"{self._registry.url}/registry"}
        for name in names:
            if name in self._ports:
                self._parts[name] = system.gateway(name, port=self._ports[name], env=env)
            else:
                pool = {"PENSTOCK_WORKER__POOL": POOLS[name]} if name in POOLS else {}
                self._parts[name] = begin[name[0]](name, env={**env, **pool})
        for name in names:
            self._parts[name].wait_ready()

    def end(self, name: str, how: str) -> None:
        """By its pid; it has ended afterwards."""
        part = self._parts.pop(name)
        if how == KILL:
            part.kill9()
        else:
            assert part.stop() == 0, part.tail()

    def replace(self, ways: Mapping[str, str]) -> None:
        """One part after another; the next one when all clients have had answers again."""
        for name, how in ways.items():
            with self.step(f"{name} {how}", killed=name[0] if how == KILL else None):
                self.end(name, how)
                self.start(name)

    def release(self, *, older: bool) -> None:
        """Which release the parts that start from here on run."""
        self.system.python_path = python_path() if older else ""

    # -- load

    @contextmanager
    def loaded(self) -> Generator[None]:
        clients = self.clients
        avro = producing(self.system.kafka, clients.model)
        self.load = Load([*clients.kinds, clients.chat, avro, self._queued])
        try:
            self.calls_are_answered()
            yield
        finally:
            self.load.end()

    def _queued(self, number: int) -> None:
        """Another system's message, as the bridge merges it; whether it was answered is looked at in the end."""
        self.asked.append(f"m{number}")
        body = {"id": self.asked[-1], "deadline": str(int(time.time()) + 600), "payload": {"prompt": "go"}}
        self._producer.produce(self.queue, json.dumps(body))
        assert self._producer.flush(20) == 0
        time.sleep(0.3)

    def calls_are_answered(self) -> None:
        """Each client has another answer: no call from before is open."""
        before, load = self.load.done.copy(), self.load

        def all_again() -> bool:
            assert not load.ended, f"{load.ended}\n{self.seen.faults}\n{self.system.logs(15)}"
            return all(load.done[client] > count for client, count in before.items())

        wait_until(all_again, 90, lambda: f"{before}\n{load.done}\n{self.seen.faults}\n{self.system.logs(15)}")

    @contextmanager
    def step(self, name: str, killed: str | None = None) -> Generator[None]:
        begin = time.monotonic()
        yield
        self.calls_are_answered()
        self.steps.append(Step(name, killed, begin, time.monotonic()))
