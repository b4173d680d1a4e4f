"""Log probabilities in streams: they come with their text, and go on after a kill without a hole or a repetition."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from streamed import Chat, Serving, serving_tiny

Json = dict[str, Any]
ASK: Json = {"model": "tiny", "temperature": 1.0, "seed": 11}
STORY = [{"role": "user", "content": "Tell me a story."}]


@pytest.fixture(scope="module")
def serving(kafka: Any, tiny_lm: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with serving_tiny(kafka, tiny_lm, tmp_path_factory.mktemp("logprobs")) as started:
        yield started


def post(gateway: str, route: str, body: Json) -> Json:
    answer = httpx.post(f"{gateway}/v1/{route}", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.json()


def stream(gateway: str, route: str, body: Json) -> list[Json]:
    events: list[Json] = []
    with httpx.stream("POST", f"{gateway}/v1/{route}", json={**body, "stream": True}, timeout=120) as answer:
        assert answer.status_code == 200, answer.read()
        events += [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {")]
    return events


def choices_of(chunks: list[Json], index: int) -> list[Json]:
    return [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]


def tokens_of(chunks: list[Json], index: int) -> list[Json]:
    """The tokens of one answer of a streamed chat."""
    choices = choices_of(chunks, index)
    return [one for choice in choices if choice["logprobs"] for one in choice["logprobs"]["content"]]


def same(tokens: list[Json], others: list[Json]) -> bool:
    """Whether they are the same but for rounding: another batch, or a prefill in place of steps."""
    assert [one["token"] for one in tokens] == [one["token"] for one in others]
    assert [one["bytes"] for one in tokens] == [one["bytes"] for one in others]
    values, expected = ([one["logprob"] for one in some] for some in (tokens, others))
    assert values == pytest.approx(expected, abs=1e-4)
    tops, wanted = ([top["logprob"] for one in some for top in one["top_logprobs"]] for some in (tokens, others))
    return tops == pytest.approx(wanted, abs=1e-4)


@pytest.mark.slow
def test_chunks_have_together_what_a_plain_answer_has(serving: Serving) -> None:
    gateway = serving.gateway
    chat = {**ASK, "messages": STORY, "max_tokens": 120, "n": 2, "logprobs": True, "top_logprobs": 2}
    plain, chunks = post(gateway.url, "chat/completions", chat), stream(gateway.url, "chat/completions", chat)
    for choice in plain["choices"]:
        told = tokens_of(chunks, choice["index"])
        assert len(told) == 120
        assert same(told, choice["logprobs"]["content"])
    early = [choice for choice in choices_of(chunks, 0) if choice["logprobs"] and choice["delta"].get("content")]
    assert len(early) > 1, "they come with their text"

    text = {**ASK, "prompt": "Once upon a time", "max_tokens": 120, "logprobs": 2, "stop": ["zzz", "e of"]}
    (whole,) = post(gateway.url, "completions", text)["choices"]
    parts = [one["logprobs"] for one in choices_of(stream(gateway.url, "completions", text), 0) if one["logprobs"]]
    assert len(parts) > 1
    for name in ("tokens", "text_offset"):
        assert [one for part in parts for one in part[name]] == whole["logprobs"][name]
    values = [one for part in parts for one in part["token_logprobs"]]
    assert values == pytest.approx(whole["logprobs"]["token_logprobs"], abs=1e-4)

    include = ["message.output_text.logprobs"]
    asked = {"model": "tiny", "temperature": 0, "input": "Hi", "max_output_tokens": 24, "include": include}
    events = stream(gateway.url, "responses", asked)
    deltas = [one for event in events if event["type"] == "response.output_text.delta" for one in event["logprobs"]]
    (done,) = (event["logprobs"] for event in events if event["type"] == "response.output_text.done")
    assert len(done) == 24
    assert deltas == done[: len(deltas)]
    assert len(deltas) > 20


@pytest.mark.slow
def test_they_go_on_after_a_kill(serving: Serving) -> None:
    """Of their engine; then, when the same is asked again, of their worker.

    Also in several answers of one stream, each of which is a request.
    """
    url = serving.gateway.url
    ask = {**ASK, "max_tokens": 400, "logprobs": True, "top_logprobs": 2, "n": 2, "messages": STORY}
    expected = stream(url, "chat/completions", ask)
    assert [len(tokens_of(expected, index)) for index in (0, 1)] == [400, 400]
    known: set[str] = set()
    for victim in ("engine", "worker"):
        chat = Chat(url, ask)
        chat.read(8)
        serving.kill(victim)
        chat.whole()
        check_whole(chat.chunks, expected)
        gone_on = [event for event in serving.gone_on() if event.request_id not in known]
        assert len(gone_on) == 2, f"they were over before the kill of the {victim}"
        known |= {event.request_id for event in gone_on}
        for event in gone_on:
            told = (event.text_generation or {})["logprobs"]
            streamed = [one for index in (0, 1) for one in tokens_of(chat.chunks, index)]
            assert all(one in streamed for one in told), "the outcome has what was told, to the last digit"


def check_whole(chunks: list[Json], expected: list[Json]) -> None:
    for index in (0, 1):
        text, wanted = (
            "".join(choice["delta"].get("content") or "" for choice in choices_of(some, index))
            for some in (chunks, expected)
        )
        assert text == wanted
        assert same(tokens_of(chunks, index), tokens_of(expected, index))
