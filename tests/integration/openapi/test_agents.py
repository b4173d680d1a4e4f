"""An agent's later turns go the whole way to a remote server, at a gateway in each mode of `unknown_fields`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest

from system import Process, System

if TYPE_CHECKING:
    from .conftest import Remote

USER = {"role": "user", "content": "Weather?"}
CALL = {"id": "call_0", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Paris"}'}}
TURNS: list[dict[str, Any]] = [
    USER,
    {"role": "assistant", "tool_calls": [CALL], "reasoning_content": "I should look.", "annotations": []},
    {"role": "tool", "tool_call_id": "call_0", "name": "weather", "content": "sunny"},
    {"role": "assistant", "content": "Sunny.", "reasoning": "Now I know.", "provider_specific_fields": {"a": None}},
    {"role": "user", "content": "thanks"},
]
OTHERS = {
    "top_k": 40,
    "repetition_penalty": 1.1,
    "min_tokens": 2,
    "ignore_eos": True,
    "truncate_prompt_tokens": 100,
    "chat_template_kwargs": {"enable_thinking": False},
}


@pytest.fixture
def lenient(system: System) -> Iterator[Process]:
    gateway = system.gateway("lenient", env={"PENSTOCK_GATEWAY__UNKNOWN_FIELDS": "ignore"})
    yield gateway.wait_ready()
    if gateway.alive():
        gateway.popen.kill()
        gateway.popen.wait(10)


def ask(url: str, **fields: Any) -> httpx.Response:
    return httpx.post(f"{url}/v1/chat/completions", json={"model": "far", "messages": [USER], **fields}, timeout=60)


def test_the_third_turn_of_an_agent(url: str, remote: Remote) -> None:
    answer = ask(url, messages=TURNS, **OTHERS)
    assert answer.status_code == 200, answer.text
    asked = remote.asked[-1]
    assert asked["messages"] == [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "I should look."},
        TURNS[2],
        {"role": "assistant", "content": "Sunny.", "reasoning_content": "Now I know."},
        TURNS[4],
    ]
    assert {name: asked[name] for name in OTHERS} == OTHERS


def test_thoughts_stay_with_their_message_in_a_conversation(url: str, remote: Remote) -> None:
    assert ask(url, messages=TURNS[:4], penstock={"conversation_id": "thoughts"}).status_code == 200
    assert ask(url, messages=[TURNS[4]], penstock={"conversation_id": "thoughts"}).status_code == 200
    thoughts = [message.get("reasoning_content") for message in remote.asked[-1]["messages"]]
    assert thoughts == [None, "I should look.", None, "Now I know.", None, None]


def test_unknown_fields_in_both_modes(url: str, lenient: Process, remote: Remote) -> None:
    fields: dict[str, Any] = {"use_beam_search": True, "whim": 1, "store": True}
    refused = ask(url, **fields)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "use_beam_search")
    harmless = ask(url, store=True)
    assert harmless.headers["penstock-ignored-fields"] == "store"
    assert "penstock-ignored-fields" not in ask(url).headers
    messages = [{**USER, "mood": "gay"}]
    ignored = ask(lenient.url, messages=messages, **fields)
    names = {"use_beam_search", "whim", "store", "messages[].mood"}
    assert set(ignored.headers["penstock-ignored-fields"].split(", ")) == names
    asked = remote.asked[-1]
    assert asked["messages"] == [USER]
    assert asked.keys().isdisjoint(fields)
    streamed = ask(lenient.url, stream=True, stream_options={"whim": 1}, **fields)
    names = {"use_beam_search", "whim", "store", "stream_options.whim"}
    assert set(streamed.headers["penstock-ignored-fields"].split(", ")) == names
    assert streamed.text.endswith("data: [DONE]\n\n")


def test_items_are_referred_to_at_another_gateway_after_theirs_was_killed(
    url: str, lenient: Process, remote: Remote
) -> None:
    first = openai.OpenAI(base_url=f"{lenient.url}/v1", api_key="unused", max_retries=0).responses.create(
        model="far", input="Hello"
    )
    lenient.popen.kill()
    assert lenient.popen.wait(10) == -9
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0)
    thought: Any = {"type": "item_reference", "id": "rs_1"}
    known: Any = {"type": "item_reference", "id": first.output[0].id}
    items: Any = [{"role": "user", "content": "Hello"}, thought, known, {"role": "user", "content": "More"}]
    assert client.responses.create(model="far", input=items).output_text == "Hello 0"
    said = [(message["role"], message["content"]) for message in remote.asked[-1]["messages"]]
    assert said == [("user", "Hello"), ("assistant", "Hello 0"), ("user", "More")]
    for unknown in ("msg_nobody", "whim", f"{first.output[0].id}x", f"fc_{first.id[5:]}_0"):
        with pytest.raises(openai.NotFoundError) as caught:
            client.responses.create(model="far", input=[*items[:2], {"type": "item_reference", "id": unknown}])
        assert caught.value.body["param"] == "input[2].id"  # pyright: ignore
    request_id = first.id.removeprefix("resp_")
    assert httpx.delete(f"{url}/v1/requests/{request_id}").is_success
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="far", input=items)
