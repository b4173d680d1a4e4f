"""/v1/completions: echoes, log probabilities as lists, and calls with several requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from itertools import cycle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.refusals import refused
from penstock.gateway.edge.event_stream import KEEPALIVE
from penstock.gateway.limits.callers import Caller
from penstock.gateway.openai import several
from penstock.gateway.openai.chat_bodies import ChatCompletionBody, CompletionBody, completion_request
from penstock.gateway.openai.completion_answers import CompletionWriter, PlacedTokens, Shape, completion, logprob_lists
from penstock.gateway.openai.several import MOST_REQUESTS, PART, bodies_of, merged_events
from penstock.schemas.errors import Expired, InvalidRequest, PenstockError, UnsupportedParameter

Json = dict[str, Any]


HI = "Hi there"


def body_of(prompt: Any = HI, **fields: Any) -> CompletionBody:
    return CompletionBody.model_validate({"prompt": prompt, **fields})


def payload_of(prompt: Any = HI, **fields: Any) -> Json:
    return completion_request(body_of(prompt, **fields), Caller(tenant="default"), 1).payload


def token(text: str | bytes, logprob: float | None, *top: tuple[str, float]) -> Json:
    written = text if isinstance(text, bytes) else text.encode()
    made: Json = {"token": written.decode(errors="replace"), "logprob": logprob, "bytes": list(written)}
    if top:
        made["top_logprobs"] = [{"token": name, "logprob": value, "bytes": None} for name, value in top]
    return made


PROMPT = [token("Hi", None), token(" there", -2.0, (" you", -0.5))]
RESULT: Json = {
    "text": "!",
    "finish_reason": "stop",
    "usage": {"prompt_tokens": 2, "completion_tokens": 1},
    "logprobs": [token("!", -0.25, ("!", -0.25))],
    "prompt_logprobs": PROMPT,
}


PLAIN = {"prompt": HI, "max_tokens": 16}
SCORED = {"max_tokens": 1, "logprobs": True, "top_logprobs": 3, "prompt_logprobs": 3}


@pytest.mark.parametrize(
    ("fields", "payload"),
    [
        ({}, PLAIN),
        ({"prompt": [1, 2]}, {"prompt_token_ids": [1, 2], "max_tokens": 16}),
        ({"prompt": [[1, 2]], "echo": True}, {"prompt_token_ids": [1, 2], "max_tokens": 16, "prompt_logprobs": 0}),
        ({"echo": True, "best_of": 1}, PLAIN),
        ({"n": 2, "best_of": 2}, {**PLAIN, "n": 2}),
        ({"logprobs": 0}, {**PLAIN, "logprobs": True, "top_logprobs": 0}),
        ({"echo": True, "logprobs": 3, "max_tokens": 0}, {"prompt": HI, **SCORED}),
    ],
)
def test_a_body_becomes_a_payload(fields: Json, payload: Json) -> None:
    assert payload_of(**fields) == payload


@pytest.mark.parametrize(
    ("fields", "kind", "param"),
    [
        ({"prompt": []}, InvalidRequest, "prompt"),
        ({"prompt": ["a", 1]}, InvalidRequest, "prompt[1]"),
        ({"prompt": ["a", "b"]}, UnsupportedParameter, "prompt"),
        ({"max_tokens": 0}, InvalidRequest, "max_tokens"),
        ({"logprobs": 21}, InvalidRequest, "logprobs"),
        ({"best_of": 3, "n": 2}, UnsupportedParameter, "best_of"),
        ({"prompt": [-1]}, InvalidRequest, "prompt[0]"),
    ],
)
def test_a_wrong_body_is_refused_by_the_name_of_its_field(fields: Json, kind: type[PenstockError], param: str) -> None:
    with refused(kind, param=param):
        payload_of(**fields)


def test_a_refused_prompt_is_named_by_its_place() -> None:
    refused = several.at_prompt(InvalidRequest("prompt is too long", param="prompt"), 3)
    assert (refused.message, refused.param) == ("prompt[3] is too long", "prompt[3]")


@pytest.mark.parametrize(("prompts", "n", "param"), [(MOST_REQUESTS + 1, 1, "prompt"), (1, MOST_REQUESTS + 1, "n")])
def test_a_call_has_a_bound(prompts: int, n: int, param: str) -> None:
    with refused(InvalidRequest, param=param):
        bodies_of(body_of(["a"] * prompts, n=n, stream=True), may_split_answers=True)


def answer_of(body: CompletionBody, result: Json = RESULT) -> Json:
    return completion("r", 1, "m", result, Shape.of(body), None)


def test_an_answer_has_its_echo_and_its_log_probabilities_in_four_lists() -> None:
    answer = answer_of(body_of(echo=True, logprobs=1))
    lists = {
        "tokens": ["Hi", " there", "!"],
        "token_logprobs": [None, -2.0, -0.25],
        "top_logprobs": [None, {" you": -0.5, " there": -2.0}, {"!": -0.25}],
        "text_offset": [0, 2, 8],
    }
    assert answer["choices"] == [{"index": 0, "text": "Hi there!", "finish_reason": "stop", "logprobs": lists}]
    assert answer["usage"] == {"prompt_tokens": 2, "completion_tokens": 1, "total_tokens": 3}
    (bare,) = answer_of(body_of(logprobs=1))["choices"]
    assert (bare["text"], bare["logprobs"]["tokens"], bare["logprobs"]["text_offset"]) == ("!", ["!"], [0])


def test_a_call_that_wants_no_token_shows_none() -> None:
    answer = answer_of(body_of([5, 6], echo=True, logprobs=0, max_tokens=0))
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("Hi there", "length")
    assert choice["logprobs"]["token_logprobs"] == [None, -2.0]
    assert answer["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize(
    ("tokens", "text", "names", "offsets"),
    [
        ([b"<s>", b" Hi", b" you"], "Hi you", ["<s>", " Hi", " you"], [0, 0, 2]),
        ([b"\xf0\x9f", b"\x90\xb6", b"b"], "🐶b", [r"bytes:\xf0\x9f", r"bytes:\x90\xb6", "b"], [0, 0, 1]),
        ([b"a", b"<end>"], "a", ["a", "<end>"], [0, 1]),
    ],
)
def test_offsets_count_characters_and_skip_tokens_that_are_no_text(
    tokens: list[bytes], text: str, names: list[str], offsets: list[int]
) -> None:
    lists = logprob_lists([token(one, -1.0) for one in tokens], text)
    assert (lists["tokens"], lists["text_offset"]) == (names, offsets)
    assert lists["top_logprobs"] == [None] * len(tokens)


WORDS = ["<s>", " Hi", " you", "a", "🐶", "ab", " ", "<end>"]


@given(
    words=st.lists(st.sampled_from(WORDS), max_size=8),
    widths=st.lists(st.integers(1, 5), min_size=1, max_size=6),
    cuts=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 6)), max_size=8),
)
def test_tokens_and_text_that_come_in_pieces_have_the_same_places(
    words: list[str], widths: list[int], cuts: list[tuple[int, int]]
) -> None:
    written = "".join(words).encode()
    text = "".join(word for word in words if not word.startswith("<")).lstrip()
    tokens, at = list[Json](), 0
    for width in cycle(widths):
        if at >= len(written):
            break
        tokens.append(token(written[at : at + width], -1.0))
        at += width
    whole = logprob_lists(tokens, text)
    places, made = PlacedTokens(), list[Json]()
    left, rest = tokens, text
    for some, few in cuts:
        made.append(places.take(left[:some], rest[:few]) or {})
        left, rest = left[some:], rest[few:]
    made += [places.take(left, rest) or {}, places.take([], "", final=True) or {}]
    assert {name: [value for one in made for value in one.get(name, [])] for name in whole} == whole


def shown(events: list[Json]) -> list[tuple[str, list[str] | None, str | None]]:
    choices = [event["choices"][0] for event in events if event["choices"]]
    return [(one["text"], one["logprobs"] and one["logprobs"]["tokens"], one["finish_reason"]) for one in choices]


@pytest.mark.parametrize(
    ("fields", "events"),
    [
        ({"echo": True}, [("Hi there", None, None), ("!", None, None), ("", None, "stop")]),
        ({"logprobs": 1}, [("!", ["!"], None), ("", None, "stop")]),
        ({"echo": True, "logprobs": 1}, [("Hi there!", ["Hi", " there", "!"], None), ("", None, "stop")]),
        ({"echo": True, "prompt": [1, 2]}, [("Hi there!", None, None), ("", None, "stop")]),
        ({"echo": True, "max_tokens": 0}, [("Hi there", None, None), ("", None, "length")]),
    ],
)
def test_a_stream_has_what_a_plain_answer_has(fields: Json, events: list[Any]) -> None:
    body = body_of(**fields)
    writer = CompletionWriter("r", 1, "m", shape=Shape.of(body), includes_usage=True, tier=None, first_index=4)
    made = [*writer.opening(), *writer.text("!", RESULT["logprobs"]), *writer.ending(RESULT)]
    assert shown(made) == events
    assert {event["choices"][0]["index"] for event in made[:-1]} == {4}
    assert made[-1]["usage"]["completion_tokens"] == (0 if body.only_prompt else 1)


@pytest.mark.parametrize(
    ("fields", "requests"),
    [
        ({"prompt": ["a", [1, 2]], "n": 3}, [("a", 3, 7), ([1, 2], 3, 7)]),
        ({"prompt": ["a", "b"], "n": 2, "stream": True}, [("a", 1, 7), ("a", 1, 8), ("b", 1, 7), ("b", 1, 8)]),
    ],
)
def test_each_prompt_is_a_request_and_so_is_each_answer_of_a_stream(fields: Json, requests: list[Any]) -> None:
    bodies: Any = bodies_of(body_of(**fields, seed=7, metadata={"k": "v"}), may_split_answers=True)
    assert [(one.prompt, one.n, one.seed) for one in bodies] == requests
    count = len(requests)
    assert [one.metadata for one in bodies] == [{"k": "v", PART: f"{n}/{count}"} for n in range(1, count + 1)]


def test_answers_of_a_chat_are_requests_unless_they_would_be_two_turns() -> None:
    chat: Json = {"messages": [{"role": "user", "content": "hi"}], "n": 2, "stream": True}
    split = ChatCompletionBody.model_validate(chat)
    assert [one.n for one in bodies_of(split, may_split_answers=True)] == [1, 1]
    turn = ChatCompletionBody.model_validate({**chat, "penstock": {"conversation_id": "c"}})
    for whole, may in ((split, False), (turn, True)):
        assert bodies_of(whole, may_split_answers=may) == [whole]


def test_merged_results_count_each_prompt_once() -> None:
    both = {**RESULT, "choices": [{"index": 0, "text": "!"}, {"index": 1, "text": "?"}]}
    whole = several.merged([both, {**both, "prompt_logprobs": [token("Yo", None)]}], 2)
    answer = answer_of(body_of(["Hi there", "Yo"], n=2, echo=True), whole)
    assert [one["index"] for one in answer["choices"]] == [0, 1, 2, 3]
    assert [one["text"] for one in answer["choices"]] == ["Hi there!", "Hi there?", "Yo!", "Yo?"]
    assert answer["usage"] == {"prompt_tokens": 4, "completion_tokens": 2, "total_tokens": 6}


async def stream(*events: bytes, then: Exception | None = None, waits: bool = False) -> AsyncGenerator[bytes]:
    for event in events:
        yield event
    if waits:
        await asyncio.Event().wait()
    if then is not None:
        raise then


async def test_a_stream_that_fails_or_is_left_ends_all() -> None:
    before = asyncio.all_tasks()
    events = merged_events([stream(b"a", waits=True), stream(b"b", then=Expired("too late"))], lambda: b"end")
    assert {await anext(events), await anext(events)} == {b"a", b"b"}
    with pytest.raises(Expired):
        await anext(events)
    assert asyncio.all_tasks() == before
    left = merged_events([stream(b"a", waits=True)], lambda: b"end")
    assert await anext(left) == b"a"
    await left.aclose()
    assert asyncio.all_tasks() == before


@pytest.mark.parametrize(("keepalive_s", "comments"), [(0, 2), (60, 0)])
async def test_keepalives_of_all_parts_are_one_per_interval(keepalive_s: float, comments: int) -> None:
    events = merged_events([stream(KEEPALIVE), stream(KEEPALIVE)], lambda: b"end", keepalive_s=keepalive_s)
    assert [event async for event in events] == [KEEPALIVE] * comments + [b"end"]
