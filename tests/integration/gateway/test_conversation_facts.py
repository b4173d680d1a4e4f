"""Title, metadata and policy of conversations: the same at every gateway, also after a restart, and gone with them."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai import OpenAI
from typer.testing import CliRunner

from penstock.cli.main import app
from support import wait_until
from system import System

Json = dict[str, Any]


SYSTEM = {"processes": ["g1", "g2"]}


@pytest.fixture
def gateways(system: System) -> Iterator[tuple[httpx.Client, httpx.Client]]:
    urls = [system.process(name).url for name in ("g1", "g2")]
    with httpx.Client(base_url=urls[0], timeout=30) as first, httpx.Client(base_url=urls[1], timeout=30) as second:
        yield first, second


def facts(client: httpx.Client, conversation: str) -> Json:
    answer = client.get(f"/v1/conversations/{conversation}")
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_every_gateway_knows_them_at_once(gateways: tuple[httpx.Client, httpx.Client]) -> None:
    first, second = gateways
    before = int(time.time())
    made = first.post("/v1/conversations", json={"id": "both", "title": "Trip", "metadata": {"team": "a"}})
    assert made.status_code == 200, made.text
    for number in range(20):
        title = f"Trip {number}"
        changed = gateways[number % 2].post("/v1/conversations/both", json={"title": title})
        assert changed.status_code == 200, changed.text
        other = facts(gateways[1 - number % 2], "both")
        assert (other["title"], other["metadata"]) == (title, {"team": "a"})
    assert second.post("/v1/conversations/both", json={"metadata": {}, "title": None}).json()["title"] is None
    found = facts(first, "both")
    assert (found["title"], found["metadata"], found["summarize"]) == (None, {}, None)
    assert found["created_at"] is None, "nothing was said yet"
    assert before - 2 <= made.json()["created_at"] <= time.time() + 2


def test_creating_one_that_is_there_changes_what_is_named(gateways: tuple[httpx.Client, httpx.Client]) -> None:
    first, second = gateways
    first.post("/v1/conversations", json={"id": "twice", "title": "A", "summarize": {"every_turns": 5}})
    second.post("/v1/conversations", json={"id": "twice", "metadata": {"k": "v"}})
    found = facts(first, "twice")
    assert (found["title"], found["metadata"]) == ("A", {"k": "v"})
    assert found["summarize"] == {"every_turns": 5, "every_tokens": None, "model": None}


def test_what_is_wrong_is_named_and_changes_nothing(gateways: tuple[httpx.Client, httpx.Client]) -> None:
    first, _ = gateways
    first.post("/v1/conversations", json={"id": "wrong", "title": "A"})
    for body, param in (
        ({"title": 7}, "title"),
        ({"title": "x" * 513}, "title"),
        ({"metadata": {"k": 7}}, "metadata.k"),
        ({"metadata": {str(number): "v" for number in range(17)}}, "metadata"),
        ({"summarize": {"every_turns": -1}}, "summarize.every_turns"),
        ({"summarize": {"every": 1}}, "summarize.every"),
        ({"summarise": {}}, "summarise"),
    ):
        for path in ("/v1/conversations/wrong", "/v1/conversations"):
            answer = first.post(path, json={**body, **({"id": "wrong"} if path.endswith("s") else {})})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
    assert first.post("/v1/conversations/nowhere", json={"title": "A"}).status_code == 404
    assert facts(first, "wrong")["title"] == "A"


def test_lists_have_them_and_say_when_each_was_active(system: System, gateways: tuple[httpx.Client, Any]) -> None:
    first, _ = gateways
    if not any(one.name == "w1" for one in system.processes):
        system.worker().wait_ready()
    first.post("/v1/conversations", json={"id": "listed", "title": "L", "metadata": {"k": "v"}})
    said = {"type": "message", "role": "user", "content": "Hello."}
    before = int(time.time())
    assert first.post("/v1/conversations/listed/items", json={"items": [said]}).status_code == 200
    pages = [one for one in first.get("/v1/conversations?limit=100").json()["data"] if one["id"] == "listed"]
    assert [(one["title"], one["metadata"]) for one in pages] == [("L", {"k": "v"})]
    assert before - 2 <= pages[0]["last_active_at"] <= time.time() + 2
    found = facts(first, "listed")
    assert found["created_at"] == found["last_active_at"] == pages[0]["last_active_at"]


def test_they_go_with_the_conversation(gateways: tuple[httpx.Client, httpx.Client]) -> None:
    first, second = gateways
    first.post("/v1/conversations", json={"id": "gone", "title": "A", "metadata": {"secret": "x"}})
    assert second.delete("/v1/conversations/gone").status_code == 200
    assert first.get("/v1/conversations/gone").status_code == 404
    assert first.post("/v1/conversations", json={"id": "gone"}).json()["title"] is None
    assert facts(second, "gone")["metadata"] == {}


def test_a_gateway_that_is_killed_knows_them_again(system: System, gateways: tuple[httpx.Client, httpx.Client]) -> None:
    first, _second = gateways
    first.post("/v1/conversations", json={"id": "kept", "title": "K"})
    killed = system.process("g2")
    killed.kill9()
    first.post("/v1/conversations/kept", json={"metadata": {"since": "then"}})
    again = system.gateway("g2")
    again.wait_ready()
    with httpx.Client(base_url=again.url, timeout=30) as client:
        found = facts(client, "kept")
    assert (found["title"], found["metadata"]) == ("K", {"since": "then"})
    (system.folder / "g2.sqlite").rename(system.folder / "old.sqlite")  # the next one has no view of its own
    again.stop()
    for suffix in ("-wal", "-shm"):
        (system.folder / f"g2.sqlite{suffix}").unlink(missing_ok=True)
    anew = system.gateway("g2")
    anew.wait_ready()
    with httpx.Client(base_url=anew.url, timeout=30) as client:
        assert facts(client, "kept")["title"] == "K"


def test_the_stock_client_and_the_command_line(gateways: tuple[httpx.Client, httpx.Client]) -> None:
    first, _ = gateways
    stock = OpenAI(base_url=f"{first.base_url}/v1", api_key="none")
    made = stock.conversations.create(metadata={"topic": "demo"})
    assert made.metadata == {"topic": "demo"}
    assert stock.conversations.update(made.id, metadata={"topic": "other"}).metadata == {"topic": "other"}
    assert stock.conversations.retrieve(made.id).metadata == {"topic": "other"}
    url = ["--url", str(first.base_url)]

    def run(*words: str) -> str:
        done = CliRunner().invoke(app, ["conversations", *words, *url])
        assert done.exit_code == 0, done.output
        return done.stdout

    shown = json.loads(run("create", "cli", "--title", "T", "--metadata", "a=b=c", "--every-turns", "9", "--json"))
    assert (shown["title"], shown["metadata"], shown["summarize"]["every_turns"]) == ("T", {"a": "b=c"}, 9)
    assert "summed up: every 9 turns" in run("set", "cli")
    assert "summed up: every 4000 tokens by small" in run(
        "set", "cli", "--every-tokens", "4000", "--summary-model", "small"
    )
    assert "summed up: not by itself" in run("set", "cli", "--every-turns", "0", "--metadata", "")
    assert facts(first, "cli")["metadata"] == {}
    assert "summed up: as the settings say" in run("set", "cli", "--as-settings", "--title", "")
    assert facts(first, "cli")["title"] is None
    wait_until(lambda: "cli" in run("list", "--limit", "100"), 10, "the list lacks it")
    refused = CliRunner().invoke(app, ["conversations", "set", "cli", "--summary-model", "small", *url])
    assert refused.exit_code == 2


def test_what_is_changed_while_it_is_deleted_goes_too(gateways: tuple[httpx.Client, httpx.Client]) -> None:
    first, _ = gateways
    names = [f"while{number}" for number in range(12)]
    for name in names:
        first.post("/v1/conversations", json={"id": name, "title": "A"})
        begun, over = threading.Event(), threading.Event()

        def change(path: str, begun: threading.Event, over: threading.Event) -> None:
            with httpx.Client(base_url=first.base_url, timeout=30) as client:
                while not over.is_set():
                    client.post(path, json={"title": "secret"})
                    begun.set()

        changing = threading.Thread(target=change, args=(f"/v1/conversations/{name}", begun, over))
        changing.start()
        assert begun.wait(30)
        assert first.delete(f"/v1/conversations/{name}").status_code == 200
        over.set()
        changing.join()
    for name in names:
        first.post("/v1/conversations", json={"id": name})
    listed = {one["id"]: one["title"] for one in first.get("/v1/conversations?limit=100").json()["data"]}
    assert [name for name in names if listed[name] is not None] == []
