"""Outputs over 256 KiB do not ride on Kafka: the event refers to an artifact, OpenAI's clients get the whole."""

from __future__ import annotations

import hashlib
import json

import httpx
import openai

from penstock.schemas.records import ResultEvent
from system import System

LARGE = {
    "id": "noop",
    "source": "noop",
    "engine": "noop",
    "tasks": ["text_generation"],
    "options": {"tokens": 4, "chars": 100_000},
}
TEXT = "".join(f"word{n} ".ljust(100_000) for n in range(4))


SYSTEM = {"models": [LARGE]}


def test_the_event_refers_to_the_artifact(system: System) -> None:
    gateway = system.process("g1")
    request_id = gateway.submit()
    found = gateway.request(request_id, wait=30)
    assert found["status"] == "completed", found
    result = found["result"]
    assert isinstance(result, dict)
    assert "text" not in result
    reference = result["artifact"]
    data = httpx.get(gateway.url + reference["url"]).content
    assert hashlib.sha256(data).hexdigest() == reference["sha256"]
    assert (len(data), json.loads(data)["text"]) == (reference["size_bytes"], TEXT)
    event: ResultEvent = system.outcomes()[request_id]
    assert event.output is None
    assert event.output_artifact is not None
    assert event.usage is not None
    # Erasing the request erases what it made.
    assert httpx.delete(f"{gateway.url}/v1/requests/{request_id}").status_code == 200
    assert httpx.get(gateway.url + reference["url"]).status_code == 404


def test_openai_clients_get_the_whole(system: System) -> None:
    client = openai.OpenAI(base_url=system.process("g1").url + "/v1", api_key="unused", max_retries=0)
    messages = [{"role": "user", "content": "x"}]
    plain = client.chat.completions.create(model="noop", messages=messages)  # type: ignore[arg-type]
    assert plain.choices[0].message.content == TEXT
    stream = client.chat.completions.create(model="noop", messages=messages, stream=True)  # type: ignore[arg-type]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices) == TEXT


def test_a_turn_of_a_conversation_is_kept_whole_as_well(system: System) -> None:
    messages = {"messages": [{"role": "user", "content": "x"}]}
    gateway = system.process("g1")
    found = gateway.request(gateway.submit(conversation_id="large", payload=messages), wait=30)
    assert found["status"] == "completed", found
    items = httpx.get(gateway.url + "/v1/conversations/large/items", params={"order": "asc"}).json()["data"]
    assert [item["content"][0]["text"] for item in items] == ["x", TEXT]
