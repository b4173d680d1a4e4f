"""Items that callers append to conversations: through the line, in order with turns, once, whatever is killed."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from system import NOOP, System

ECHO = {**NOOP, "id": "echo", "options": {"echo": True}}


SYSTEM = {"models": [ECHO]}


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


ITEMS: list[dict[str, Any]] = [
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Is the gate shut?"}]},
    {"type": "function_call", "call_id": "c1", "name": "gate", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c1", "output": "shut"},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "It is shut."}]},
]


def test_the_stock_client_creates_conversations_with_items_and_appends_more(client: httpx.Client) -> None:
    stock = openai.OpenAI(base_url=str(client.base_url) + "/v1", api_key="none", max_retries=0)
    begun: Any = stock.conversations.create(items=ITEMS)  # pyright: ignore[reportArgumentType]
    more = [{"type": "message", "role": "user", "content": "And the valve?"}]
    made: Any = stock.conversations.items.create(begun.id, items=more)  # pyright: ignore[reportArgumentType]
    assert [(one.role, one.content[0].text) for one in made.data] == [("user", "And the valve?")]
    listed = list(stock.conversations.items.list(begun.id, order="asc", limit=2))
    assert [one.type for one in listed] == [*(one["type"] for one in ITEMS), "message"]
    call: Any = stock.conversations.items.retrieve(listed[1].id, conversation_id=begun.id)  # pyright: ignore
    assert (call.type, call.name, call.call_id) == ("function_call", "gate", "c1")
    told = context_of(client, begun.id, "?")
    assert told[-3:] == [("assistant", "It is shut."), ("user", "And the valve?"), ("user", "?")]
    with pytest.raises(openai.BadRequestError) as refused:
        stock.conversations.items.create(begun.id, items=[{"type": "file_search_call"}])  # pyright: ignore
    assert refused.value.param == "items[0]"
    with pytest.raises(openai.NotFoundError):
        stock.conversations.items.retrieve("msg_99", conversation_id=begun.id)
    for path in (f"/v1/conversations/{begun.id}/items", "/v1/conversations"):
        for item, place in WRONG_ITEMS:
            answer = client.post(path, content=json.dumps({"items": [ITEMS[0], item]}))
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, f"items[1].{place}"), answer.text


WRONG_ITEMS: list[tuple[dict[str, Any], str]] = [
    *(({**ITEMS[1], "arguments": text}, "arguments") for text in ('{"city": "Ro', "", "5", None, "[" * 10_000)),
    ({**ITEMS[1], "arguments": '{"a": {"b": "\\ud83d"}}'}, "arguments.a.b"),
    ({**ITEMS[1], "arguments": "\ud83d"}, "arguments"),
    ({**ITEMS[3], "content": "\ud83d"}, "content"),
]


@pytest.mark.parametrize("named", [{}, {"id": "begun-once"}])
def test_a_conversation_with_items_that_is_created_again_with_its_key_has_them_once(
    client: httpx.Client, named: dict[str, str]
) -> None:
    """A caller whose gateway was killed before it answered: the items stood there twice, or a second conversation."""
    body = {**named, "title": "gates", "items": ITEMS}
    headers = {"Idempotency-Key": f"begin-{len(named)}"}
    first, again = (client.post("/v1/conversations", json=body, headers=headers) for _ in range(2))
    assert (first.status_code, again.status_code) == (200, 200), again.text
    assert first.json()["id"] == again.json()["id"]
    listed = client.get(f"/v1/conversations/{first.json()['id']}/items?order=asc").json()["data"]
    assert [one["type"] for one in listed] == [one["type"] for one in ITEMS]
    other = client.post("/v1/conversations", json={**body, "items": ITEMS[:1]}, headers=headers)
    assert (other.status_code, other.json()["error"]["code"]) == (422, "idempotency_key_reused")
    unlike = client.post("/v1/conversations", json={"title": "gates"}, headers={"Idempotency-Key": "another"})
    assert unlike.json()["id"] != first.json()["id"]
    refused = client.post("/v1/conversations", headers={"Idempotency-Key": "k" * 256})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "Idempotency-Key")


def test_items_are_appended_once_though_their_gateway_began_anew(system: System) -> None:
    """Such a gateway has the outcome of the first call on the topic alone: each repeat was a 500."""
    gateway = system.gateway("anew").wait_ready()
    asked = {
        "url": "/v1/conversations",
        "json": {"items": ITEMS},
        "headers": {"Idempotency-Key": "anew"},
        "timeout": 60,
    }
    with httpx.Client(base_url=gateway.url) as http:
        first = http.request("POST", **asked)
    assert gateway.stop() == 0, gateway.tail()
    gateway = system.gateway("anew").wait_ready()
    with httpx.Client(base_url=gateway.url) as http:
        again = http.request("POST", **asked)
        assert (first.status_code, again.status_code) == (200, 200), again.text
        assert first.json()["id"] == again.json()["id"]
        listed = http.get(f"/v1/conversations/{first.json()['id']}/items").json()["data"]
    assert len(listed) == len(ITEMS)
    assert gateway.stop() == 0, gateway.tail()


def test_a_fork_that_is_made_again_with_its_key_is_one(client: httpx.Client) -> None:
    client.post("/v1/conversations", json={"id": "forked", "items": ITEMS})
    made = [
        client.post("/v1/conversations/forked/fork", json={"through": 0}, headers={"Idempotency-Key": key})
        for key in ("fork-1", "fork-1", "fork-2")
    ]
    assert [one.status_code for one in made] == [201, 201, 201]
    first, again, other = (one.json()["id"] for one in made)
    assert first == again != other
    listed = client.get("/v1/conversations/forked/forks").json()["data"]
    assert {one["id"] for one in listed} == {first, other}


def test_items_stand_in_order_with_turns_and_once_over_a_kill(system: System, client: httpx.Client) -> None:
    """Twenty submissions, turns and items by turns, and the worker is killed among them."""
    kinds = ["text_generation", "conversation_items"] * 10
    ids: list[str] = []
    for number, task in enumerate(kinds):
        payload = {"messages": [{"role": "user", "content": f"message {number}"}]}
        answer = client.post("/v1/requests", json={"task": task, "conversation_id": "line", "payload": payload})
        ids.append(answer.json()["request_id"])
        if number == 9:
            worker = system.process("w1")
            worker.kill9()
    system.worker("w2").wait_ready()
    for request_id in ids:
        done = client.get(f"/v1/requests/{request_id}?wait=60").json()
        assert done["status"] == "completed", done
    listed = client.get("/v1/conversations/line/items?limit=100&order=asc").json()["data"]
    asked = [one["content"][0]["text"] for one in listed if one["role"] == "user"]
    assert asked == [f"message {number}" for number in range(20)]
    assert [one["request_id"] for one in listed if one["role"] == "user"] == ids
    assert sum(one["role"] == "assistant" for one in listed) == 10


def test_a_deleted_conversation_takes_items_along_that_wait(client: httpx.Client) -> None:
    assert client.post("/v1/conversations", json={"id": "gone"}).status_code == 200
    items = [{"type": "message", "role": "user", "content": "x"}]
    made = client.post("/v1/conversations/gone/items", json={"items": items}).json()
    assert [one["offset"] for one in made["data"]] == [0]
    assert client.delete("/v1/conversations/gone").status_code == 200
    assert client.get("/v1/conversations/gone/items").status_code == 404
    again = client.post("/v1/conversations/gone/items", json={"items": items}).json()
    assert [one["offset"] for one in again["data"]] == [0], "it begins anew"
