"""Conversations in the console, in a browser: read in pages, followed, asked in, forked, summed up, deleted."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from hostile_images import png
from kit.console import HOSTILE, PHONE, Opener, gone, log_in, told, violations, wider_than
from penstock.gateway.edge.keys import create_key
from support import wait_until
from system import NOOP, Process, System, running

TURNS = 10_000
SHOWN_WITHIN_S = 3.0
MODEL = {**NOOP, "tasks": ["text_generation", "summarization"], "options": {"tokens": 30, "delay_ms": 20}}

SLOW = {**NOOP, "id": "slow", "options": {"tokens": 50, "delay_ms": 100}}


@pytest.fixture(scope="module")
def system(kafka: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    folder = tmp_path_factory.mktemp("talks")
    keys = folder / "keys.json"
    system = System(kafka.bootstrap_servers, "talks-", folder, models=[MODEL, SLOW])
    system.keys = {"acme": create_key(keys, tenant="acme", scopes=["read", "submit", "cancel"])}
    system.auth = {"keys_file": str(keys), "ticket_key": "shared"}
    with running(system):
        yield system.start_all(["w1", "g1"])


@pytest.fixture
def http(system: System, gateway: Process) -> Iterator[httpx.Client]:
    headers = {"authorization": f"Bearer {system.keys['acme']}"}
    with httpx.Client(base_url=f"{gateway.url}/v1/conversations", headers=headers, timeout=60) as client:
        yield client


def append(http: httpx.Client, name: str, *items: dict[str, Any]) -> None:
    answer = http.post(f"/{name}/items", json={"items": items})
    assert answer.status_code == 200, answer.text


def said(text: str, role: str = "user") -> dict[str, Any]:
    return {"type": "message", "role": role, "content": text}


def test_a_conversation_is_begun_asked_in_followed_forked_summed_up_exported_and_deleted(
    system: System, gateway: Process, http: httpx.Client, open_page: Opener
) -> None:
    page = open_page(gateway, "#/conversations")
    page.on("dialog", lambda dialog: dialog.accept())
    log_in(page, system.keys["acme"])
    told(page, "None. A request with a conversation_id begins one")
    page.locator("section[aria-labelledby=new]").get_by_label("Id").fill("trip")
    page.get_by_label("Title").fill(HOSTILE)
    page.keyboard.press("Enter")
    told(page, "No turns yet")
    turns = page.locator(".turn")
    page.get_by_label("Message").fill(f"Where to? {HOSTILE}")
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    wait_until(lambda: page.locator(".answer").inner_text(), 20, "the answer is shown while it is made")
    wait_until(lambda: turns.count() == 2, 20, page.inner_text("main"))
    question, answer = reversed(http.get("/trip/items").json()["data"])
    assert question["content"][0]["text"] in turns.nth(0).inner_text()
    assert answer["content"][0]["text"].strip() in turns.nth(1).inner_text()
    assert HOSTILE in page.inner_text("dl")

    call = {"type": "function_call", "call_id": "c", "name": "weather", "arguments": '{"city": "Paris"}'}
    image = {"type": "input_image", "image_url": f"data:image/png;base64,{base64.b64encode(png(8, 8)).decode()}"}
    looks = {"type": "message", "role": "user", "content": [image, {"type": "input_text", "text": "Look"}]}
    append(http, "trip", call, {"type": "function_call_output", "call_id": "c", "output": HOSTILE}, looks)
    told(page, "weather")
    page.get_by_role("img", name="image of offset 4").wait_for()
    assert page.evaluate("document.querySelector('.turn img').decode().then(() => true)")
    assert HOSTILE in turns.nth(3).inner_text()
    assert violations(page) == []

    page.get_by_role("button", name="fork behind offset 0").click()
    told(page, "goes on from")
    wait_until(lambda: turns.count() == 1, 10, page.inner_text("main"))
    fork = page.url.rpartition("/")[2]
    assert http.get(f"/{fork}").json()["forked_from"] == {"conversation_id": "trip", "through": 0}
    tree = page.locator("section[aria-labelledby=tree]")
    tree.get_by_role("link", name="trip").click()
    wait_until(lambda: turns.count() == 5, 10, page.inner_text("main"))

    page.get_by_role("button", name="Summarize").click()
    told(page, "completed", 20)
    records = http.get("/trip/replay").json()["data"]
    assert [one["message"]["direction"] for one in records][-1] == "summary"
    with page.expect_download() as download:
        page.get_by_role("link", name="Export", exact=True).click()
    lines = [json.loads(line) for line in Path(download.value.path()).read_text().splitlines()]
    assert (lines[0]["id"], lines[0]["messages"], lines[0]["summaries"]) == ("trip", 5, 1)
    page.get_by_role("button", name="delete the conversation trip").click()
    told(page, "New conversation", 20)
    assert http.get("/trip").status_code == 404

    page.goto(f"{gateway.url}/#/conversations/begun")
    told(page, "not_found")
    page.get_by_label("Message").fill("Where to?")
    page.get_by_role("button", name="Ask").click()
    wait_until(lambda: turns.count() == 2, 20, page.inner_text("main"))
    told(page, "newest record")
    gone(page, "not_found")
    page.get_by_label("Message").fill("And then?")
    page.get_by_label("Model").select_option("slow")
    page.get_by_role("button", name="Ask").click()
    wait_until(lambda: page.locator(".answer").inner_text(), 20, "the answer is shown while it is made")
    page.get_by_role("link", name="All conversations").click()
    told(page, "New conversation")
    page.go_back()
    wait_until(lambda: page.locator(".answer").inner_text(), 20, "it is shown again")
    wait_until(lambda: turns.count() == 4, 20, page.inner_text("main"))
    page.locator(".answer").wait_for(state="detached", timeout=10_000)
    open_page.expect("401", "404")


def test_ten_thousand_turns_are_read_in_pages_and_followed_across_a_kill_of_the_gateway(
    system: System, gateway: Process, http: httpx.Client, open_page: Opener
) -> None:
    for begin in range(0, TURNS, 1_000):
        append(http, "long", *(said(f"turn {number}.") for number in range(begin, begin + 1_000)))
    page = open_page(gateway, color_scheme="dark")
    log_in(page, system.keys["acme"])
    told(page, "tenant acme")
    page.goto(f"{gateway.url}/#/conversations/long")
    told(page, f"turn {TURNS - 1}.", SHOWN_WITHIN_S)
    assert page.locator(".turn").count() == 50
    page.get_by_role("link", name="Earlier").click()
    told(page, f"turn {TURNS - 51}.", SHOWN_WITHIN_S)
    page.get_by_role("link", name="Beginning").click()
    told(page, "turn 0.", SHOWN_WITHIN_S)
    page.get_by_role("link", name="Later").click()
    told(page, "turn 50.", SHOWN_WITHIN_S)
    assert page.locator(".turn").count() == 50
    page.get_by_role("link", name="Newest").click()
    told(page, "follows what comes")
    gateway.kill9()
    told(page, "the connection has ended")
    system.gateway("g2", port=gateway.port).wait_ready()
    append(http, "long", said("after the kill"))
    told(page, "after the kill", 20)
    assert [one["offset"] for one in http.get("/long/items", params={"limit": 1}).json()["data"]] == [TURNS]
    assert violations(page) == []
    assert wider_than(page, PHONE) == []
    open_page.expect("401", "ERR_", "503")
