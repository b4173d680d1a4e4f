"""Items that callers append to conversations: through the line, in order with turns, once, whatever is killed."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from system import NOOP, System, running

ECHO = {**NOOP, "id": "echo", "options": {"echo": True}}


@pytest.fixture(scope="module")
def system(kafka: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    prefix = f"items{uuid.uuid4().hex[:6]}-"
    made = System(kafka.bootstrap_servers, prefix, tmp_path_factory.mktemp("items"), models=[ECHO])
    with running(made) as started:
        started.worker().wait_ready()
        started.gateway().wait_ready()
        yield started


@pytest.fixture
def client(system: System) -> Iterator[httpx.Client]:
    url = next(one.url for one in system.processes if one.name == "g1")
    with httpx.Client(base_url=url, timeout=60) as found:
        yield found


def context_of(client: httpx.Client, conversation: str, text: str) -> list[tuple[str, str]]:
    """What a model is told in the next turn."""
    body = {
        "task": "text_generation",
        "conversation_id": conversation,
        "payload": {"messages": [{"role": "user", "content": text}]},
    }
    done = client.post("/v1/requests?wait=30", json=body).json()
    assert done["status"] == "completed", done
    return [(one["role"], one["content"]) for one in json.loads(done["result"]["text"])]


def test_items_are_appended_in_order_and_read_by_the_next_turn(client: httpx.Client) -> None:
    items = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is a dam?"},
        {"role": "assistant", "content": "A wall that holds water."},
    ]
    body = {"task": "conversation_items", "conversation_id": "imported", "payload": {"messages": items}}
    answer = client.post("/v1/requests?wait=30", json=body)
    assert (answer.status_code, answer.json()["status"]) == (200, "completed"), answer.text
    assert answer.json()["result"]["offsets"] == [0, 1, 2]
    told = context_of(client, "imported", "And a penstock?")
    assert told == [*[(one["role"], one["content"]) for one in items], ("user", "And a penstock?")]
