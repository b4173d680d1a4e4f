"""Conversations that several follow live: turns, items of callers, two gateways, kills and deletions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from penstock.common import admin
from penstock.common.transport import Transport
from penstock.schemas.codec import default_codec
from penstock.schemas.records import ConversationMessage, conversation_message_key
from penstock.schemas.sse import SseLines, field_value
from support import wait_until
from system import NOOP, Process, System

Json = dict[str, Any]


SYSTEM = {"models": [{**NOOP, "id": "talk"}], "processes": ["w1", "g1", "g2"]}


@dataclass
class Follower:
    """Reads one stream of events on a thread, until it ends."""

    url: str
    conversation: str
    after: str | None = None
    events: list[Json] = field(default_factory=list[Json])
    at: list[float] = field(default_factory=list[float])
    ended: bool = False

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()
        wait_until(lambda: self.events, 30, lambda: f"no stream of {self.conversation}")

    def _read(self) -> None:
        headers = {} if self.after is None else {"last-event-id": self.after}
        path = f"{self.url}/v1/conversations/{self.conversation}/events"
        lines = SseLines()
        try:
            with httpx.stream("GET", path, headers=headers, timeout=httpx.Timeout(30)) as answer:
                for piece in answer.iter_bytes():
                    for line in lines.feed(piece):
                        if (data := field_value(line, b"data")) is not None:
                            self.events.append(json.loads(data))
                            self.at.append(time.monotonic())
        except httpx.HTTPError:
            pass
        self.ended = True

    @property
    def items(self) -> list[tuple[int, str]]:
        found = [event["item"] for event in self.events if event["type"] == "item"]
        return [(item["offset"], item["content"][0]["text"]) for item in found]

    def wait(self, items: int, deadline_s: float = 30) -> None:
        wait_until(lambda: len(self.items) >= items, deadline_s, lambda: self.events)


def create(gateway: Process, conversation: str) -> None:
    assert httpx.post(f"{gateway.url}/v1/conversations", json={"id": conversation}).status_code == 200


def say(gateway: Process, conversation: str, text: str, task: str = "text_generation") -> None:
    payload = {"messages": [{"role": "user", "content": text}]}
    body = {"task": task, "conversation_id": conversation, "payload": payload}
    answer = httpx.post(f"{gateway.url}/v1/requests?wait=30", json=body, timeout=60)
    assert (answer.status_code, answer.json()["status"]) == (200, "completed"), answer.text


def test_participants_at_two_gateways_see_turns_and_items_in_the_same_order(system: System) -> None:
    g1, g2 = system.process("g1"), system.process("g2")
    create(g1, "room")
    say(g1, "room", "before")
    followers = [Follower(one.url, "room") for one in (g1, g1, g2)]
    talkers = [
        threading.Thread(target=say, args=(gateway, "room", f"{name} {number}", task))
        for number in range(5)
        for gateway, name, task in ((g1, "ann", "text_generation"), (g2, "bob", "conversation_items"))
    ]
    for one in talkers:
        one.start()
    for one in talkers:
        one.join(60)
    for follower in followers:
        follower.wait(15)
    listed = httpx.get(f"{g1.url}/v1/conversations/room/items?order=asc&limit=100").json()["data"]
    expected = [(item["offset"], item["content"][0]["text"]) for item in listed[2:]]
    assert [follower.items for follower in followers] == [expected] * 3


def test_an_item_comes_soon_after_it_was_appended(system: System) -> None:
    """The view's news wake the feed: nobody waits for the look that comes every two seconds."""
    g1 = system.process("g1")
    create(g1, "soon")
    follower = Follower(g1.url, "soon")
    took: list[float] = []
    for number in range(5):
        began = time.monotonic()
        say(g1, "soon", f"{number}")
        follower.wait(2 * number + 2)
        took.append(follower.at[-1] - began)
    assert min(took) < 1, took


def test_a_follower_goes_on_where_it_was_at_another_gateway(system: System) -> None:
    g1, g2 = system.process("g1"), system.process("g2")
    create(g1, "moved")
    follower = Follower(g1.url, "moved")
    assert follower.events[0]["cursor"] == "-1"
    say(g1, "moved", "one")
    follower.wait(2)
    say(g1, "moved", "two")
    again = Follower(g2.url, "moved", follower.events[1]["cursor"])
    again.wait(3)
    assert [offset for offset, _ in again.items] == [1, 2, 3]
    refused = httpx.get(f"{g1.url}/v1/conversations/moved/events?after=99")
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_cursor")
    assert httpx.get(f"{g1.url}/v1/conversations/nowhere/events").status_code == 404


def test_a_deletion_ends_the_streams_at_every_gateway(system: System) -> None:
    g1, g2 = system.process("g1"), system.process("g2")
    create(g1, "gone")
    followers = [Follower(one.url, "gone") for one in (g1, g2)]
    assert httpx.delete(f"{g1.url}/v1/conversations/gone").status_code == 200
    for follower in followers:
        wait_until(lambda: follower.ended, 40, lambda: follower.events)  # noqa: B023
        assert follower.events[-1]["type"] == "deleted"


