"""Forks of conversations with a real worker and gateway: both go on, and what is deleted or killed harms no fork."""

from __future__ import annotations

import base64
import functools
import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import httpx
import pytest

from conversing import fork, items, output, questions, turn
from penstock.common import admin
from penstock.producers import Client
from system import NOOP, System, eventually

MODELS = [
    {**NOOP, "id": "echo", "options": {"echo": True}},
    {**NOOP, "id": "slow", "options": {"echo": True, "first_delay_ms": 600_000}},
    {**NOOP, "id": "sum", "tasks": ["text_generation", "summarization"], "options": {"echo": True}},
]
PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
ask = functools.partial(turn, model="echo")


SYSTEM = {"models": MODELS}


def has_topic(system: System, conversation: str) -> bool:
    return admin.topic_id(system.kafka, system.names.conversation("default", conversation)) is not None


def asked(client: httpx.Client, conversation: str) -> list[str]:
    return [one["content"][0]["text"] for one in items(client, conversation) if one["role"] == "user"]


def status(client: httpx.Client, conversation: str) -> int:
    return client.get(f"/v1/conversations/{conversation}").status_code


def listed(client: httpx.Client) -> list[str]:
    return [one["id"] for one in client.get("/v1/conversations?limit=100").json()["data"]]


def test_an_edit_is_a_fork_through_the_item_before_it(system: System, client: httpx.Client) -> None:
    for number in range(3):
        ask(client, "trip", f"q{number}")
    answer_0, question_1 = items(client, "trip")[1:3]
    edited = fork(client, "trip", answer_0["id"])
    assert edited["object"] == "conversation"
    assert edited["forked_from"] == {"conversation_id": "trip", "through": answer_0["offset"]}
    assert client.get(f"/v1/conversations/{edited['id']}").json() == edited
    assert "forked_from" not in client.get("/v1/conversations/trip").json()
    again = fork(client, "trip", question_1["offset"], "regenerated")
    assert questions(ask(client, edited["id"], "q1, edited")) == ["q0", "q1, edited"]
    assert questions(ask(client, "trip", "q3")) == ["q0", "q1", "q2", "q3"]
    assert asked(client, "regenerated") == ["q0", "q1"]
    # The offsets are the conversation's: inherited items keep theirs, and a page goes on through both.
    mine = items(client, edited["id"])
    assert [one["offset"] for one in mine] == [0, 1, 3, 4]
    after = client.get(f"/v1/conversations/{edited['id']}/items?after={mine[1]['id']}&limit=1&order=asc").json()
    assert after["data"] == mine[2:3]
    assert client.get(f"/v1/conversations/{edited['id']}/items/{mine[0]['id']}").json() == mine[0]
    replay = client.get(f"/v1/conversations/{edited['id']}/replay").json()["data"]
    assert [(one["offset"], one["message"]["direction"]) for one in replay] == [
        (0, "in"), (1, "out"), (2, "fork"), (3, "in"), (4, "out")
    ]  # fmt: skip
    forks = client.get("/v1/conversations/trip/forks?limit=1").json()
    assert (len(forks["data"]), forks["has_more"]) == (1, True)
    rest = client.get(f"/v1/conversations/trip/forks?after={forks['last_id']}").json()
    assert [one["id"] for one in forks["data"] + rest["data"]] == sorted([edited["id"], again["id"]])
    with Client(system.kafka) as direct:
        assert [turn.offset for turn in direct.history(edited["id"])] == [0, 1, 3, 4]
        assert [record.offset for record in direct.replay(edited["id"], 2)] == [2, 3, 4]


def test_the_command_line_forks_and_lists_forks(system: System, client: httpx.Client) -> None:
    ask(client, "cli", "q0")

    gateway = system.process("g1")
    assert output(gateway, "fork", "cli", "--through", "msg_1", "--id", "cli-2").strip() == "cli-2"
    assert json.loads(output(gateway, "fork", "cli", "--through", "1", "--id", "cli-2", "--json"))["id"] == "cli-2"
    assert json.loads(output(gateway, "forks", "cli", "--json"))["forked_from"] == {
        "conversation_id": "cli",
        "through": 1,
    }


