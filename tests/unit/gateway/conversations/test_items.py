"""Messages of a conversation as OpenAI's items, and how the command line shows them."""

from __future__ import annotations

from typing import Any

import pytest

from kit.gateway_records import conversation_message
from penstock.cli.commands.item_words import item_role, item_text
from penstock.common.conversations import Turn
from penstock.gateway.openai.conversation_items import items_of_turn
from penstock.gateway.routes.item_ids import offset_of
from penstock.schemas.errors import InvalidRequest

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
