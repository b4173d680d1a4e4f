"""The writer of /v1/responses: what its stream says, and what a cut or failed answer becomes."""

from __future__ import annotations

import json
from typing import Any

from penstock.gateway.openai.responses_answers import Asked, ResponseWriter, repeated_fields, response
from penstock.gateway.openai.responses_bodies import ResponsesBody
from penstock.gateway.openai.splice import CallSplice
from penstock.schemas.errors import EngineFailed

CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def asked() -> Asked:
    return Asked(
        request_id="r1", created=1, model="m", metadata={}, repeated=repeated_fields(ResponsesBody(input="hi"))
    )


def events(encoded: bytes) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for event in encoded.decode().split("\n\n")[:-1]:
        name, data = event.split("\n")
        body = json.loads(data.removeprefix("data: "))
        assert name == f"event: {body['type']}"
        found.append(body)
    return found


def test_an_answer_that_was_cut_is_incomplete() -> None:
    result = {"text": "abc", "finish_reason": "length", "usage": {"prompt_tokens": 1, "completion_tokens": 2}}
    made = response(asked(), result)
    assert (made["status"], made["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert made["usage"]["total_tokens"] == 3
    writer = ResponseWriter(asked())
    told = events(writer.encoded([*writer.opening(), *writer.text("abc", []), *writer.ending(result)]))
    assert told[-1]["type"] == "response.incomplete"
    assert told[-1]["response"]["output"] == made["output"]


def test_log_probabilities_come_with_the_text_behind_them_and_all_at_the_end() -> None:
    first, rest = ([{"token": letter, "logprob": -0.5, "bytes": None, "top_logprobs": None}] for letter in "ab")
    writer = ResponseWriter(asked())
    made = [*writer.opening(), *writer.text("", first), *writer.text("a", []), *writer.text("b", rest)]
    told = events(writer.encoded([*made, *writer.ending({"text": "ab", "logprobs": [*first, *rest]})]))
    deltas = [event["logprobs"] for event in told if event["type"] == "response.output_text.delta"]
    shown = [{**one, "bytes": [], "top_logprobs": []} for one in (*first, *rest)]
    assert deltas == [shown[:1], shown[1:]]
    (done,) = (event["logprobs"] for event in told if event["type"] == "response.output_text.done")
    assert done == shown == told[-1]["response"]["output"][0]["content"][0]["logprobs"]


def test_text_and_calls_have_places_of_their_own() -> None:
    result = {"text": "abc", "tool_calls": [CALL, {**CALL, "id": "c2"}], "finish_reason": "tool_calls"}
    writer = ResponseWriter(asked())
    begun = CallSplice().finish([CALL, {**CALL, "id": "c2"}])
    told = events(
        writer.encoded([*writer.opening(), *writer.text("abc", []), *writer.calls(begun), *writer.ending(result)])
    )
    added = [(event["output_index"], event["item"]["type"]) for event in told if event["type"].endswith("item.added")]
    assert added == [(0, "message"), (1, "function_call"), (2, "function_call")]
    assert [item["type"] for item in told[-1]["response"]["output"]] == ["message", "function_call", "function_call"]
    assert [event["sequence_number"] for event in told] == list(range(len(told)))


def test_a_call_comes_in_pieces_and_items_stand_in_the_order_in_which_they_began() -> None:
    writer = ResponseWriter(asked())
    first = {"index": 0, "id": "c1", "name": "f", "arguments": "", "offset": 0}
    more = {"index": 0, "id": None, "name": None, "arguments": '{"a"', "offset": 0}
    rest = {**more, "arguments": ": 1}", "offset": 4}
    call = {**CALL, "function": {"name": "f", "arguments": '{"a": 1}'}}
    said = [*writer.opening(), *writer.calls([first]), *writer.calls([more, rest]), *writer.text("so", [])]
    told = events(writer.encoded([*said, *writer.ending({"text": "so", "tool_calls": [call]})]))
    deltas = [event["delta"] for event in told if event["type"] == "response.function_call_arguments.delta"]
    assert deltas == ['{"a"', ": 1}"]
    output = told[-1]["response"]["output"]
    assert [item["type"] for item in output] == ["function_call", "message"]
    for event in told:
        if event["type"] == "response.output_item.done":
            assert output[event["output_index"]] == event["item"]
        if event["type"] == "response.function_call_arguments.done":
            assert event["arguments"] == '{"a": 1}'


def test_an_answer_of_calls_alone_has_no_message() -> None:
    assert [item["type"] for item in response(asked(), {"text": "", "tool_calls": [CALL]})["output"]] == [
        "function_call"
    ]
    (message,) = response(asked(), {"text": ""})["output"]
    assert message["content"][0]["text"] == ""


def test_a_failure_ends_the_stream_as_openai_ends_it() -> None:
    told = events(ResponseWriter(asked()).failure(EngineFailed("no")))
    assert [event["type"] for event in told] == ["response.created", "response.in_progress", "response.failed"]
    assert told[-1]["response"]["error"] == {"code": "engine_failed", "message": "no"}
