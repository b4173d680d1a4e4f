"""Text, grown up, on a real model in its process: forms, tools, several answers, seeds, penalties, logprobs."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from nested_schemas import nested_schemas
from penstock.processors.engines.base import RunSpec
from penstock.processors.engines.guidance import compiling
from penstock.processors.engines.text.backend import TextBackend
from penstock.schemas.errors import InvalidRequest, PenstockError, UnsupportedParameter
from support import wait_until_async

from .conftest import Run, Runner, StartEngine

STORY = "Tell me a story about a dog."
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": '{"type":"object","properties":{"a":{"type":"integer","maximum":99}},"required":["a"]'
        ',"additionalProperties":false}',
    },
}


def form(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": json.dumps({"name": "s", "schema": schema})}


def check(runs: list[tuple[dict[str, Any], Any]]) -> int:
    """Every output that was not cut validates. How many were cut."""
    cut = 0
    for schema, finished in runs:
        if finished.finish_reason == "length":
            cut += 1
            continue
        assert finished.finish_reason == "stop"
        jsonschema.validate(json.loads(finished.output["text"]), schema)
    return cut


async def guided(runner: Runner, schemas: list[dict[str, Any]], times: int, tokens: int) -> int:
    """Each schema so many times, all beside one another; how many were cut by length."""
    room = asyncio.Semaphore(32)

    async def one(schema: dict[str, Any], number: int) -> tuple[dict[str, Any], Any]:
        async with room:
            question = f"Answer in JSON: describe number {number}."
            params = {"temperature": 0.8, "seed": number, "max_tokens": tokens, "response_format": form(schema)}
            run = await runner.begin(messages=[{"role": "user", "content": question}], params=params)
            return schema, await run.finished(1000)

    return check(await asyncio.gather(*(one(schema, number) for schema in schemas for number in range(times))))


async def test_guided_answers_fit_their_schemas_beside_plain_ones(start_engine: StartEngine, tiny_lm: Path) -> None:
    runner = await start_engine("text", tiny_lm, ignore_eos=True)
    alone = (await (await runner.chat(STORY, max_tokens=150)).finished()).output
    beside = await runner.chat(STORY, max_tokens=150)
    cut, plain = await asyncio.gather(guided(runner, nested_schemas(6), 2, 200), beside.finished())
    assert plain.output == alone
    assert cut <= 6
    anything = await (await runner.chat("JSON", max_tokens=40, response_format={"type": "json_object"})).finished()
    assert anything.output["text"].startswith("{")


@pytest.mark.skipif(not os.environ.get("PENSTOCK_TEST_LONG"), reason="long: PENSTOCK_TEST_LONG=1 runs it")
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("part", range(10))
async def test_fifty_schemas_ten_times_on_the_real_model(start_engine: StartEngine, smollm2: Path, part: int) -> None:
    runner = await start_engine("text", smollm2, threads=2)
    cut = await guided(runner, nested_schemas(50)[part::10], 10, 160)
    print(f"part {part}: {cut} of 50 were cut by length")
    assert cut < 35


async def test_a_guided_run_that_fails_ends_no_other(tiny_lm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FACTS: one bad request kills the loop. Here a grammar fails while it is followed."""
    from llguidance import LLParserLimits

    monkeypatch.setattr(compiling, "LIMITS", LLParserLimits(step_lexer_fuel=300, verbose_errors=False))
    events: list[tuple[Any, ...]] = []
    backend = TextBackend(str(tiny_lm), {"threads": 1, "cache_tokens": 2048, "ignore_eos": True}, events.append)
    await asyncio.to_thread(backend.load)
    batching: Any = backend._batching
    try:

        def begin(run_id: str, **params: Any) -> None:
            params = {"temperature": 0, "max_tokens": 120, **params}
            spec = RunSpec(run_id=run_id, task="text_generation", model="m", prompt="Once", params=params)
            backend.run(spec, backend.prepare(spec)[1])

        begin("plain")
        costly = {"type": "string", "pattern": "^(a|b|ab)*[a-f]{3,40}(c|[a-d]{2,30})*x{5,9}$"}
        try:
            begin("failing", response_format=form(costly), n=2)
        except PenstockError:
            pytest.fail("it should compile, and fail later")
        await wait_until_async(lambda: any(event[0] == "finished" for event in events), 60)
        failed = [event[1] for event in events if event[0] == "failed"]
        assert [(one.run_id, type(one.error), one.retryable_here) for one in failed] == [
            ("failing", InvalidRequest, False)
        ]
        assert failed[0].error.param == "payload.response_format"
        await wait_until_async(lambda: not batching.batch_processor.scheduler.active_requests, 10)
        assert not batching.controls
        assert not backend._runs
        assert not backend._choices
        begin("after")
        await wait_until_async(lambda: sum(event[0] == "finished" for event in events) == 2, 60)
    finally:
        batching.stop(block=True, timeout=10, hard_stop=True)