def test_what_others_write_to_the_topic_comes_too(system: System) -> None:
    g1 = system.process("g1")
    create(g1, "foreign")
    follower = Follower(g1.url, "foreign")
    settings = system.kafka
    made = ConversationMessage(
        tenant="default",
        conversation_id="foreign",
        request_id="r",
        direction="in",
        role="user",
        content="x",
        created_at=1,
    )
    transport = Transport(settings)
    key = conversation_message_key(made).encode()
    transport.send(settings.names.conversation("default", "foreign"), default_codec().encode(made), key=key)
    transport.close()
    follower.wait(1)


def test_many_followers_cost_no_consumers(system: System) -> None:
    """Threads of the gateway's process: librdkafka has some for each consumer."""
    import psutil

    g1 = system.process("g1")
    names = [f"many-{number}" for number in range(20)]
    for name in names:
        create(g1, name)
        say(g1, name, "begun")
    process = psutil.Process(g1.popen.pid)
    before = process.num_threads()
    followers = [Follower(g1.url, name) for name in names for _ in range(5)]
    for name in names:
        say(g1, name, "more")
    for follower in followers:
        follower.wait(2)
    assert process.num_threads() - before < 60, "eight readers at most, whoever follows"


def test_the_command_follows_over_a_kill_of_its_gateway(system: System) -> None:
    g3 = system.gateway("g3").wait_ready()
    create(g3, "watched")
    command = [sys.executable, "-m", "penstock.cli.main", "conversations", "follow", "watched", "--json"]
    process = subprocess.Popen(
        [*command, "--url", g3.url], stdout=subprocess.PIPE, text=True, env={**os.environ, "COLUMNS": "200"}
    )
    assert process.stdout is not None
    assert json.loads(process.stdout.readline())["type"] == "following"
    say(g3, "watched", "one")
    first = [json.loads(process.stdout.readline()) for _ in range(2)]
    g3.kill9()
    say(system.process("g1"), "watched", "two")
    system.gateway("g4", port=g3.port).wait_ready()
    second = [json.loads(process.stdout.readline()) for _ in range(2)]
    assert [event["cursor"] for event in [*first, *second]] == ["0", "1", "2", "3"]
    assert httpx.delete(f"{system.process('g1').url}/v1/conversations/watched").status_code == 200
    assert json.loads(process.stdout.readline())["type"] == "deleted"
    assert process.wait(30) == 0
    settings = system.kafka
    assert admin.topic_id(settings, settings.names.conversation("default", "watched")) is None


def test_a_gateway_that_is_stopped_lets_its_followers_go_at_once(system: System) -> None:
    g5 = system.gateway("g5").wait_ready()
    create(g5, "stopped")
    followers = [Follower(g5.url, "stopped") for _ in range(3)]
    assert g5.stop() == 0
    for follower in followers:
        wait_until(lambda: follower.ended, 10)  # noqa: B023
        assert [event["type"] for event in follower.events] == ["following"]


@pytest.mark.thorough
def test_a_broker_that_restarts_is_waited_for_and_ends_no_stream(system: System, kafka: Any) -> None:
    g1 = system.process("g1")
    create(g1, "patient")
    follower = Follower(g1.url, "patient")
    kafka.restart()

    def said() -> bool:
        payload = {"messages": [{"role": "user", "content": "still there?"}]}
        body = {"task": "text_generation", "conversation_id": "patient", "payload": payload}
        answer = httpx.post(f"{g1.url}/v1/requests?wait=30", json=body, timeout=60)
        return answer.status_code == 200 and answer.json()["status"] == "completed"

    wait_until(said, 120)
    follower.wait(2, 60)
    assert follower.items[0][1] == "still there?"
    assert not follower.ended


def test_a_fork_is_followed_and_exported_with_what_it_inherits(system: System) -> None:
    g1, g2 = system.process("g1"), system.process("g2")
    create(g1, "stem")
    for text in ("one", "two", "three"):
        say(g1, "stem", text)
    items = httpx.get(f"{g1.url}/v1/conversations/stem/items?order=asc").json()["data"]
    through = items[3]["offset"]
    made = httpx.post(f"{g1.url}/v1/conversations/stem/fork", json={"through": through, "id": "twig"}, timeout=30)
    assert made.status_code == 201, made.text
    new, whole = Follower(g1.url, "twig"), Follower(g2.url, "twig", after="-1")
    say(g2, "twig", "four")
    for follower, count in ((new, 2), (whole, 6)):
        follower.wait(count)
    own = httpx.get(f"{g2.url}/v1/conversations/twig/items?order=asc").json()["data"]
    told = [(item["offset"], item["content"][0]["text"]) for item in own]
    assert whole.items == told
    assert [offset for offset, _ in told[:4]] == [item["offset"] for item in items[:4]]
    assert new.items == told[4:]
    lines = httpx.get(f"{g1.url}/v1/conversations/twig/export").text.splitlines()
    head, *messages = map(json.loads, lines)
    assert head["messages"] == len(messages) == 6
    parent = Follower(g1.url, "stem")
    assert httpx.delete(f"{g2.url}/v1/conversations/stem", timeout=30).status_code == 200
    wait_until(lambda: parent.ended, 30, "the deleted conversation is followed on, since its topic stays")
    say(g1, "twig", "five")
    whole.wait(8)
    new.wait(4)
