"""No process changes a file on its event loop: not at its start, not while it works, not at its stop."""

from __future__ import annotations

from collections.abc import Callable

import httpx
import pytest
from confluent_kafka.admin import AdminClient, NewTopic

from kit.loop_files import EVENT, SWITCH
from penstock.cli.embedded_kafka import EmbeddedKafka
from system import NOOP, System


@pytest.mark.parametrize("sharded", [False, True])
def test_no_process_changes_a_file_on_its_event_loop(
    make_system: Callable[..., System],
    kafka: EmbeddedKafka,
    kafka_prefix: str,
    sharded: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(SWITCH, "1")
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
    admin.create_topics([NewTopic(kafka_prefix, 1)])[kafka_prefix].result(30)
    system = make_system(
        models=[{**NOOP, "id": "m"}],
        queues=[{"topic": kafka_prefix}],
        webhook_options={"secret": "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLasw"},
        sharded=sharded,
    ).start_all(["w1", "g1", "b1", "h1", "s1"])
    gateway = system.process("g1")
    chat = {"model": "m", "messages": [{"role": "user", "content": "go"}]}
    answer = httpx.post(f"{gateway.url}/v1/chat/completions", json=chat, timeout=60)
    assert answer.status_code == 200, answer.text
    for process in system.processes:
        assert process.stop() == 0
    logs = [line for process in system.processes for line in process.log.read_text().splitlines() if EVENT in line]
    assert logs == []