async def test_the_same_seed_gives_the_same_text_alone_or_beside_others(
    start_engine: StartEngine, tiny_lm: Path
) -> None:
    runner = await start_engine("text", tiny_lm)

    async def drawn(**params: Any) -> Any:
        return await (await runner.chat(STORY, temperature=1.3, max_tokens=30, **params)).finished()

    alone = (await drawn(seed=11)).output["text"]
    others = [drawn(seed=seed) for seed in range(8)] + [drawn() for _ in range(4)]
    together = await asyncio.gather(drawn(seed=11), *others)
    assert together[0].output["text"] == alone
    assert len({one.output["text"] for one in together}) > 4
    several = await drawn(seed=11, n=3)
    choices = several.output["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    assert choices[0]["text"] == several.output["text"] == alone
    assert len({choice["text"] for choice in choices}) > 1
    assert several.completion_tokens > 30
    assert several.usage["total_tokens"] == several.prompt_tokens + several.completion_tokens


async def test_grammars_that_are_never_compiled_hold_up_nobody(start_engine: StartEngine, tiny_lm: Path) -> None:
    """Four of them kept all others from JSON for twenty seconds, and four threads at work for minutes."""
    runner = await start_engine("text", tiny_lm)
    await (await runner.chat("JSON", max_tokens=5, response_format={"type": "json_object"})).finished()

    async def endless(number: int) -> None:
        with pytest.raises(InvalidRequest, match="too complex"):
            await runner.chat("A number", max_tokens=5, response_format=form({"type": "integer", "multipleOf": number}))

    refused = [asyncio.create_task(endless(number)) for number in (9_999_991, 9_999_973, 9_999_971, 9_999_943)]
    plain = await runner.chat("a dog " * 400, max_tokens=20)  # long enough for the thread that prepares
    assert (await plain.finished()).finish_reason in ("stop", "length")
    known = await (await runner.chat("JSON", max_tokens=40, response_format={"type": "json_object"})).finished()
    assert known.output["text"].startswith("{")
    assert not any(task.done() for task in refused), "both were served while the four were tried"
    await asyncio.gather(*refused)
    new = await runner.chat("JSON", max_tokens=40, response_format=form({"const": "yes"}))
    assert (await new.finished()).output["text"] == '"yes"'


async def test_log_probabilities_are_those_of_the_model(start_engine: StartEngine, tiny_lm: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    runner = await start_engine("text", tiny_lm)
    params = {"temperature": 0, "max_tokens": 5, "logprobs": True, "top_logprobs": 3, "presence_penalty": 0.5}
    run = await runner.begin(prompt="Once upon", params=params)
    told = (await run.finished()).output
    tokenizer = AutoTokenizer.from_pretrained(str(tiny_lm))
    model = AutoModelForCausalLM.from_pretrained(str(tiny_lm))
    ids: list[int] = tokenizer("Once upon")["input_ids"]
    assert "".join(one["token"] for one in told["logprobs"]) == told["text"]
    for one in told["logprobs"]:
        assert bytes(one["bytes"]).decode() == one["token"]
        with torch.inference_mode():
            logprobs = torch.log_softmax(model(torch.tensor([ids])).logits[0, -1].float(), -1)
        token = tokenizer(one["token"], add_special_tokens=False)["input_ids"][0]
        assert one["logprob"] == pytest.approx(float(logprobs[token]), abs=1e-3)
        assert [top["logprob"] for top in one["top_logprobs"]] == pytest.approx(logprobs.topk(3)[0].tolist(), abs=1e-3)
        ids.append(token)
    bare = await runner.begin(prompt="Once upon", params={"temperature": 0, "max_tokens": 2, "logprobs": True})
    assert all("top_logprobs" not in one for one in (await bare.finished()).output["logprobs"])


async def test_penalties_min_p_bias_and_token_prompts(start_engine: StartEngine, tiny_lm: Path) -> None:
    from transformers import AutoTokenizer

    runner = await start_engine("text", tiny_lm, ignore_eos=True)
    tokenizer = AutoTokenizer.from_pretrained(str(tiny_lm))

    async def text(run: Run) -> str:
        return (await run.finished()).output["text"]

    plain = await text(await runner.chat(STORY, max_tokens=60))
    # The likeliest token alone is what min_p leaves, whatever is drawn.
    assert await text(await runner.chat(STORY, max_tokens=60, temperature=1.5, min_p=1)) == plain
    penalised = await text(await runner.chat(STORY, max_tokens=60, presence_penalty=2, frequency_penalty=2))
    assert len(set(penalised.split())) > len(set(plain.split()))
    word: int = tokenizer(" dog", add_special_tokens=False)["input_ids"][0]
    asked: list[Any] = [{"role": "user", "content": "Hi"}]
    biased = await runner.begin(
        messages=asked, params={"temperature": 0, "max_tokens": 3}, extra={"logit_bias": f'{{"{word}": 100}}'}
    )
    assert await text(biased) == " dog dog dog"
    ids: list[int] = tokenizer("Once upon")["input_ids"]
    as_ids = await runner.begin(params={"prompt_token_ids": ids, "temperature": 0, "max_tokens": 9})
    as_text = await runner.begin(prompt="Once upon", params={"temperature": 0, "max_tokens": 9})
    assert await text(as_ids) == await text(as_text)
    assert as_ids.prepared.prompt_tokens == len(ids)


async def test_tools_are_asked_for_when_they_must_be(start_engine: StartEngine, tiny_lm: Path) -> None:
    runner = await start_engine("text", tiny_lm)
    named = '{"type":"function","function":{"name":"add"}}'
    for choice in (named, "required"):
        run = await runner.chat("Add one.", max_tokens=120, tools=[TOOL], tool_choice=choice)
        found = await run.finished()
        calls = found.output["tool_calls"]
        assert {call["function"]["name"] for call in calls} == {"add"}
        whole = calls if found.finish_reason == "tool_calls" else calls[:-1]
        assert all(set(json.loads(call["function"]["arguments"])) == {"a"} for call in whole)
        assert (found.output["text"], run.text) == ("", "")
        told = ["" for _ in calls]
        for piece in (piece for delta in run.deltas for piece in delta.calls):
            assert piece["offset"] == len(told[piece["index"]])
            told[piece["index"]] += piece["arguments"]
        assert told == [call["function"]["arguments"] for call in calls]
        assert found.finish_reason in ("tool_calls", "length")
    calls = whole or calls
    # A stream that is taken over by another attempt goes on only if its calls have the names that were sent.
    fields: Any = {"messages": [{"role": "user", "content": "Add one."}]}
    fields["params"] = {"temperature": 0, "max_tokens": 120, "n": 2, "tools": [TOOL], "tool_choice": "required"}
    first, again, other = [
        [choice["tool_calls"][0]["id"] for choice in (await run.finished()).output["choices"]]
        for run in [await runner.begin(**fields, request_id=request_id) for request_id in ("a", "a", "b")]
    ]
    assert first == again != other
    assert len({*first, *other}) == 4
    offered = await runner.chat("Hello!", max_tokens=20, tools=[TOOL])
    silent = await runner.chat("Hello!", max_tokens=20, tools=[TOOL], tool_choice="none")
    plain = await runner.chat("Hello!", max_tokens=20)
    assert (await offered.finished()).prompt_tokens > (await plain.finished()).prompt_tokens
    assert (await silent.finished()).output == (await plain.finished()).output
    answered: list[Any] = [
        {"role": "user", "content": "Add"},
        {"role": "assistant", "content": "", "tool_calls": [{**calls[0], "id": "c"}]},
        {"role": "tool", "tool_call_id": "c", "content": "2"},
    ]
    run = await runner.begin(messages=answered, params={"temperature": 0, "max_tokens": 5})
    assert (await run.finished()).completion_tokens > 0


async def test_a_strict_call_fits_its_schema_though_the_model_may_say_anything(
    start_engine: StartEngine, tiny_lm: Path
) -> None:
    """The model is pushed to begin calls; what it would write in them itself is no JSON."""
    from transformers import AutoTokenizer

    runner = await start_engine("text", tiny_lm, tool_parser="json")
    (brace,) = AutoTokenizer.from_pretrained(str(tiny_lm))("{", add_special_tokens=False)["input_ids"]
    strict = {**TOOL, "function": {**TOOL["function"], "strict": True}}

    async def said(number: int, tool: dict[str, Any], bias: int) -> Any:
        params = {"temperature": 1.2, "seed": number, "max_tokens": 80, "tools": [tool]}
        asked = [{"role": "user", "content": f"Add {number}."}]
        extra = {"logit_bias": json.dumps({str(brace): bias})}
        return await (await runner.begin(messages=asked, params=params, extra=extra)).finished()

    pushed = await asyncio.gather(*(said(number, strict, 100) for number in range(12)))
    for one in pushed:
        (call,) = one.output["tool_calls"]
        assert (one.finish_reason, one.output["text"]) == ("tool_calls", "")
        assert set(json.loads(call["function"]["arguments"])) == {"a"}
    free = await asyncio.gather(*(said(number, strict, 0) for number in range(6)))
    assert any(one.output["text"] for one in free), "text is allowed as well"
    loose = await said(0, TOOL, 100)
    assert "tool_calls" not in loose.output, "else this would show nothing"


async def test_the_beginning_of_a_prompt_is_not_computed_again(start_engine: StartEngine, tiny_lm: Path) -> None:
    runner = await start_engine("text", tiny_lm, block_size=16)
    said: list[Any] = [{"role": "user", "content": "Tell me of the dog " * 20}]
    params = {"temperature": 0, "max_tokens": 8}
    first = await (await runner.begin(messages=said, params=params)).finished()
    assert (first.usage or {})["cached_tokens"] == 0
    turn: list[Any] = [
        *said,
        {"role": "assistant", "content": first.output["text"]},
        {"role": "user", "content": "So?"},
    ]
    second = await (await runner.begin(messages=turn, params=params)).finished()
    usage = second.usage or {}
    assert first.prompt_tokens - 32 < usage["cached_tokens"] < usage["prompt_tokens"]
    # What is reused says the same.
    again = await (await runner.begin(messages=said, params=params)).finished()
    assert again.output == first.output
    assert (again.usage or {})["cached_tokens"] >= first.prompt_tokens - 32
    several = await (await runner.begin(messages=said, params={**params, "n": 2, "temperature": 1})).finished()
    assert (several.usage or {})["cached_tokens"] > 0


@pytest.mark.parametrize(
    ("params", "kind", "param"),
    [
        ({"response_format": form({"not": {}})}, InvalidRequest, "payload.response_format.json_schema.schema"),
        ({"tool_choice": "required"}, InvalidRequest, "payload.tool_choice"),
        ({"tools": [TOOL], "tool_choice": '{"function":{"name":"b"}}'}, InvalidRequest, "payload.tool_choice"),
        ({"n": 65}, UnsupportedParameter, "payload.n"),
        ({"n": 60, "max_tokens": 500}, InvalidRequest, "payload.n"),
        ({"prompt_token_ids": [10**6]}, InvalidRequest, "payload"),
    ],
)
async def test_what_cannot_be_is_refused_before_it_runs(
    start_engine: StartEngine, tiny_lm: Path, params: dict[str, Any], kind: type[Exception], param: str
) -> None:
    runner = await start_engine("text", tiny_lm)
    asked = None if "prompt_token_ids" in params else [{"role": "user", "content": "x"}]
    with pytest.raises(kind) as caught:
        await runner.engine.prepare(runner.spec(messages=asked, params=params))
    assert getattr(caught.value, "param", None) == param
