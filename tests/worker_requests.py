"""Requests as kcat would send them, and what the result and status topics say of them."""

from __future__ import annotations

import json
import time
from typing import Any

from confluent_kafka import Producer

from penstock.schemas.codec import default_codec
from penstock.schemas.records import ControlCommand, ConversationMessage, ResultEvent, StatusEvent
from support import wait_until
from system import NOOP, System


def engine(**options: Any) -> dict[str, Any]:
    return {**NOOP, "options": options}


def send(system: System, *requests: dict[str, Any], pool: str | None = None, **produce: Any) -> None:
    """JSON requests onto their topic, or that of a pool, as kcat would."""
    producer = Producer({"bootstrap.servers": system.bootstrap, "partitioner": "murmur2_random"})
    for request in requests:
        body = {"task": "text_generation", "payload": {"prompt": "hi"}, **request}
        key = body.get("conversation_id") or body.get("request_id")
        topic = system.names.request(body["task"], body.get("priority", 5), pool)
        producer.produce(topic, json.dumps(body), **{"key": key, **produce})
    assert producer.flush(60) == 0


def command(system: System, kind: str, request_id: str, **fields: Any) -> None:
    producer = Producer({"bootstrap.servers": system.bootstrap})
    record = ControlCommand(
        kind=kind, request_id=request_id, tenant="default", created_at=int(time.time() * 1000), **fields
    )
    producer.produce(system.names.control, default_codec().encode(record), key=f"{request_id}/{kind}")
    assert producer.flush(60) == 0


def outcome(system: System, request_id: str, deadline_s: float = 30) -> ResultEvent:
    return wait_until(lambda: system.outcomes().get(request_id), deadline_s, system.processes[-1].tail)


def statuses(system: System, request_id: str) -> list[str]:
    events = [default_codec().decode(m.value() or b"", StatusEvent) for m in system.read(system.names.status)]
    return [event.status for event in events if event.request_id == request_id]


def turn(request_id: str, text: str, conversation_id: str = "c1", **fields: Any) -> dict[str, Any]:
    payload = {"messages": [{"role": "user", "content": text}]}
    return {"request_id": request_id, "conversation_id": conversation_id, "payload": payload, **fields}


def records(system: System, conversation_id: str = "c1") -> list[tuple[str, ConversationMessage]]:
    topic = system.names.conversation("default", conversation_id)
    return [
        ((m.key() or b"").decode(), default_codec().decode(m.value() or b"", ConversationMessage))
        for m in system.read(topic)
        if m.value()
    ]