def test_what_cannot_be_forked_is_refused(client: httpx.Client) -> None:
    ask(client, "short", "q0")
    ask(client, "other", "q0")
    for conversation, body, found in (
        ("nowhere", {"through": 0}, (404, "not_found", "conversation_id")),
        ("short", {"through": 7}, (404, "not_found", "through")),
        ("short", {"through": "msg_7"}, (404, "not_found", "through")),
        ("short", {"through": -1}, (400, "invalid", "through")),
        ("short", {"through": "seven"}, (400, "invalid", "through")),
        ("short", {}, (400, "invalid", "through")),
        ("short", {"through": 0, "items": []}, (400, "unsupported_parameter", "items")),
        ("short", {"through": 0, "id": "no good"}, (400, "invalid", "conversation_id")),
        ("short", {"through": 0, "id": "other"}, (409, "conflict", "id")),
        ("short", {"through": 0, "id": "short"}, (409, "conflict", "id")),
    ):
        answer = client.post(f"/v1/conversations/{conversation}/fork", json=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == found, answer.text
    assert client.get("/v1/conversations/nowhere/forks").status_code == 404
    assert client.get("/v1/conversations/short/forks").json()["data"] == []


def test_a_deleted_parent_is_read_through_its_forks_and_goes_with_the_last(
    system: System, client: httpx.Client
) -> None:
    ask(client, "root", "q0")
    ask(client, "root", "q1")
    fork(client, "root", 1, "child")
    ask(client, "child", "q2")
    fork(client, "child", 4, "grandchild")
    fork(client, "child", 0, "edit")
    running_turn = ask(client, "root", "never answered", wait=0, model="slow")["request_id"]

    def runs() -> bool:
        return client.get(f"/v1/requests/{running_turn}").json()["status"] == "running"

    eventually(runs, 30, system.process("g1").tail)
    assert client.delete("/v1/conversations/root").status_code == 200
    assert client.get(f"/v1/requests/{running_turn}?wait=30").json()["status"] == "cancelled"
    for path in ("", "/items", "/replay", "/forks"):
        assert client.get(f"/v1/conversations/root{path}").status_code == 404, path
    assert client.delete("/v1/conversations/root").status_code == 404
    with pytest.raises(Exception, match="does not exist"), Client(system.kafka) as direct:
        direct.history("root")
    assert "root" not in listed(client)
    assert has_topic(system, "root"), "its forks need it"
    assert questions(ask(client, "child", "q3")) == ["q0", "q2", "q3"]
    assert client.delete("/v1/conversations/child").status_code == 200
    assert questions(ask(client, "grandchild", "q4")) == ["q0", "q2", "q4"]
    assert client.delete("/v1/conversations/grandchild").status_code == 200
    assert not has_topic(system, "child")
    assert questions(ask(client, "edit", "q5")) == ["q0", "q5"]
    assert client.delete("/v1/conversations/edit").status_code == 200
    assert not any(has_topic(system, one) for one in ("root", "child", "grandchild", "edit"))


def test_a_deleted_id_begins_anew_while_its_forks_live(system: System, client: httpx.Client) -> None:
    ask(client, "again", "q0")
    fork(client, "again", 1, "keeps")
    assert client.delete("/v1/conversations/again").status_code == 200
    assert questions(ask(client, "again", "q1")) == ["q1"]
    assert asked(client, "again") == ["q1"]
    assert "again" in listed(client)
    assert questions(ask(client, "keeps", "q2")) == ["q0", "q2"]
    assert client.delete("/v1/conversations/keeps").status_code == 200
    assert questions(ask(client, "again", "q3")) == ["q1", "q3"]
    answer = client.post("/v1/conversations", json={"id": "again"})
    assert answer.status_code == 200, answer.text
    assert asked(client, "again") == ["q1", "q3"]


def test_what_is_erased_in_the_parent_is_erased_in_its_forks(system: System, client: httpx.Client) -> None:
    secret = ask(client, "leaky", "the secret")["request_id"]
    ask(client, "leaky", "q1")
    fork(client, "leaky", 3, "heir")
    done = client.post("/v1/conversations/heir/summarize?wait=30", json={"model": "sum"}).json()
    assert "the secret" in done["result"]["text"]
    assert questions(ask(client, "heir", "q2")) == ["the secret", "q1", "q2"]
    assert client.delete(f"/v1/requests/{secret}").status_code in (200, 204)

    worker = system.process("w1")
    eventually(lambda: asked(client, "heir") == ["q1", "q2"], 30, worker.tail)
    assert questions(ask(client, "heir", "q3")) == ["q1", "q2", "q3"]
    replay = client.get("/v1/conversations/heir/replay").json()["data"]
    assert not [one for one in replay if one["message"] and one["message"]["direction"] == "summary"]


def test_images_of_inherited_turns_are_held_as_long_as_a_fork_lives(client: httpx.Client) -> None:
    uploaded = client.post("/v1/artifacts", content=PNG, headers={"content-type": "image/png"})
    assert uploaded.status_code == 201, uploaded.text
    artifact = f"/v1/artifacts/{uploaded.json()['artifact_id']}"
    shown = {"type": "input_image", "file_id": uploaded.json()["artifact_id"]}
    message = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Look."}, shown]}
    made = client.post("/v1/conversations", json={"id": "album", "items": [message]})
    assert made.status_code == 200, made.text
    through = items(client, "album")[-1]["offset"]
    fork(client, "album", through, "copy")
    assert client.delete("/v1/conversations/album").status_code == 200
    assert client.delete(artifact).status_code == 409, "held"
    assert items(client, "copy")[0]["content"][0]["type"] == "input_image"
    assert client.get(f"{artifact}/content").content == PNG
    assert client.delete("/v1/conversations/copy").status_code == 200
    assert client.delete(artifact).status_code == 200


def test_a_gateway_that_is_killed_during_a_fork_leaves_a_fork_or_none(system: System, client: httpx.Client) -> None:
    """Killed early and late; another gateway finds a whole fork or none, and makes it."""
    ask(client, "parent", "q0")
    ask(client, "parent", "q1")
    for number, delay_s in enumerate((0.005, 0.02, 0.05)):
        victim = system.gateway(f"victim{number}").wait_ready()
        fork_id = f"fork{number}"
        started = threading.Event()

        def post(url: str, fork_id: str, started: threading.Event) -> None:
            with suppress(httpx.HTTPError), httpx.Client(base_url=url, timeout=30) as own:
                own.get("/v1/conversations/parent")
                started.set()
                own.post("/v1/conversations/parent/fork", json={"through": 1, "id": fork_id})

        thread = threading.Thread(target=post, args=(victim.url, fork_id, started))
        thread.start()
        assert started.wait(30)
        time.sleep(delay_s)
        victim.kill9()
        thread.join(30)
        assert asked_or_none(lambda fork_id=fork_id: asked(client, fork_id)) in ([], ["q0"])
        fork(client, "parent", 1, fork_id)
        assert questions(ask(client, fork_id, "q2")) == ["q0", "q2"]
    assert [one["id"] for one in client.get("/v1/conversations/parent/forks").json()["data"]] == [
        "fork0", "fork1", "fork2"
    ]  # fmt: skip
    for one in ("parent", "fork0", "fork1", "fork2"):
        assert client.delete(f"/v1/conversations/{one}").status_code == 200
        assert status(client, one) == 404
    assert not any(has_topic(system, one) for one in ("parent", "fork0", "fork1", "fork2"))


def asked_or_none(look: Callable[[], list[str]]) -> list[str]:
    try:
        return look()
    except AssertionError:  # 404
        return []
