"""Point 3: other services need no gateway: the client library and kcat reach an outcome over Kafka alone."""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import Any

import pytest

from penstock.producers import AsyncClient, Chunk, Client
from penstock.schemas.ids import derived_request_id
from system import System, eventually

SYSTEM = {"processes": ["w1"]}


def test_the_client_library_submits_and_follows_to_the_end(system: System) -> None:
    with Client(system.kafka) as client:
        submitted = client.submit(
            task="text_generation", payload={"prompt": "Hello", "max_tokens": 8}, stream=True, metadata={"k": "v"}
        )
        assert submitted.offset >= 0
        events = list(client.follow(submitted))
        result = client.result(submitted.request_id, timeout=30)
    text = "".join(event.text or "" for event in events if isinstance(event, Chunk))
    assert text == result.text_generation["text"]
    assert result.status == "completed"
    assert result.metadata == {"k": "v"}


async def test_the_async_client_does_the_same(system: System) -> None:
    async with AsyncClient(system.kafka) as client:
        submitted = await client.submit(task="text_generation", payload={"prompt": "Hello"}, stream=True)
        names = [type(event).__name__ async for event in client.follow(submitted)]
    assert names[-1] == "Result"
    assert names.count("Result") == 1


@pytest.mark.skipif(shutil.which("kcat") is None, reason="kcat is not installed")
def test_kcat_produces_a_json_line_and_reads_its_outcome(system: System) -> None:
    topic = system.names.request("text_generation", 5)
    line = json.dumps({"task": "text_generation", "payload": {"prompt": "from kcat"}})
    subprocess.run(
        ["kcat", "-P", "-b", system.bootstrap, "-t", topic, "-p", "0"],
        input=line.encode() + b"\n",
        check=True,
        timeout=30,
    )
    message = next(m for m in system.read(topic) if m.partition() == 0 and m.value() == line.encode())
    request_id = derived_request_id(topic, 0, message.offset() or 0, message.timestamp()[1])
    outcome: dict[str, Any] = {}

    def arrived() -> bool:
        outcome.update(system.outcomes())
        return request_id in outcome

    eventually(arrived, 30, lambda: f"no outcome for {request_id}; seen {sorted(outcome)}")
    assert outcome[request_id].status == "completed"
