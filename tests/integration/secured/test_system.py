"""Each kind of process works on a secured broker: requests by HTTP and Avro, webhooks, summaries, queues, commands."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from kit.http_server import Answer, Call, serving_http
from kit.secured_kafka import SecuredKafka
from penstock.common.admin import ensure_topics
from penstock.common.reader import read_to_end
from penstock.common.settings import KafkaSettings
from penstock.common.transport import Transport
from penstock.producers import AsyncClient, Client
from penstock.schemas.records import ResultEvent
from penstock.schemas.topics import TopicSpec
from support import wait_until
from system import NOOP, System, running

TASKS = ["text_generation", "summarization"]
WAYS = [("sasltls", "SCRAM-SHA-512"), ("sasltls", "OAUTHBEARER"), ("mtls", None)]
SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
PROMPT = {"prompt": "go"}


@pytest.fixture(params=WAYS, ids=lambda way: way[1] or way[0])
def system(secured: SecuredKafka, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[System]:
    """All processes. Tokens are valid for seconds, so that each process needs several in this test."""
    listener, mechanism = request.param
    secured.tokens.lifetime_s = 6
    prefix = f"s{WAYS.index(request.param)}-"
    made = System(
        secured.bootstrap_servers,
        prefix,
        tmp_path / "system",
        models=[{**NOOP, "tasks": TASKS, "options": {"echo": True}}],
        kafka_options={
            "bootstrap_servers": secured.at(listener),
            "security": secured.security(listener, mechanism),
        },
        queues=[{"topic": f"{prefix}in", "result_topic": f"{prefix}out", "format": "penstock", "tenant": "default"}],
    )
    specs = [TopicSpec(name=prefix + name, partitions=1, replication=1) for name in ("in", "out")]
    ensure_topics(KafkaSettings(bootstrap_servers=secured.bootstrap_servers), specs)
    with running(made):
        yield made
    secured.tokens.lifetime_s = 60


def test_every_process_works(secured: SecuredKafka, system: System) -> None:
    called: list[str] = []

    def receive(call: Call) -> Answer:
        called.append(call.json["data"]["request_id"])
        return 204, b""

    kafka = KafkaSettings(
        bootstrap_servers=system.kafka_options["bootstrap_servers"],
        topic_prefix=system.prefix,
        security=system.kafka_options["security"],
    )
    with serving_http(receive) as server:
        system.webhook_options = {"secret": SECRET, "internal_hosts": [f"127.0.0.1:{server.server_port}"]}
        gateway = system.start_all(["w1", "g1", "h1", "s1", "b1"]).process("g")
        begun = dict(secured.tokens.issued)
        with httpx.Client(base_url=gateway.url, timeout=60) as client:
            asked = {"model": "noop", "messages": [{"role": "user", "content": "Hello?"}]}
            chat = client.post("/v1/chat/completions", json=asked)
            assert chat.status_code == 200, chat.text
            hooked = gateway.submit(callback_url=f"{server.url}/hook")
            client.post("/v1/conversations", json={"id": "c", "summarize": {"every_turns": 2, "model": "noop"}})
            for number in range(6):
                body = {"conversation_id": "c", "payload": {"messages": [{"role": "user", "content": f"{number}?"}]}}
                turn = client.post("/v1/requests?wait=60", json={"task": "text_generation", **body})
                assert turn.json()["status"] == "completed", turn.text

            with Client(kafka) as direct:
                assert direct.result(direct.submit(task="text_generation", payload=PROMPT), timeout=60).output_text
            assert asyncio.run(ask_async(kafka)).output_text
            transport = Transport(kafka)
            queued = {"task": "text_generation", "request_id": "queued", "payload": PROMPT}
            transport.send(f"{system.prefix}in", json.dumps(queued).encode())
            assert transport.close() == 0

            def summaries() -> list[object]:
                records = client.get("/v1/conversations/c/replay").json()["data"]
                return [one for one in records if one["message"] and one["message"]["direction"] == "summary"]

            wait_until(lambda: bool(summaries()), 90, lambda: f"no summary\n{system.logs(10)}")
        wait_until(lambda: hooked in called, 90, lambda: f"no webhook\n{system.logs(10)}")
        wait_until(
            lambda: any(b"queued" in (one.value or b"") for one in read_to_end(kafka, f"{system.prefix}out")),
            90,
            lambda: f"no answer on the queue\n{system.logs(10)}",
        )
        by_file = command(system, "topics", "list", "--json")
        assert system.names.result in by_file.stdout, by_file
        watched = command(system, "watch", hooked, "--url", gateway.url)
        assert watched.stdout.strip(), watched
        if "sasl.oauthbearer.client.id" in kafka.security:
            refreshed(secured, system, begun["penstock"])
        assert [process.stop() for process in system.processes] == [0] * 5, system.logs(20)


async def ask_async(kafka: KafkaSettings) -> ResultEvent:
    async with AsyncClient(kafka) as client:
        return await client.result(await client.submit(task="text_generation", payload=PROMPT), timeout=60)


def refreshed(secured: SecuredKafka, system: System, begun: int) -> None:
    """The broker ends connections whose token has expired: requests go on, so tokens are refreshed."""
    wait_until(lambda: secured.tokens.issued["penstock"] > 2 * begun, 60, lambda: str(secured.tokens.issued))
    gateway = system.process("g")
    for _ in range(3):
        assert gateway.request(gateway.submit(), wait=60)["status"] == "completed", system.logs(20)


def command(system: System, *arguments: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own, with the configuration by --config or by the variable."""
    configured = ["--config", str(system.config())] if arguments[0] == "topics" else []
    done = subprocess.run(
        [sys.executable, "-m", "penstock.cli.main", *arguments, *configured],
        env={**os.environ, "PENSTOCK_CONFIG": str(system.config())} if not configured else None,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, (done.stdout, done.stderr)
    return done
