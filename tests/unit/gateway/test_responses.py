"""The writer of /v1/responses, also of those in the background: the same events from any position."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.refusals import refused
from penstock.gateway.limits.callers import Caller
from penstock.gateway.openai.endpoints import RESPONSE
from penstock.gateway.openai.responses_answers import Asked, ResponseWriter, repeated_fields, response
from penstock.gateway.openai.responses_bodies import ResponsesBody
from penstock.gateway.openai.responses_streams import FIRST_DELTA, BackgroundWriter, background_events
from penstock.gateway.openai.splice import CallSplice
from penstock.gateway.openai.stored_responses import asked_of, input_items, request_id_of, unfinished
from penstock.gateway.service.subscriptions import Stopping
from penstock.gateway.view.frames import ChunkFrame, Frame, ResultFrame, StatusFrame
from penstock.schemas.codec import default_codec
from penstock.schemas.errors import (
    Cancelled,
    EngineFailed,
    InvalidRequest,
    NotFound,
    PenstockError,
    StreamRestarted,
    UnsupportedParameter,
    error_body,
)
from penstock.schemas.records import InferenceRequest

CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
PLAIN = Asked(request_id="r1", created=1, model="m", metadata={}, repeated=repeated_fields(ResponsesBody(input="hi")))


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
    writer = ResponseWriter(PLAIN)
    made = [*writer.opening()]
    for text, pieces in steps:
        made += writer.calls(pieces) if text == "calls" else writer.text(text, pieces)
    return events(writer.encoded([*made, *writer.ending(result)]))


def of(sent: list[dict[str, Any]], kind: str, field: str) -> list[Any]:
    return [event[field] for event in sent if event["type"] == f"response.{kind}"]


def test_an_answer_that_was_cut_is_incomplete() -> None:
    result = {"text": "abc", "finish_reason": "length", "usage": {"prompt_tokens": 1, "completion_tokens": 2}}
    whole = response(PLAIN, result)
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
    (call,) = response(PLAIN, {"text": "", "tool_calls": [CALL]})["output"]
    assert call["type"] == "function_call"
    (message,) = response(PLAIN, {"text": ""})["output"]
    assert message["content"][0]["text"] == ""


def test_a_failure_ends_the_stream_as_openai_ends_it() -> None:
    sent = events(ResponseWriter(PLAIN).failure(EngineFailed("no")))
    assert [event["type"] for event in sent] == ["response.created", "response.in_progress", "response.failed"]
    assert sent[-1]["response"]["error"] == {"code": "engine_failed", "message": "no"}


# -- background responses


TOOL = {"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True}


def request_of(**fields: Any) -> InferenceRequest:
    """As it comes back from its topic."""
    body = ResponsesBody.model_validate({"input": "hi", "background": True, **fields})
    sent = RESPONSE.ask(body, Caller(tenant="t"), 5_000)
    return default_codec().decode(default_codec().encode(sent), InferenceRequest)


ASKED = asked_of(request_of(), 5_000, "m")


def test_a_response_whose_previous_one_was_not_looked_up_is_refused() -> None:
    """As in a line of a batch: without the earlier items another answer would come."""
    body = ResponsesBody.model_validate({"input": "hi", "previous_response_id": "resp_1"})
    with refused(UnsupportedParameter, param="previous_response_id"):
        RESPONSE.ask(body, Caller(tenant="t"), 5_000)
    earlier = [{"role": "user", "content": "hello"}]
    body.go_on_behind(earlier, [{"role": "user", "content": "hi"}])
    made = RESPONSE.ask(body, Caller(tenant="t"), 5_000)
    assert [one["content"] for one in (made.payload or {})["messages"]] == ["hello", "hi"]
    assert repeated_fields(body)["previous_response_id"] == "resp_1"


@pytest.mark.parametrize(
    ("own", "param"),
    [
        ([{"role": "user", "content": "hi"}, {"type": "computer_call"}], "input[1]"),
        ([{"role": "king", "content": "hi"}], "input[0].role"),
        ([{"type": "input_image"}, {"role": "user", "content": "hi"}], "input[0]"),
        (
            [{"role": "user", "content": [{"type": "input_image", "image_url": "data:x"}]}],
            "input[0].content[0].image_url",
        ),
    ],
)
def test_a_refused_item_is_named_by_its_place_among_those_that_were_sent(own: list[Any], param: str) -> None:
    body = ResponsesBody.model_validate({"input": "", "previous_response_id": "resp_1", "instructions": "be brief"})
    body.go_on_behind([{"role": "user", "content": "hello"}, {"role": "assistant", "content": "yes"}], own)
    with refused(PenstockError, param=param):
        RESPONSE.images(body, Caller(tenant="t"))
        RESPONSE.ask(body, Caller(tenant="t"), 5_000)


async def told(frames: Sequence[Frame | PenstockError], after: int | None = None) -> list[dict[str, Any]]:
    """The events of a subscription to these frames; the last one may be an error."""
    subscription = Mock(**{"take_nowait.return_value": []}, next_frame=AsyncMock(side_effect=frames))
    stream = background_events(subscription, BackgroundWriter(ASKED, after), AsyncMock(side_effect=lambda one: one))
    encoded = b"".join([events async for events in stream])
    return [json.loads(event.split("\ndata: ")[1]) for event in encoded.decode().split("\n\n")[:-1]]


OF_R: dict[str, Any] = {"request_id": "r", "cursor": None}


def status(name: str) -> StatusFrame:
    return StatusFrame(**OF_R, status=name, done=False)


def chunk(text: str, at: int, ends: Sequence[int] = ()) -> ChunkFrame:
    return ChunkFrame(**OF_R, text=text, offset=at, ends=ends)


def end(text: str, **more: Any) -> ResultFrame:
    return ResultFrame(**OF_R, status="completed", result={"text": text, **more}, error=None)


def ended(error: PenstockError, name: str) -> ResultFrame:
    return ResultFrame(**OF_R, status=name, result=None, error=error_body(error, "r")["error"])


@given(st.lists(st.text("ab🗼", min_size=1, max_size=4), max_size=8), st.data())
async def test_each_reader_finds_the_same_events(pieces: list[str], data: st.DataObject) -> None:
    """Live, or all pieces at once; from the beginning, or behind any event. The outcome has more than the pieces."""
    text, ends = "".join(pieces), [sum(map(len, pieces[: n + 1])) for n in range(len(pieces))]
    result = end(text + data.draw(st.text("cd", max_size=3)), tool_calls=data.draw(st.sampled_from([[], [CALL]])))
    live: list[Frame] = [status("queued"), status("running")]
    live += [chunk(piece, stop - len(piece)) for piece, stop in zip(pieces, ends, strict=True)]
    at_once = [chunk(text, 0, ends)] if text else []
    events = await told([*live, result])
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[-1]["type"] == "response.completed"
    if pieces:
        assert events[FIRST_DELTA]["delta"] == pieces[0]
    after = data.draw(st.integers(0, len(events)))
    assert await told([*live, result], after) == events[after + 1 :]
    assert await told([*at_once, result], after) == events[after + 1 :]
    assert await told([status("queued"), *at_once, result]) == events


async def test_a_cancelled_response_and_a_broken_stream_end_differently() -> None:
    begun = [status("queued")]
    cancelled = await told([*begun, ended(Cancelled("stop"), "cancelled")])
    types = [event["type"].removeprefix("response.") for event in cancelled]
    assert types == ["created", "queued", "in_progress", "failed"]
    assert (cancelled[-1]["response"]["status"], cancelled[-1]["response"]["error"]) == ("cancelled", None)
    broken = await told([status("running"), chunk("a", 0), Stopping("elsewhere")])
    assert (broken[-1]["type"], broken[-1]["code"]) == ("error", "overloaded")
    assert broken[-1]["sequence_number"] == broken[-2]["sequence_number"], "the client goes on behind what it has"
    with pytest.raises(StreamRestarted):
        await told([StreamRestarted("anew")], 7)


def test_a_stored_response_shows_what_the_first_response_showed() -> None:
    schema = {"type": "json_schema", "name": "s", "schema": {"type": "object"}}
    fields: dict[str, Any] = {"instructions": "brief", "tools": [TOOL], "metadata": {"a": "b"}}
    fields |= {"text": {"format": schema}, "max_output_tokens": 9, "temperature": 0.5}
    fields |= {"prompt_cache_key": "k", "service_tier": "flex"}
    asked = asked_of(request_of(**fields), 5_999, None)
    body = ResponsesBody.model_validate({"input": "hi", "background": True, **fields})
    assert (asked.created, asked.metadata, asked.repeated) == (5, {"a": "b"}, repeated_fields(body))
    shown = unfinished(asked, "queued")
    assert (shown["status"], shown["background"], shown["store"], shown["tools"]) == ("queued", True, True, [TOOL])
    assert unfinished(asked, "retrying")["status"] == "in_progress"


def test_a_response_that_is_not_stored_is_not_found() -> None:
    request = request_of(background=False, store=False)
    assert request.response_object is None
    with pytest.raises(NotFound):
        asked_of(request, 1, None)
    with pytest.raises(NotFound):
        request_id_of("chatcmpl-1")
    with refused(InvalidRequest, param="background"):
        request_of(store=False)


def test_input_items_are_what_the_model_was_given() -> None:
    given: list[dict[str, Any]] = [
        {"role": "developer", "content": "d"},
        {"role": "user", "content": [{"type": "input_text", "text": "see"}, {"type": "input_image", "file_id": "a1"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "yes"}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "20"},
    ]
    request = request_of(input=given, instructions="brief")
    items = input_items(request, asked_of(request, 1, None))
    types = ["message"] * 3 + ["function_call", "function_call_output"]
    assert [item["type"] for item in items] == types
    assert [item.get("role") for item in items] == ["system", "user", "assistant", None, None]
    assert [part["type"] for part in items[1]["content"]] == ["input_text", "input_image"]
    assert (items[2]["content"][0]["text"], items[3]["call_id"], items[4]["output"]) == ("yes", "c1", "20")
    assert len({item["id"] for item in items}) == 5
