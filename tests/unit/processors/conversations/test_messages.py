"""What a conversation keeps of a turn: its messages and its answer, with calls of tools and what the tools said."""

from typing import Any

from penstock.processors.conversations.messages import answer_message, as_chat, input_messages
from penstock.schemas.codec import default_codec
from penstock.schemas.records import ConversationMessage
from penstock.schemas.requests import parse_request

CALL: dict[str, Any] = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


def test_calls_and_answers_of_tools_survive_the_log() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Add."},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
    ]
    body = {"task": "text_generation", "conversation_id": "c", "payload": {"messages": messages}}
    request = parse_request(body, now_ms=1)
    answer = answer_message(
        request, "", epoch=1, attempt=1, model="m", finish_reason="tool_calls", usage=None, now_ms=1, tool_calls=[CALL]
    )
    codec = default_codec()
    written = map(codec.encode, [*input_messages(request, 1, 1), answer])
    assert [as_chat(codec.decode(one, ConversationMessage)) for one in written] == [
        {"role": "user", "content": "Add."},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "2", "tool_call_id": "c1"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
    ]
