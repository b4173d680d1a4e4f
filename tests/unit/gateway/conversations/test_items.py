"""Messages of a conversation as OpenAI's items, and exports while the conversation changes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient

from conversation_logs import FakeLog, message, reader
from gateway_parts import service_with
from kit.gateway_http import gateway_app
from kit.gateway_records import conversation_message
from penstock.cli.commands.item_words import item_role, item_text
from penstock.common.conversations import Turn
from penstock.gateway.openai.conversation_items import items_of_turn
from penstock.gateway.routes import conversation_export
from penstock.gateway.routes.item_ids import offset_of
from penstock.schemas.errors import InvalidRequest
from penstock.schemas.topics import TopicNames

CALLS = [{"id": f"c{n}", "type": "function", "function": {"name": "gate", "arguments": f"[{n}]"}} for n in (0, 1)]


def turn(role: str = "user", **fields: Any) -> Turn:
    known: dict[str, Any] = {"direction": "in", "content": "hello", "created_at": 7_000, "request_id": "r"}
    return Turn(offset=5, message=conversation_message(role, **{**known, **fields}))


def test_a_message_is_one_item_with_the_place_in_its_id() -> None:
    (item,) = items_of_turn(turn())
    assert (item["id"], item["type"], item["role"], item["created_at"]) == ("msg_5", "message", "user", 7)
    assert item["content"] == [{"type": "input_text", "text": "hello"}]
    (answer,) = items_of_turn(turn(role="assistant"))
    assert answer["content"] == [{"type": "output_text", "text": "hello", "annotations": []}]
    assert (item_role(item), item_text(item)) == ("user", "hello")


def test_calls_of_tools_and_their_answers_are_items_of_their_own() -> None:
    calls = items_of_turn(turn(role="assistant", content="", tool_calls=CALLS))
    assert [(one["type"], one["id"], one["call_id"]) for one in calls] == [
        ("function_call", "fc_5_0", "c0"),
        ("function_call", "fc_5_1", "c1"),
    ]
    assert (item_role(calls[1]), item_text(calls[1])) == ("assistant", "gate([1])")
    said = items_of_turn(turn(role="assistant", content="I look.", tool_calls=CALLS))
    assert [one["id"] for one in said] == ["msg_5", "fc_5_0", "fc_5_1"]
    (output,) = items_of_turn(turn(role="tool", content="shut", tool_call_id="c0"))
    expected = {"type": "function_call_output", "id": "fco_5", "call_id": "c0", "output": "shut"}
    assert {name: output[name] for name in expected} == expected
    assert (item_role(output), item_text(output)) == ("tool", "shut")
    assert {offset_of(one["id"], "after") for one in [*said, output]} == {5}


@pytest.mark.parametrize("name", ["", "5", "msg_", "msg_x", "other_5", "fc", "msg_-1"])
def test_what_is_no_items_id_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequest):
        offset_of(name, "after")


# -- exports while the conversation changes


TOPIC = TopicNames().conversation("default", "c")


@pytest.fixture
def log() -> FakeLog:
    return FakeLog(TOPIC)


@pytest.fixture
def client(log: FakeLog) -> Iterator[TestClient]:
    app = gateway_app(conversation_export.router, service=service_with(reader(log)))
    with TestClient(app, base_url="http://127.0.0.1", client=("127.0.0.1", 1)) as made:
        yield made


def write(log: FakeLog, *numbers: int, erased: bool = False) -> None:
    for number in numbers:
        log.write(message(f"r{number}", "in", 0, 1), tombstone=erased, topic=TOPIC)


def lines(client: TestClient, query: str = "") -> list[dict[str, Any]]:
    return [json.loads(line) for line in client.get(f"/v1/conversations/c/export{query}").text.splitlines()]


def test_an_export_of_several_pages_is_whole_and_leaves_out_erased_messages(log: FakeLog, client: TestClient) -> None:
    write(log, *range(250))
    write(log, 7, erased=True)
    head, *told = lines(client)
    assert (head["messages"], head["log_id"], len(told)) == (249, "id-0", 249)
    assert [line["source"]["offset"] for line in told] == [n for n in range(250) if n != 7]


def test_a_tree_is_exported_by_several_pages_with_many_erased_messages_between(
    log: FakeLog, client: TestClient
) -> None:
    write(log, *range(1_300))
    write(log, *range(100, 400), erased=True)
    head, *told = lines(client, "?tree=true")
    assert (head["version"], head["messages"], head["forks"]) == (2, 1_000, 0)
    assert [line["source"]["offset"] for line in told] == [*range(100), *range(400, 1_300)]


def while_the_first_page_is_read(log: FakeLog, act: Any) -> None:
    """The read before is that of the index."""
    calls = iter(range(1_000))
    log.before_read = lambda: act() if next(calls) == 1 else None


def test_messages_appended_meanwhile_are_not_exported(log: FakeLog, client: TestClient) -> None:
    write(log, *range(150))
    while_the_first_page_is_read(log, lambda: write(log, 150))
    assert len(lines(client)) == 1 + 150


@pytest.mark.parametrize(("query", "count"), [("", 150), ("?tree=true", 1_100)])
@pytest.mark.parametrize("made_anew", [False, True])
def test_an_export_that_loses_messages_meanwhile_ends_with_an_error(
    log: FakeLog, client: TestClient, made_anew: bool, query: str, count: int
) -> None:
    write(log, *range(count))

    def change() -> None:
        if made_anew:
            log.ids[TOPIC] = "id-1"
        else:
            write(log, count - 10, erased=True)

    while_the_first_page_is_read(log, change)
    last = lines(client, query)[-1]
    assert (last["type"], last["error"]["code"]) == ("error", "conflict")
