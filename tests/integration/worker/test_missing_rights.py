"""A right that Kafka refuses is named on /readyz and in the log, and work goes on by itself when it is granted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from confluent_kafka.admin import ResourceType

from kit.rights import Rights, guarded_broker
from penstock.cli.live_checks import right_checks
from penstock.cli.rights import Installation
from support import wait_until
from system import Process, System, running


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with guarded_broker(tmp_path_factory.mktemp("guarded")) as broker:
        yield broker.bootstrap_servers


@pytest.fixture
def rights(guarded: str) -> Rights:
    return Rights(guarded)


@pytest.fixture
def system(guarded: str, kafka_prefix: str, tmp_path: Path) -> Iterator[System]:
    made = System(guarded, kafka_prefix, tmp_path / "system")
    with running(made):
        yield made


def readyz(process: Process) -> dict[str, Any]:
    return httpx.get(f"{process.url}/readyz", timeout=10).json()


def reason(process: Process) -> str:
    """Empty while its port is not open yet."""
    try:
        return str(readyz(process))
    except httpx.HTTPError:
        return ""


def submit(gateway: Process, conversation_id: str | None = None) -> httpx.Response:
    body: dict[str, Any] = {"task": "text_generation", "payload": {"prompt": "a b"}, "stream": True}
    if conversation_id is not None:
        body |= {"conversation_id": conversation_id, "payload": {"messages": [{"role": "user", "content": "a b"}]}}
    return httpx.post(f"{gateway.url}/v1/requests", json=body, timeout=30)


@pytest.mark.slow
@pytest.mark.parametrize("topic", ["result", "status", "worker", "conversation"])
def test_a_worker_names_the_topic_that_it_may_not_write_to_and_loses_nothing(
    system: System, rights: Rights, topic: str
) -> None:
    worker, gateway = system.worker(), system.gateway()
    worker.wait_ready()
    gateway.wait_ready()
    conversation_id = "c" if topic == "conversation" else None
    name = system.names.conversation("default", "c") if conversation_id else getattr(system.names, topic)
    first = submit(gateway, conversation_id).json()["request_id"]
    assert httpx.get(f"{gateway.url}/v1/requests/{first}?wait=30", timeout=60).json()["status"] == "completed"
    rights.refuse(ResourceType.TOPIC, name, "WRITE")
    sent = [submit(gateway, conversation_id).json()["request_id"] for _ in range(20)]
    wait_until(lambda: f"needs WRITE on the topic {name}" in str(readyz(worker)), 60, worker.tail)
    lines = [line for line in worker.log.read_text().splitlines() if " ERROR " in line or '"error"' in line.lower()]
    assert len([line for line in lines if f"topic={name} " in line]) == 1, worker.tail()
    rights.allow(ResourceType.TOPIC, name)
    for request_id in sent:
        shown = httpx.get(f"{gateway.url}/v1/requests/{request_id}", params={"wait": 30}, timeout=60).json()
        assert shown["status"] == "completed", (shown, worker.tail())
    wait_until(lambda: httpx.get(f"{worker.url}/readyz").status_code == 200, 60, worker.tail)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "topic"),
    [("worker", "request"), ("worker", "control"), ("gateway", "status"), ("summarizer", "conversation_facts")],
)
@pytest.mark.parametrize("when", ["before its start", "while it runs"])
def test_a_topic_that_may_be_described_but_not_read_is_named(
    system: System, rights: Rights, command: str, topic: str, when: str
) -> None:
    names = system.names
    name = names.request("text_generation", 5) if topic == "request" else getattr(names, topic)
    start: Any = getattr(system, command)
    process: Process | None = None
    if when == "while it runs":
        process = start()
        process.wait_ready()
    rights.refuse(ResourceType.TOPIC, name, "READ")
    process = process or start()
    wait_until(lambda: f"needs READ on the topic {name}" in reason(process), 60, process.tail)
    assert f"needs READ on the topic {name}" in process.log.read_text()
    rights.allow(ResourceType.TOPIC, name)
    wait_until(lambda: httpx.get(f"{process.url}/readyz").status_code == 200, 60, process.tail)


@pytest.mark.slow
def test_a_gateway_names_the_topic_that_it_may_not_write_to(system: System, rights: Rights) -> None:
    worker, gateway = system.worker(), system.gateway()
    worker.wait_ready()
    gateway.wait_ready()
    name = system.names.request("text_generation", 5)
    installation = Installation(names=system.names, groups={"worker": system.group})
    assert [one.state for one in right_checks(system.kafka, installation)] == ["ok"]
    rights.refuse(ResourceType.TOPIC, name, "WRITE")
    answers: list[httpx.Response] = []

    def is_refused() -> bool:
        answers.append(submit(gateway))
        return answers[-1].status_code != 202

    wait_until(is_refused, 30, gateway.tail)
    refused = answers[-1]
    error = refused.json()["error"]
    assert (refused.status_code, error["code"], error["retryable"]) == (503, "broker_unavailable", True)
    assert f"needs WRITE on the topic {name}" in error["message"]
    assert [(one.state, one.detail) for one in right_checks(system.kafka, installation)] == [
        ("warn", f"no WRITE for gateway and worker on topics {system.prefix}inference.request.*")
    ]
    wait_until(lambda: readyz(gateway)["status"] == "degraded", 30, gateway.tail)
    assert f"needs WRITE on the topic {name}" in readyz(gateway)["reason"]
    rights.allow(ResourceType.TOPIC, name)
    wait_until(lambda: readyz(gateway)["status"] == "ready", 60, gateway.tail)
    assert submit(gateway).status_code == 202
