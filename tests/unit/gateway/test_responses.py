"""The writer of /v1/responses: what its stream says, and what becomes of a cut or failed answer."""

from __future__ import annotations

import json
from typing import Any

from penstock.gateway.openai.responses_answers import Asked, ResponseWriter, repeated_fields, response
from penstock.gateway.openai.responses_bodies import ResponsesBody
from penstock.gateway.openai.splice import CallSplice
from penstock.schemas.errors import EngineFailed

CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
ASKED = Asked(request_id="r1", created=1, model="m", metadata={}, repeated=repeated_fields(ResponsesBody(input="hi")))


def events(encoded: bytes) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for event in encoded.decode().split("\n\n")[:-1]:
        name, data = event.split("\n")
        body = json.loads(data.removeprefix("data: "))
        assert name == f"event: {body['type']}"
        found.append(body)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def streamed(result: dict[str, Any], *steps: tuple[str, Any]) -> list[dict[str, Any]]:
    """The events of a whole stream. A step is a text with its log probabilities, or pieces of calls."""
    writer = ResponseWriter(ASKED)
    made = [*writer.opening()]
    for text, pieces in steps:
        made += writer.calls(pieces) if text == "calls" else writer.text(text, pieces)
    return events(writer.encoded([*made, *writer.ending(result)]))


def of(sent: list[dict[str, Any]], kind: str, field: str) -> list[Any]:
    return [event[field] for event in sent if event["type"] == f"response.{kind}"]


def test_an_answer_that_was_cut_is_incomplete() -> None:
    result = {"text": "abc", "finish_reason": "length", "usage": {"prompt_tokens": 1, "completion_tokens": 2}}
    whole = response(ASKED, result)
    assert (whole["status"], whole["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert whole["usage"]["total_tokens"] == 3
    last = streamed(result, ("abc", []))[-1]
    assert (last["type"], last["response"]["output"]) == ("response.incomplete", whole["output"])


def test_log_probabilities_come_with_the_text_behind_them_and_all_at_the_end() -> None:
    first, rest = ([{"token": letter, "logprob": -0.5, "bytes": None, "top_logprobs": None}] for letter in "ab")
    sent = streamed({"text": "ab", "logprobs": [*first, *rest]}, ("", first), ("a", []), ("b", rest))
    shown = [{**one, "bytes": [], "top_logprobs": []} for one in (*first, *rest)]
    assert of(sent, "output_text.delta", "logprobs") == [shown[:1], shown[1:]]
    assert of(sent, "output_text.done", "logprobs") == [shown]
    assert sent[-1]["response"]["output"][0]["content"][0]["logprobs"] == shown


def test_text_and_calls_are_items_of_their_own() -> None:
    calls = [CALL, {**CALL, "id": "c2"}]
    result = {"text": "abc", "tool_calls": calls, "finish_reason": "tool_calls"}
    sent = streamed(result, ("abc", []), ("calls", CallSplice().finish(calls)))
    types = ["message", "function_call", "function_call"]
    assert of(sent, "output_item.added", "output_index") == [0, 1, 2]
    assert [item["type"] for item in of(sent, "output_item.added", "item")] == types
    assert [item["type"] for item in sent[-1]["response"]["output"]] == types


def test_a_call_is_sent_in_pieces_and_items_are_in_the_order_in_which_they_began() -> None:
    first = {"index": 0, "id": "c1", "name": "f", "arguments": "", "offset": 0}
    more = {"index": 0, "id": None, "name": None, "arguments": '{"a"', "offset": 0}
    rest = {**more, "arguments": ": 1}", "offset": 4}
    call = {**CALL, "function": {"name": "f", "arguments": '{"a": 1}'}}
    sent = streamed({"text": "so", "tool_calls": [call]}, ("calls", [first]), ("calls", [more, rest]), ("so", []))
    assert of(sent, "function_call_arguments.delta", "delta") == ['{"a"', ": 1}"]
    assert of(sent, "function_call_arguments.done", "arguments") == ['{"a": 1}']
    output = sent[-1]["response"]["output"]
    assert [item["type"] for item in output] == ["function_call", "message"]
    done = zip(of(sent, "output_item.done", "output_index"), of(sent, "output_item.done", "item"), strict=True)
    assert all(output[index] == item for index, item in done)


def test_an_answer_of_calls_alone_has_no_message() -> None:
    (call,) = response(ASKED, {"text": "", "tool_calls": [CALL]})["output"]
    assert call["type"] == "function_call"
    (message,) = response(ASKED, {"text": ""})["output"]
    assert message["content"][0]["text"] == ""


def test_a_failure_ends_the_stream_as_openai_ends_it() -> None:
    sent = events(ResponseWriter(ASKED).failure(EngineFailed("no")))
    assert [event["type"] for event in sent] == ["response.created", "response.in_progress", "response.failed"]
    assert sent[-1]["response"]["error"] == {"code": "engine_failed", "message": "no"}
