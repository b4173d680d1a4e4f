"""Pages of conversations by a real gateway and broker: what they read, and what deletion, erasure and restarts do."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from penstock.common import admin
from penstock.common.conversations import read_conversation
from penstock.gateway.context import context_of_app
from penstock.gateway.conversations.pages import Conversations
from penstock.gateway.edge.keys import create_key
from penstock.gateway.routes import conversations
from penstock.schemas.codec import default_codec
from penstock.schemas.errors import NotFound
from penstock.schemas.records import ConversationMessage, conversation_message_key
from support import wait_until

TURNS = 400
ORDERED: dict[str, dict[str, str]] = {"replay": {}, "items": {"order": "asc"}}


def turn(number: int, direction: str, conversation_id: str = "c") -> ConversationMessage:
    return ConversationMessage(
        tenant="default",
        conversation_id=conversation_id,
        request_id=f"r{number}",
        role="user" if direction == "in" else "assistant",
        direction=direction,
        content=f"{direction} {number}",
        created_at=1,
    )


def put(scribe: Any, message: ConversationMessage, *, erased: bool = False) -> None:
    topic = scribe.names.conversation("default", message.conversation_id)
    scribe.put(topic, None if erased else message, conversation_message_key(message).encode())


def write(scribe: Any, conversation_id: str, turns: int) -> None:
    """A whole conversation; its last record is acknowledged, and so are those before it."""
    topic = scribe.names.conversation("default", conversation_id)
    for number in range(turns):
        for direction in ("in", "out"):
            message = turn(number, direction, conversation_id)
            key = conversation_message_key(message).encode()
            if (number, direction) == (turns - 1, "out"):
                scribe.put(topic, message, key)
            else:
                scribe.transport.send(topic, default_codec().encode(message), key=key)


def reader(gateway: Any) -> Conversations:
    connected = context_of_app(gateway.app).connected
    assert connected is not None
    return connected.conversations


def texts(answer: Any) -> list[str]:
    assert answer.status_code == 200, answer.text
    return [one["content"][0]["text"] for one in answer.json()["data"]]


@pytest.fixture
def gateway(own_place: Any) -> Any:
    started = own_place.gateway()
    assert started.http.post("/v1/conversations", json={"id": "c"}).status_code == 200
    return started


def test_a_page_of_a_long_conversation_reads_its_own_records(own_place: Any, gateway: Any) -> None:
    write(own_place.scribe, "c", TURNS)
    pages, path = reader(gateway), "/v1/conversations/c"

    def read_for(url: str, **params: Any) -> tuple[int, Any]:
        before = pages.indexes.records_read
        answer = gateway.get(url, params=params)
        return pages.indexes.records_read - before, answer

    count, answer = read_for(path)
    assert (count, answer.json()["created_at"] is not None) == (1, True)
    count, answer = read_for(f"{path}/items", limit=2)
    assert texts(answer) == [f"out {TURNS - 1}", f"in {TURNS - 1}"]
    assert count >= 2 * TURNS - 1, "the first page of items reads all once"
    for params, expected in (
        ({"limit": 2}, [f"out {TURNS - 1}", f"in {TURNS - 1}"]),
        ({"limit": 3, "order": "asc"}, ["in 0", "out 0", "in 1"]),
        ({"limit": 2, "order": "asc", "after": "msg_400"}, ["out 200", "in 201"]),
        ({"limit": 2, "after": "msg_400"}, ["out 199", "in 199"]),
    ):
        count, answer = read_for(f"{path}/items", **params)
        assert (count, texts(answer)) == (params["limit"] + 1, expected)
        assert answer.json()["has_more"] is True
    count, answer = read_for(f"{path}/replay", limit=1, from_offset=7)
    assert (count, answer.json()["next_offset"], answer.json()["has_more"]) == (2, 8, True)
    end = answer.json()["end_offset"]
    assert answer.json()["last_id"] == f"7@{end}"
    for number, listed in enumerate(("replay", "items")):  # the first page fixes the end, and `last_id` carries it
        params: dict[str, Any] = {"from_offset": end - 3} if listed == "replay" else {"after": f"msg_{end - 4}"}
        seen, answer = list[int](), gateway.get(f"{path}/{listed}", params={"limit": 1, **ORDERED[listed], **params})
        while True:
            page = answer.json()
            seen += [one["offset"] for one in page["data"]]
            if not page["has_more"]:
                break
            put(own_place.scribe, turn(TURNS + number * 10 + len(seen), "in", "c"))
            params = {"limit": 1, **ORDERED[listed], "after": page["last_id"]}
            answer = gateway.get(f"{path}/{listed}", params=params)
        assert seen == [end - 3, end - 2, end - 1]
        end += 2
    for after in ("7", "7@", "x@9", "-1@9"):
        assert gateway.get(f"{path}/replay", params={"after": after}).status_code == 400
    whole = gateway.get(f"{path}/replay").json()["data"]
    assert [(one["offset"], one["key"]) for one in whole] == [
        (one.offset, one.key) for one in read_conversation(own_place.kafka, "default", "c")
    ]
    assert read_for(path)[0] == 0


def test_what_is_erased_or_deleted_is_gone_at_once_at_every_gateway(own_place: Any, gateway: Any) -> None:
    write(own_place.scribe, "c", 5)
    both = (gateway, own_place.gateway("g2"))
    for one in both:
        assert len(texts(one.get("/v1/conversations/c/items"))) == 10
    put(own_place.scribe, turn(2, "in"), erased=True)
    put(own_place.scribe, turn(5, "in"))
    for one in both:
        found = texts(one.get("/v1/conversations/c/items"))
        assert (found[0], len(found), "in 2" in found) == ("in 5", 10, False)
        places = {item["offset"]: item["message"] for item in one.get("/v1/conversations/c/replay").json()["data"]}
        assert (places[4], places[10]) == (None, None)
    assert gateway.http.delete("/v1/conversations/c").status_code == 200
    for one in both:
        for path in ("", "/items", "/replay"):
            assert one.get(f"/v1/conversations/c{path}").status_code == 404
    assert both[1].http.post("/v1/conversations", json={"id": "c"}).status_code == 200
    for one in both:
        assert texts(one.get("/v1/conversations/c/items")) == []
    write(own_place.scribe, "c", 1)
    for one in both:
        assert texts(one.get("/v1/conversations/c/items")) == ["out 0", "in 0"]


def test_a_conversation_is_read_on_after_its_broker_was_away(own_place: Any, gateway: Any, kafka: Any) -> None:
    write(own_place.scribe, "c", 3)
    assert len(texts(gateway.get("/v1/conversations/c/items"))) == 6
    pages, before = reader(gateway), reader(gateway).indexes.records_read
    kafka.restart()

    def answers() -> bool:
        return gateway.get("/v1/conversations/c/items", params={"limit": 2}).status_code == 200

    wait_until(answers, 60, lambda: gateway.get("/v1/conversations/c/items").text)
    wait_until(lambda: gateway.get("/readyz").status_code == 200, 60, lambda: gateway.get("/readyz").text)
    put(own_place.scribe, turn(3, "in"))
    assert texts(gateway.get("/v1/conversations/c/items", params={"limit": 2})) == ["in 3", "out 2"]
    assert pages.indexes.records_read - before <= 6 + 2 * 3 + 4, "what was indexed was not read again"


def test_the_slow_readings_of_a_tenant_hold_up_no_other(own_place: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = own_place.folder / "keys.json"
    secrets = {tenant: create_key(keys, tenant=tenant) for tenant in ("slow", "quick")}
    gateway = own_place.gateway("keyed", auth={"keys_file": keys})
    headers = {tenant: {"authorization": f"Bearer {secret}"} for tenant, secret in secrets.items()}
    for tenant in secrets:
        body = {"id": "c"}
        assert gateway.http.post("/v1/conversations", json=body, headers=headers[tenant]).status_code == 200
    let_go, begun, end = threading.Event(), threading.Semaphore(0), admin.end_offsets

    def slow_for_one(settings: Any, partitions: Any, *args: Any) -> Any:
        found = list(partitions)
        if found and found[0][0].endswith(own_place.kafka.names.conversation("slow", "c")):
            begun.release()
            let_go.wait(60)
        return end(settings, found, *args)

    monkeypatch.setattr("penstock.gateway.conversations.log.admin.end_offsets", slow_for_one)
    path, answers = "/v1/conversations/c/items", list[int]()

    def read_slowly() -> None:
        answers.append(gateway.get(path, headers=headers["slow"], timeout=90).status_code)

    readers = [threading.Thread(target=read_slowly) for _ in range(12)]
    for one in readers:
        one.start()
    assert begun.acquire(timeout=30)
    assert gateway.get(path, headers=headers["quick"], timeout=30).status_code == 200
    let_go.set()
    for one in readers:
        one.join(60)
    assert answers == [200] * 12


def test_another_tenants_conversation_is_neither_exported_nor_followed(own_place: Any) -> None:
    keys = own_place.folder / "keys.json"
    secrets = {tenant: create_key(keys, tenant=tenant) for tenant in ("owner", "other")}
    gateway = own_place.gateway("keyed", auth={"keys_file": keys})
    headers = {tenant: {"authorization": f"Bearer {secret}"} for tenant, secret in secrets.items()}
    assert gateway.http.post("/v1/conversations", json={"id": "c"}, headers=headers["owner"]).status_code == 200
    exported = gateway.get("/v1/conversations/c/export", headers=headers["owner"])
    assert (exported.status_code, exported.json()["messages"]) == (200, 0)
    with gateway.http.stream("GET", "/v1/conversations/c/events", headers=headers["owner"]) as events:
        assert (events.status_code, next(events.iter_lines())) == (200, "id: -1")
    for path in ("export", "events"):
        assert gateway.get(f"/v1/conversations/c/{path}", headers=headers["other"]).status_code == 404
        assert gateway.get(f"/v1/conversations/c/{path}").status_code == 401
    connected = context_of_app(gateway.app).connected
    assert connected is not None
    wait_until(lambda: len(connected.feeds) == 0, describe="whoever leaves is forgotten")


def test_one_that_was_made_just_now_is_waited_for_until_brokers_know_it(
    own_place: Any, gateway: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    about, unknown = Conversations.about, iter(range(3))

    def late(self: Conversations, tenant: str, conversation_id: str) -> Any:
        if next(unknown, None) is not None:
            raise NotFound("a broker does not know the topic yet")
        return about(self, tenant, conversation_id)

    assert gateway.http.post("/v1/conversations", json={"id": "parent"}).status_code == 200
    write(own_place.scribe, "parent", 1)
    monkeypatch.setattr(Conversations, "about", late)
    forked = gateway.http.post("/v1/conversations/parent/fork", json={"through": 1, "id": "late-fork"})
    assert (forked.status_code, forked.json()["id"]) == (201, "late-fork"), forked.text
    assert next(unknown, None) is None
    unknown = iter(range(3))
    made = gateway.http.post("/v1/conversations", json={"id": "late"})
    assert (made.status_code, made.json()["id"]) == (200, "late"), made.text
    assert next(unknown, None) is None
    monkeypatch.setattr(conversations, "KNOWN_WITHIN_S", 0.1)
    unknown = iter(range(100))
    refused = gateway.http.post("/v1/conversations", json={"id": "later"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "broker_unavailable"), refused.text
