"""Summaries of conversations: later turns have them in place of what does not fit, whatever is killed."""

from __future__ import annotations

import json
import uuid
from typing import Any

import httpx
import pytest

from conversing import Json, output, turn
from system import NOOP, System, eventually

BOTH = ["text_generation", "summarization"]
MODELS = [
    {**NOOP, "id": "talk"},
    {**NOOP, "id": "small", "options": {"echo": True, "window": 80}},
    {**NOOP, "id": "sum", "tasks": BOTH, "options": {"echo": True}},
    {**NOOP, "id": "slow", "tasks": BOTH, "options": {"echo": True, "delay_ms": 100}},
]
FACT = "The code of the gate is 4711."


SYSTEM = {"models": MODELS}


def talk(client: httpx.Client, conversation: str, turns: int = 20) -> None:
    """A conversation that begins with a fact, and is longer than the window of `small`."""
    for number in range(turns):
        turn(client, conversation, FACT if number == 0 else f"Question {number}?")


def told(done: Json) -> str:
    """All that a model that repeats its context was told."""
    assert done["status"] == "completed", done
    return "\n".join(f"{one['role']}: {one['content']}" for one in json.loads(done["result"]["text"]))


def summaries(client: httpx.Client, conversation: str) -> list[Json]:
    records = client.get(f"/v1/conversations/{conversation}/replay").json()["data"]
    return [one["message"] for one in records if one["message"] and one["message"]["direction"] == "summary"]


def summarize(client: httpx.Client, conversation: str, *, wait: int = 30, **fields: Any) -> Json:
    answer = client.post(f"/v1/conversations/{conversation}/summarize?wait={wait}", json=fields)
    assert answer.status_code in (200, 202), answer.text
    return answer.json()


def test_a_fact_from_the_beginning_is_known_again_once_there_is_a_summary(client: httpx.Client) -> None:
    for conversation in ("plain", "fact", "never"):
        talk(client, conversation)
    plain = turn(client, "plain", "Which code?", "small")
    assert FACT not in told(plain)
    held = plain["result"]["context"]
    by_turn = plain["result"]["usage"]["prompt_tokens"] / held["turns"]
    assert held.pop("dropped_tokens") == pytest.approx(11 * by_turn, rel=0.2)
    assert held == {"turns": 9, "summarized_turns": 0, "dropped_turns": 11, "summary_through": None}
    for conversation in ("fact", "never"):
        done = summarize(client, conversation, model="sum", through_offset=1, metadata={"by": "test"})
        assert (done["status"], done["result"]["covers_through"]) == ("completed", 1), done
        (kept,) = summaries(client, conversation)
        assert (kept["content"], kept["covers_through"]) == (done["result"]["text"], 1)
        assert (kept["role"], kept["model"], kept["metadata"]) == ("system", "sum", {"by": "test"})
    small = turn(client, "fact", "Which code?", "small")
    assert FACT in told(small)
    assert told(small).startswith("system: Summary of the conversation so far:")
    held = small["result"]["context"]
    assert (held["summarized_turns"], held["summary_through"], held["turns"] + held["dropped_turns"]) == (1, 1, 19)
    assert held["turns"] > 0
    assert FACT not in told(turn(client, "never", "Which code?", "small", context={"summary": "never"}))
    whole = turn(client, "never", "Which code?", "sum")
    assert "Summary of the conversation" not in told(whole), "all turns fit into this window"
    required = turn(client, "never", "Which code?", "sum", context={"summary": "required"})
    assert required["result"]["context"]["summarized_turns"] == 1
    items = client.get("/v1/conversations/fact/items?limit=100").json()["data"]
    assert len(items) == 42, "a summary is no message"


def test_the_next_summary_goes_on_from_the_last(system: System, client: httpx.Client) -> None:
    talk(client, "twice", 3)
    first = summarize(client, "twice", model="sum", max_tokens=25)
    turn(client, "twice", "The valve is open.")
    made = output(system.process("g1"), "summarize", "twice", "--model", "sum")
    assert "Summary of the conversation so far:" in made, "the last one stands for what it covers"
    assert FACT in made
    assert "The valve is open." in made
    assert "Question 2?" not in made.replace(json.dumps(first["result"]["text"])[1:-1], "")
    assert [one["covers_through"] for one in summaries(client, "twice")] == [5, 8]


def test_what_cannot_be_summed_up_is_refused(client: httpx.Client) -> None:
    answer = client.post("/v1/conversations/nowhere/summarize", json={})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
    turn(client, "short", "Hello.")
    for body, param in (
        ({"task": "embedding"}, "task"),
        ({"through_offset": -1}, "through_offset"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 10_000_000}, "max_tokens"),
        ({"conversation_id": "other"}, "conversation_id"),
        ([], None),
    ):
        answer = client.post("/v1/conversations/short/summarize", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
        assert "payload" not in answer.json()["error"]["message"]
    failed = turn(client, "short", "And?", "small", context={"summary": "required"})
    assert (failed["status"], failed["error"]["param"]) == ("failed", "context.summary")


def test_turns_go_on_while_a_summary_is_made_and_a_kill_makes_no_second(system: System, client: httpx.Client) -> None:
    talk(client, "killed", 5)
    asked = summarize(client, "killed", wait=0, model="slow")
    request_id = asked["request_id"]

    def runs() -> bool:
        return client.get(f"/v1/requests/{request_id}").json()["status"] == "running"

    worker = system.process("w1")
    eventually(runs, 30, worker.tail)
    done = turn(client, "killed", "Who holds me up?")
    assert done["status"] == "completed"
    assert runs(), "the turn has not waited for the summary"
    worker.kill9()
    system.worker("w2").wait_ready()
    found = client.get(f"/v1/requests/{request_id}?wait=60").json()
    assert found["status"] == "completed", found
    (kept,) = summaries(client, "killed")
    assert (kept["request_id"], kept["content"]) == (request_id, found["result"]["text"])
    listed = client.get("/v1/conversations/killed/items?limit=100&order=asc").json()["data"]
    assert [one["role"] for one in listed] == ["user", "assistant"] * 6


def test_a_deleted_conversation_takes_its_summary_along(client: httpx.Client) -> None:
    talk(client, "gone", 5)
    request_id = summarize(client, "gone", wait=0, model="slow")["request_id"]
    assert client.delete("/v1/conversations/gone").status_code == 200
    ended = client.get(f"/v1/requests/{request_id}?wait=30").json()
    assert ended["status"] == "cancelled", ended
    turn(client, "gone", "Hello again.")
    assert summaries(client, "gone") == []


def test_a_repeat_finds_its_summary_when_the_conversation_is_gone(client: httpx.Client) -> None:
    talk(client, "repeated", 2)
    path, key = "/v1/conversations/repeated/summarize", {"idempotency-key": uuid.uuid4().hex}
    first = client.post(path + "?wait=30", json={"model": "sum"}, headers=key)
    assert first.json()["status"] == "completed", first.text
    assert client.delete("/v1/conversations/repeated").status_code == 200
    again = client.post(path, json={"model": "sum"}, headers=key)
    assert (again.status_code, again.headers.get("idempotency-replayed")) == (202, "true"), again.text
    assert again.json()["request_id"] == first.json()["request_id"]
    other = client.post(path, json={"model": "sum", "max_tokens": 5}, headers=key)
    assert (other.status_code, other.json()["error"]["code"]) == (422, "idempotency_key_reused"), other.text
    unknown = client.post(path, json={"model": "sum"}, headers={"idempotency-key": uuid.uuid4().hex})
    assert unknown.status_code == 404
    assert client.post(path, json={"model": "sum"}).status_code == 404
