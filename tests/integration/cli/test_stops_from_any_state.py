"""SIGTERM ends each process within its bound in whatever state it is, and its log says what it waited for."""

from __future__ import annotations

import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import NewTopic, ResourceType

from kit.rights import Rights, guarded_broker
from penstock.cli.embedded_kafka import EmbeddedKafka
from penstock.cli.paths import free_port
from penstock.common.stop_bound import END_S
from support import alive, wait_until
from system import Process, System, running

DRAIN_S = 2
BOUND_S = DRAIN_S + 35
SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLasw"
UNKNOWN_SCHEMA = b"\0\0\0\0\x4d{}"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedKafka]:
    with guarded_broker(tmp_path_factory.mktemp("guarded")) as broker:
        yield broker


HELD_MEMBER = """
import signal, sys
from confluent_kafka import Consumer

bootstrap, group, strategy, topic = sys.argv[1:]
member = Consumer({
    "bootstrap.servers": bootstrap, "group.id": group, "partition.assignment.strategy": strategy,
    "max.poll.interval.ms": 600_000, "session.timeout.ms": 600_000,
    "group.instance.id": "held",  # its end does not take it out of the group
})
assigned = []
member.subscribe([topic], on_assign=lambda _, partitions: assigned.append(partitions))
while not assigned:
    member.poll(1)
print("assigned", flush=True)
signal.pause()
"""
"""A process of its own, which is killed: to close a member in a rebalance can block in librdkafka, and then the whole
interpreter stands still."""


