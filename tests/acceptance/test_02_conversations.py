"""Point 2: two turns in one conversation, and a kill between the answer's append and the outcome."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
from confluent_kafka.schema_registry import SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroDeserializer
from confluent_kafka.serialization import MessageField, SerializationContext

from system import Process, System, eventually

ECHO = {"id": "echo", "source": "noop", "engine": "noop", "tasks": ["text_generation"], "options": {"echo": True}}


SYSTEM = {"models": [ECHO]}


def submit(gateway: Process, conversation: str, text: str) -> str:
    payload = {"messages": [{"role": "user", "content": text}], "max_tokens": 64}
    return gateway.submit(conversation_id=conversation, stream=True, payload=payload)


def replay_with_stock_parts(system: System, gateway: Process, topic: str) -> list[dict[str, Any]]:
    """The topic as any Avro service sees it: Confluent's own deserializer against the gateway's registry routes."""
    registry = SchemaRegistryClient({"url": gateway.url + "/registry"})
    decode = AvroDeserializer(registry)  # pyright: ignore[reportCallIssue]
    return [
        decode(message.value(), SerializationContext(topic, MessageField.VALUE))
        for message in system.read(topic)
        if message.value() is not None
    ]


def test_the_second_context_holds_the_first_turn(system: System, gateway: Process) -> None:
    first = gateway.request(submit(gateway, "two-turns", "my name is Ada"), wait=60)
    second = gateway.request(submit(gateway, "two-turns", "what is my name?"), wait=60)
    # The echo engine answers with the context it was given.
    assert "my name is Ada" in second["result"]["text"]
    assert first["result"]["text"][:40] in second["result"]["text"]
    records = replay_with_stock_parts(system, gateway, system.names.conversation("default", "two-turns"))
    assert [(r["role"], r["direction"]) for r in records] == [
        ("user", "in"),
        ("assistant", "out"),
        ("user", "in"),
        ("assistant", "out"),
    ]
    assert records[0]["content"] == "my name is Ada"
    assert records[1]["content"] == first["result"]["text"]
    assert records[3]["content"] == second["result"]["text"]


def test_turns_run_in_order_one_at_a_time(system: System, gateway: Process) -> None:
    ids = [submit(gateway, "in-order", f"turn {n}") for n in range(6)]
    for request_id in ids:
        assert gateway.request(request_id, wait=60)["status"] == "completed"
    records = replay_with_stock_parts(system, gateway, system.names.conversation("default", "in-order"))
    assert [r["content"] for r in records if r["direction"] == "in"] == [f"turn {n}" for n in range(6)]
    assert [r["direction"] for r in records] == ["in", "out"] * 6


def test_killed_between_the_answer_and_the_outcome(make_system: Callable[..., System]) -> None:
    system = make_system(models=[{**ECHO, "options": {"echo": True}}])
    gateway = system.gateway().wait_ready()
    doomed = system.worker("w1", faults="kill:after_answer_append")
    request_id = submit(gateway, "killed", "hello")
    assert doomed.wait_dead(90) == -9, doomed.tail()
    before = replay_with_stock_parts(system, gateway, system.names.conversation("default", "killed"))
    assert [r["direction"] for r in before] == ["in", "out"]
    assert not [e for e in system.results() if e.is_terminal]
    worker = system.worker("w2").wait_ready()
    final = gateway.request(request_id, wait=60)
    assert final["status"] == "completed"
    after = replay_with_stock_parts(system, gateway, system.names.conversation("default", "killed"))
    assert after == before, "the answer was appended again"
    assert final["result"]["text"] == before[1]["content"]
    eventually(lambda: system.lag() == 0, 30, worker.tail)
    terminal = [e for e in system.results() if e.is_terminal]
    assert len(terminal) == 1
    assert not [e for e in system.results() if e.kind == "chunk" and e.epoch == terminal[0].epoch], "it ran again"


def test_history_over_http(gateway: Process) -> None:
    gateway.request(submit(gateway, "items", "one"), wait=60)
    items = httpx.get(gateway.url + "/v1/conversations/items/items", params={"order": "asc"}, timeout=20).json()
    assert items["object"] == "list"
    assert [item["role"] for item in items["data"]] == ["user", "assistant"]
    assert "one" in json.dumps(items["data"][0])
