"""Conversations that are summed up by themselves: each due span once, whatever is killed."""

from __future__ import annotations

from typing import Any

import httpx

from support import wait_until
from system import NOOP, System

TASKS = ["text_generation", "summarization"]
MODELS = [
    {**NOOP, "id": "talk"},
    {**NOOP, "id": "sum", "tasks": TASKS, "options": {"echo": True}},
    {**NOOP, "id": "slow", "tasks": TASKS, "options": {"echo": True, "delay_ms": 30}},
]
Json = dict[str, Any]
EVERY_TWO = {"every_turns": 2}


SYSTEM = {"models": MODELS, "worker_options": {"model_absent_s": 1}, "processes": ["w1", "g1", "s1"]}


def talk(client: httpx.Client, conversation: str, turns: int, *, first: int = 0) -> None:
    for number in range(first, first + turns):
        body = {
            "task": "text_generation",
            "model": "talk",
            "conversation_id": conversation,
            "payload": {"messages": [{"role": "user", "content": f"Question {number}?"}]},
        }
        answer = client.post("/v1/requests?wait=30", json=body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["status"] == "completed", answer.text


def summaries(client: httpx.Client, conversation: str) -> list[Json]:
    """The summaries that stand there, in the order of their records."""
    records = client.get(f"/v1/conversations/{conversation}/replay").json()["data"]
    return [one["message"] for one in records if one["message"] and one["message"]["direction"] == "summary"]


def covers(client: httpx.Client, conversation: str) -> list[int]:
    return [one["covers_through"] for one in summaries(client, conversation)]


def last_offsets(client: httpx.Client, conversation: str) -> list[int]:
    """Of each turn the offset of its answer."""
    items = client.get(f"/v1/conversations/{conversation}/items?order=asc&limit=100").json()["data"]
    return [item["offset"] for item in items if item["role"] == "assistant"]


def test_a_conversation_is_summed_up_by_its_own_policy(client: httpx.Client) -> None:
    made = client.post("/v1/conversations", json={"id": "own", "summarize": {**EVERY_TWO, "model": "sum"}})
    assert made.status_code == 200, made.text
    assert made.json()["summarize"] == {"every_turns": 2, "every_tokens": None, "model": "sum"}
    talk(client, "own", 8)
    ends = last_offsets(client, "own")
    wait_until(lambda: len(covers(client, "own")) == 2, 60, lambda: str(covers(client, "own")))
    assert covers(client, "own") == [ends[1], ends[3]]
    assert {one["model"] for one in summaries(client, "own")} == {"sum"}
    requests = client.get("/v1/requests", params={"conversation_id": "own", "limit": 100}).json()["data"]
    asked = [one for one in requests if one["task"] == "summarization"]
    assert [one["priority"] for one in asked] == [8, 8]


def test_nobody_is_summed_up_without_a_policy_and_one_that_is_set_later_counts_from_the_beginning(
    client: httpx.Client,
) -> None:
    talk(client, "none", 7)
    talk(client, "later", 7)
    changed = client.post("/v1/conversations/later", json={"summarize": {**EVERY_TWO, "model": "sum"}})
    assert changed.status_code == 200, changed.text
    wait_until(lambda: len(covers(client, "later")) == 1, 60, lambda: str(covers(client, "later")))
    off = client.post("/v1/conversations/later", json={"summarize": {"every_turns": 0}})
    assert off.json()["summarize"]["every_turns"] == 0
    talk(client, "later", 4, first=7)
    talk(client, "own-2", 0)
    assert covers(client, "none") == []
    assert len(covers(client, "later")) == 1


def test_killed_while_it_waits_it_neither_repeats_nor_skips(system: System, client: httpx.Client) -> None:
    client.post("/v1/conversations", json={"id": "killed", "summarize": {**EVERY_TWO, "model": "slow"}})
    talk(client, "killed", 6)

    def live() -> list[Json]:
        found = client.get("/v1/requests", params={"conversation_id": "killed", "limit": 100}).json()["data"]
        return [one for one in found if one["task"] == "summarization" and not one["done"]]

    wait_until(lambda: bool(live()), 60, "no summary was begun")
    doomed = system.process("s")
    doomed.kill9()
    talk(client, "killed", 6, first=6)
    ends = last_offsets(client, "killed")
    system.summarizer("s2").wait_ready()
    wanted = [ends[1], ends[3], ends[5], ends[7]]
    wait_until(lambda: covers(client, "killed") == wanted, 90, lambda: str((covers(client, "killed"), wanted)))
    ids = [one["request_id"] for one in summaries(client, "killed")]
    assert len(set(ids)) == 4


def test_what_was_erased_is_summed_up_anew(client: httpx.Client) -> None:
    client.post("/v1/conversations", json={"id": "erased", "summarize": {**EVERY_TWO, "model": "sum"}})
    talk(client, "erased", 6)
    wait_until(lambda: len(covers(client, "erased")) == 1, 60, lambda: str(covers(client, "erased")))
    first = client.get("/v1/conversations/erased/items?order=asc&limit=1").json()["data"][0]
    assert client.delete(f"/v1/requests/{first['request_id']}").status_code in (200, 202, 204)
    wait_until(lambda: covers(client, "erased") == [], 30, lambda: str(covers(client, "erased")))
    talk(client, "erased", 1, first=6)
    ends = last_offsets(client, "erased")
    wait_until(lambda: covers(client, "erased") == [ends[1]], 60, lambda: str((covers(client, "erased"), ends)))
    assert "Question 0?" not in summaries(client, "erased")[0]["content"]


def test_a_fork_is_summed_up_by_itself_also_after_a_kill(system: System, client: httpx.Client) -> None:
    talk(client, "trunk", 4)
    through = last_offsets(client, "trunk")[2]
    made = client.post("/v1/conversations/trunk/fork", json={"through": through, "id": "branch"})
    assert made.status_code == 201, made.text
    assert (made.json()["title"], made.json()["summarize"]) == (None, None)
    changed = client.post("/v1/conversations/branch", json={"summarize": {**EVERY_TWO, "model": "sum"}})
    assert changed.json()["forked_from"] == {"conversation_id": "trunk", "through": through}
    talk(client, "branch", 3)
    ends = last_offsets(client, "branch")
    wait_until(lambda: covers(client, "branch") == [ends[1]], 60, lambda: str((covers(client, "branch"), ends)))
    system.process("s").kill9()
    talk(client, "branch", 2)
    system.summarizer("s3").wait_ready()
    ends = last_offsets(client, "branch")
    wait_until(
        lambda: covers(client, "branch") == [ends[1], ends[3]], 60, lambda: str((covers(client, "branch"), ends))
    )
    assert covers(client, "trunk") == []
    assert client.delete("/v1/conversations/trunk").status_code == 200
    talk(client, "branch", 2)
    ends = last_offsets(client, "branch")
    wait_until(lambda: covers(client, "branch")[2:] == [ends[5]], 60, lambda: str((covers(client, "branch"), ends)))


def test_a_model_that_is_not_there_keeps_nobody_waiting(system: System, client: httpx.Client) -> None:
    client.post("/v1/conversations", json={"id": "lost", "summarize": {**EVERY_TWO, "model": "nowhere"}})
    client.post("/v1/conversations", json={"id": "found", "summarize": {**EVERY_TWO, "model": "sum"}})
    talk(client, "lost", 6)
    talk(client, "found", 6)
    wait_until(lambda: len(covers(client, "found")) == 1, 60, lambda: str(covers(client, "found")))
    client.post("/v1/conversations/lost", json={"summarize": {**EVERY_TWO, "model": "sum"}})
    talk(client, "lost", 2, first=6)
    ends = last_offsets(client, "lost")
    wait_until(lambda: covers(client, "lost") == [ends[3]], 60, lambda: str((covers(client, "lost"), ends)))
    assert system.process("s").metric("penstock_summaries_total", outcome="failed") == 1


def test_a_deleted_conversation_is_forgotten_and_its_name_begins_anew(client: httpx.Client) -> None:
    client.post("/v1/conversations", json={"id": "again", "title": "A", "summarize": {**EVERY_TWO, "model": "sum"}})
    talk(client, "again", 6)
    wait_until(lambda: len(covers(client, "again")) == 1, 60, lambda: str(covers(client, "again")))
    assert client.delete("/v1/conversations/again").status_code == 200
    assert client.post("/v1/conversations", json={"id": "again"}).json()["title"] is None
    talk(client, "again", 7)
    client.post("/v1/conversations/again", json={"summarize": {**EVERY_TWO, "model": "sum"}})
    wait_until(lambda: covers(client, "again") == [3], 60, lambda: str(covers(client, "again")))