class Silent:
    """A server that takes connections and never answers."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=100)
        self.address = f"127.0.0.1:{self._socket.getsockname()[1]}"

    @property
    def is_asked(self) -> bool:
        return bool(select.select([self._socket], [], [], 0)[0])

    def close(self) -> None:
        self._socket.close()


@dataclass
class World:
    """One system, and what its processes are to wait for."""

    system: System
    silent: Silent
    stack: ExitStack
    rights: Rights

    def hold_group(self, group: str, topic: str, strategy: str) -> None:
        """A member that never answers the rebalance that the next one begins."""
        arguments = [sys.executable, "-c", HELD_MEMBER, self.system.bootstrap, group, strategy, topic]
        member = self.stack.enter_context(subprocess.Popen(arguments, stdout=subprocess.PIPE))
        self.stack.callback(member.kill)
        assert member.stdout is not None
        assert member.stdout.readline() == b"assigned\n"


Prepare = Callable[[World, str], Mapping[str, str]]
"""Brings about a state for a process; returns environment variables of the process."""


def absent(world: World, name: str) -> Mapping[str, str]:
    return {"PENSTOCK_KAFKA__BOOTSTRAP_SERVERS": f"127.0.0.1:{free_port()}"}


def deaf(world: World, name: str) -> Mapping[str, str]:
    return {"PENSTOCK_KAFKA__BOOTSTRAP_SERVERS": world.silent.address}


def no_right(world: World, name: str) -> Mapping[str, str]:
    if name in GROUPS:
        world.rights.refuse(ResourceType.GROUP, f"{world.system.prefix}{GROUPS[name]}")
    else:
        world.rights.refuse(ResourceType.TOPIC, world.system.names.result)
    return {}


def rebalancing(world: World, name: str) -> Mapping[str, str]:
    topic, strategy = MEMBERS[name]
    world.hold_group(f"{world.system.prefix}{GROUPS[name]}", topic.replace("PREFIX", world.system.prefix), strategy)
    return {}


def no_registry(world: World, name: str) -> Mapping[str, str]:
    return {"PENSTOCK_SCHEMA_REGISTRY__URL": f"http://{world.silent.address}"}


def restoring(world: World, name: str) -> Mapping[str, str]:
    """What it reads first holds a record whose schema only a registry has that is away."""
    names = world.system.names
    producer = Producer({"bootstrap.servers": world.system.bootstrap})
    for topic in (names.control, names.result, names.conversation_facts):
        producer.produce(topic, UNKNOWN_SCHEMA, b"key")
    producer.flush(30)
    return {"PENSTOCK_SCHEMA_REGISTRY__URL": f"http://127.0.0.1:{free_port()}"}


def no_store(world: World, name: str) -> Mapping[str, str]:
    return {
        "PENSTOCK_ARTIFACTS__LOCATION": "s3://bucket/x",
        "PENSTOCK_ARTIFACTS__OPTIONS": f'{{"aws_endpoint": "http://{world.silent.address}", "allow_http": "true"}}',
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "here",
    }


# Thirty-three systems on a broker of their own: in `make test-all` only.
pytestmark = pytest.mark.thorough

GROUPS = {"worker": "worker", "bridge": "queues", "webhooks": "webhooks", "summarizer": "summarizer"}
MEMBERS = {
    "worker": ("PREFIXinference.request.high", "range"),
    "bridge": ("PREFIXjobs", "cooperative-sticky"),
    "webhooks": ("PREFIXinference.result", "cooperative-sticky"),
}
BESIDE = ("bridge", "webhooks", "summarizer")
COMMANDS = ("worker", "gateway", *BESIDE)
NOTHING = "nothing"
CASES: list[tuple[Prepare, str, str]] = [
    *((absent, command, "127.0.0.1:") for command in COMMANDS),
    *((deaf, command, "127.0.0.1:") for command in COMMANDS),
    *((no_right, command, f"needs READ on the group PREFIX{GROUPS[command]}") for command in GROUPS),
    (no_right, "gateway", "PREFIXinference.result"),
    *((rebalancing, command, f"not a member of the group PREFIX{GROUPS[command]} yet") for command in MEMBERS),
    *((no_registry, command, "schema registry at http://127.0.0.1:") for command in COMMANDS),
    (restoring, "worker", "inference.control to be read to its end"),
    (restoring, "gateway", "registry"),
    (restoring, "webhooks", "registry"),
    (restoring, "summarizer", "registry"),
    *((no_store, command, NOTHING) for command in ("worker", "gateway", "bridge")),
]


def readiness(url: str) -> str:
    """What the process says it waits for; empty while it does not answer."""
    try:
        answer = httpx.get(f"{url}/readyz", timeout=2)
    except httpx.HTTPError:
        return ""
    if answer.status_code == 200:
        return NOTHING
    body = answer.json()
    return "; ".join(body["reasons"]) if "reasons" in body else str(body["reason"])


@pytest.fixture
def world(guarded: EmbeddedKafka, kafka_prefix: str, tmp_path: Path) -> Iterator[World]:
    system = System(
        guarded.bootstrap_servers,
        kafka_prefix,
        tmp_path / "system",
        worker_options={"drain_s": DRAIN_S},
        gateway_options={"drain_s": DRAIN_S},
        queues=[{"topic": f"{kafka_prefix}jobs"}],
        webhook_options={"secret": SECRET},
    )
    with ExitStack() as stack, running(system):
        stack.callback((silent := Silent()).close)
        rights = Rights(system.bootstrap)
        jobs = f"{kafka_prefix}jobs"
        rights.admin.create_topics([NewTopic(jobs, 1)])[jobs].result(30)
        yield World(system, silent, stack, rights)


@pytest.mark.slow
@pytest.mark.parametrize(("state", "command", "reason"), CASES)
def test_sigterm_ends_it_and_its_log_and_readyz_say_what_it_waited_for(
    world: World, state: Prepare, command: str, reason: str
) -> None:
    reason = reason.replace("PREFIX", world.system.prefix)
    process: Process = getattr(world.system, command)(env=state(world, command))
    log = process.log

    def is_there() -> bool:
        if state is no_registry and command in BESIDE:  # their ports are not open yet
            return world.silent.is_asked
        return reason in readiness(process.url)

    wait_until(is_there, 60, lambda: (readiness(process.url), log.read_text()))
    process.popen.send_signal(signal.SIGTERM)
    assert process.popen.wait(BOUND_S + END_S) == 0, log.read_text()
    text = log.read_text()
    (said,) = [line for line in text.splitlines() if f"{command}.stopping waits_for=" in line]
    assert reason in said
    assert "stop_hangs" not in text


@pytest.mark.slow
def test_sigterm_ends_a_supervisor_whose_worker_lacks_a_right(world: World, tmp_path: Path) -> None:
    world.rights.refuse(ResourceType.GROUP, f"{world.system.prefix}worker")
    log, data = tmp_path / "up.log", tmp_path / "data"
    arguments = ["--data-dir", str(data), "--config", str(world.system.config()), "--port", str(free_port())]
    arguments += ["--bootstrap-servers", world.system.bootstrap]
    with log.open("wb") as out:
        up = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "penstock.cli.main",
                "up",
                *arguments,
                "--bootstrap-servers",
                world.system.bootstrap,
            ],
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        waits = f"needs READ on the group {world.system.prefix}worker"
        wait_until(lambda: waits in logs_of(data), 120, lambda: log.read_text() + logs_of(data))
        parts = psutil.Process(up.pid).children()
        up.send_signal(signal.SIGTERM)
        up.wait(2 * BOUND_S + END_S)
    finally:
        up.kill()  # its parts die with it
        up.wait(20)
    assert up.returncode == 0, log.read_text()
    last_step = "the last step of the start was: "  # the gateway may be ready before the worker asks for its right
    told = (last_step + "starting the gateway and the worker", last_step + "gateway: ready")
    assert any(text in log.read_text() for text in told), log.read_text()
    assert "did not stop within" not in log.read_text()
    assert not any(alive(part) for part in parts)


def logs_of(data: Path) -> str:
    return "".join(one.read_text() for one in (data / "logs").glob("*.log"))


@pytest.mark.slow
def test_a_worker_that_is_given_the_right_it_lacked_joins(world: World) -> None:
    group = f"{world.system.prefix}worker"
    world.rights.refuse(ResourceType.GROUP, group)
    worker = world.system.worker()
    wait_until(lambda: f"needs READ on the group {group}" in readiness(worker.url), 60, worker.tail)
    world.rights.allow(ResourceType.GROUP, group)
    worker.wait_ready()
    assert worker.stop() == 0, worker.tail()
