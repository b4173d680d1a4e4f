"""A stream that lost its engine goes on in another one from what was told: one text, whatever its tokens are for."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.processors.core.work.published_prefix import PublishedPrefix, count_calls
from penstock.processors.engines.base import Delta
from penstock.schemas.published_logprobs import PublishedLogprobs

from .conftest import Run, Runner, StartEngine

ADD = (
    '{"type":"object","properties":{"a":{"type":"integer","maximum":99},"why":{"type":"string","maxLength":30}},'
    '"required":["a","why"],"additionalProperties":false}'
)
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "add", "parameters": ADD}}
FORM = {
    "type": "json_schema",
    "json_schema": '{"name":"s","schema":{"type":"object","properties":{"a":{"type":"array","items":{"type":"string",'
    '"maxLength":12},"minItems":2,"maxItems":4},"b":{"enum":["one","other"]}},"required":["a","b"]}}',
}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 0},
    "seeded": {"temperature": 1.0, "seed": 7},
    "penalties": {"temperature": 0, "frequency_penalty": 0.8, "presence_penalty": 0.4},
    "logprobs": {"temperature": 1.0, "seed": 8, "logprobs": True, "top_logprobs": 2},
    "guided": {"temperature": 0.9, "seed": 3, "response_format": FORM},
    "forced call": {"temperature": 0.9, "seed": 5, "tools": [TOOL], "tool_choice": "required"},
    "tools": {"temperature": 1.2, "seed": 6, "tools": [TOOL]},
}


def told_by(deltas: list[Delta]) -> PublishedPrefix:
    chars: list[int] = []
    for delta in deltas:
        count_calls(chars, delta.calls)
    text = "".join(delta.text for delta in deltas)
    tokens = tuple(token for delta in deltas for token in delta.token_ids)
    logprobs = PublishedLogprobs()
    for delta in deltas:
        logprobs.add(delta.logprobs, logprobs.count)
    return PublishedPrefix("m", text, tokens, tuple(chars), (1, 1), logprobs)


def without_scores(output: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in output.items() if name != "logprobs"}


async def begin(runner: Runner, params: dict[str, Any], told: PublishedPrefix | None = None) -> Run:
    messages = [{"role": "user", "content": "Tell me of a dog and a café. ☂️ Use signs."}]
    spec = runner.spec(messages=messages, params={"max_tokens": 40, **params}, request_id="r", published=told)
    return Run(runner.engine, spec, await runner.engine.prepare(spec))


async def check_all_places(runner: Runner, params: dict[str, Any]) -> list[Delta]:
    """Whatever was told when the first engine went, the second makes the same of it. Returns what the first told."""
    whole = await begin(runner, params)
    await whole.finished()
    places = range(1, len(whole.deltas) + 1)
    await asyncio.gather(*(check_place(runner, params, whole, count) for count in places))
    return whole.deltas


async def check_place(runner: Runner, params: dict[str, Any], whole: Run, count: int) -> None:
    """The first engine went after so many deltas."""
    finished = await whole.finished()
    told = told_by(whole.deltas[:count])
    run = await begin(runner, params, told)
    assert run.prepared.goes_on, (count, told)
    again = await run.finished()
    assert told.text + run.text == whole.text == finished.output["text"]
    assert without_scores(again.output) == without_scores(finished.output)
    for one, other in zip(again.output.get("logprobs", ()), finished.output.get("logprobs", ()), strict=True):
        assert one["token"] == other["token"]
        assert one["logprob"] == pytest.approx(other["logprob"], abs=1e-4), "a prefill differs from steps in rounding"
    scores = [
        *(told.logprobs or PublishedLogprobs()).tokens(),
        *(one for delta in run.deltas for one in delta.logprobs),
    ]
    assert scores == again.output.get("logprobs", [])[: len(scores)]
    assert len(scores) == len(told.token_ids) + sum(len(d.token_ids) for d in run.deltas) or not scores
    assert (again.finish_reason, again.completion_tokens) == (finished.finish_reason, finished.completion_tokens)
    assert again.prompt_tokens == finished.prompt_tokens
    # Tokens whose text is held back come with text that follows, or not at all: at the end it depends on when it comes.
    tokens = [*told.token_ids, *(token for delta in run.deltas for token in delta.token_ids)]
    others = [token for delta in whole.deltas for token in delta.token_ids]
    common = min(len(tokens), len(others))
    assert tokens[:common] == others[:common]
    assert max(len(tokens), len(others)) <= finished.completion_tokens
    assert [delta.first_token_index for delta in run.deltas if delta.token_ids][:1] in ([], [len(told.token_ids)])
    chars = [*told.call_chars]
    for delta in run.deltas:
        assert all(piece["offset"] == (chars[piece["index"] :] or [0])[0] for piece in delta.calls)
        count_calls(chars, delta.calls)
    assert tuple(chars) == told_by(whole.deltas).call_chars


@pytest.mark.parametrize("kind", list(KINDS))
async def test_it_goes_on_from_every_place(start_engine: StartEngine, tiny_lm: Path, kind: str) -> None:
    runner = await start_engine("text", tiny_lm, ignore_eos=kind not in ("guided", "forced call"))
    deltas = await check_all_places(runner, KINDS[kind])
    assert len(deltas) > 5, "the places are many"
    if kind == "forced call":
        assert any(delta.calls for delta in deltas)


async def test_text_that_was_held_back_for_a_stop_is_neither_lost_nor_told_twice(
    start_engine: StartEngine, tiny_lm: Path
) -> None:
    runner = await start_engine("text", tiny_lm, ignore_eos=True)
    whole = (await (await begin(runner, {"temperature": 0})).finished()).output["text"]
    for at in (len(whole) // 3, len(whole) // 2):
        stop = whole[at : at + 6]
        last_ones = [stop, f"{whole[at : at + 4]}{chr(0x2603)}"]  # the second one begins as the text, and never comes
        await check_all_places(runner, {"temperature": 0, "stop": last_ones})


async def test_what_cannot_go_on_says_so_and_begins_anew(start_engine: StartEngine, tiny_lm: Path) -> None:
    runner = await start_engine("text", tiny_lm, ignore_eos=True)
    params = {"temperature": 0}
    whole = await begin(runner, params)
    await whole.finished()
    told = told_by(whole.deltas[:4])
    for other in (
        replace(told, text=f"other {told.text}"),
        replace(told, token_ids=(10**9, *told.token_ids)),
        replace(told, call_chars=(3,)),
    ):
        run = await begin(runner, params, other)
        assert not run.prepared.goes_on
        await run.finished()
        assert run.text == whole.text
        assert run.deltas[0].first_token_index == 0
    for more in ({"n": 2}, {"logprobs": True}):  # an earlier build has told no log probabilities
        run = await begin(runner, {**params, **more}, told)
        assert not run.prepared.goes_on
        await run.finished()


async def test_runs_that_go_on_share_the_batch_with_others(start_engine: StartEngine, tiny_lm: Path) -> None:
    runner = await start_engine("text", tiny_lm, ignore_eos=True)
    params = {"temperature": 0}
    whole = await begin(runner, params)
    await whole.finished()
    counts = range(1, len(whole.deltas), 3)
    runs = [await begin(runner, params, told_by(whole.deltas[:count])) for count in counts]
    beside = [await runner.chat(f"Story {number}", max_tokens=40) for number in range(4)]
    await asyncio.gather(*(run.finished() for run in [*runs, *beside]))
    assert {told_by(whole.deltas[:count]).text + run.text for count, run in zip(counts, runs, strict=True)} == {
        whole.text
    }
