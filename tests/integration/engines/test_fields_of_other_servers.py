"""Fields that vLLM and others have beyond OpenAI's, on a real model in its process, each row with its own."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from penstock.processors.core.work.published_prefix import PublishedPrefix
from penstock.schemas.errors import InvalidRequest

from .conftest import Run, Runner, StartEngine, changed_copy

GREEDY = {"temperature": 0}
TEMPLATE = """{% for one in messages %}{{ one.content }}
{%- if one.reasoning_content %} thought {{ one.reasoning_content }}{% endif %} {% endfor %}
{%- if mood is defined %} mood {{ mood + '!' }}{% endif %}
{%- if reasoning_effort is defined %} effort {{ reasoning_effort }}{% endif %}"""


async def begin(runner: Runner, prompt: str, tokens: int, **extra: Any) -> Run:
    texts = {name: json.dumps(value) for name, value in extra.items()}
    return await runner.begin(prompt=prompt, params={**GREEDY, "max_tokens": tokens}, extra=texts)


async def test_a_repetition_penalty_is_that_of_transformers(start_engine: StartEngine, tiny_lm: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    runner = await start_engine("text", tiny_lm, ignore_eos=True)
    tokenizer: Any = AutoTokenizer.from_pretrained(str(tiny_lm))
    model: Any = AutoModelForCausalLM.from_pretrained(str(tiny_lm))
    model.generation_config.eos_token_id = None
    ids = tokenizer("Once upon a time", return_tensors="pt")
    with torch.inference_mode():
        made = model.generate(**ids, do_sample=False, max_new_tokens=24, repetition_penalty=1.3)
    wanted = tokenizer.decode(made[0, ids["input_ids"].size(1) :], skip_special_tokens=True)
    penalised, plain = [
        await begin(runner, "Once upon a time", 24, **extra) for extra in ({"repetition_penalty": 1.3}, {})
    ]
    outputs = [(await run.finished()).output["text"] for run in (penalised, plain)]
    assert outputs[0] == wanted != outputs[1]
    # Another attempt goes on behind what was published, with the penalty for all of it.
    first = penalised.deltas[0]
    spec = runner.spec(
        prompt="Once upon a time",
        params={**GREEDY, "max_tokens": 24},
        extra={"repetition_penalty": "1.3"},
        published=PublishedPrefix(
            model="m", text=first.text, token_ids=tuple(first.token_ids), call_chars=(), since=(0, 1)
        ),
    )
    prepared = await runner.engine.prepare(spec)
    assert prepared.goes_on
    assert (await Run(runner.engine, spec, prepared).finished()).output["text"] == wanted


async def test_a_text_may_be_kept_from_ending(start_engine: StartEngine, tiny_lm: Path) -> None:
    from transformers import AutoTokenizer

    runner = await start_engine("text", tiny_lm)
    end = int(AutoTokenizer.from_pretrained(str(tiny_lm)).eos_token_id)
    ending = {"logit_bias": {str(end): 100}}

    async def told(**extra: Any) -> tuple[int, str | None]:
        finished = await (await begin(runner, "Once upon", 7, **ending, **extra)).finished()
        return finished.completion_tokens, finished.finish_reason

    three = await asyncio.gather(told(), told(min_tokens=4), told(ignore_eos=True))
    assert three == [(1, "stop"), (5, "stop"), (7, "length")]
    # A form ends where nothing else may follow, and not before it must.
    form = {"type": "json_schema", "json_schema": '{"name": "s", "schema": {"const": 1}}'}
    extra = {"min_tokens": "9"}
    run = await runner.begin(prompt="x", params={**GREEDY, "max_tokens": 9, "response_format": form}, extra=extra)
    assert (await run.finished()).output["text"] == "1"
    with pytest.raises(InvalidRequest) as caught:
        await begin(runner, "Once upon", 7, min_tokens=8)
    assert caught.value.param == "extra.min_tokens"


async def test_stop_strings_wait_for_the_least_tokens(start_engine: StartEngine, tiny_lm: Path) -> None:
    runner = await start_engine("text", tiny_lm, ignore_eos=True)
    whole = (await (await begin(runner, "Once upon a time", 30)).finished()).output["text"]
    params = {**GREEDY, "max_tokens": 30, "stop": [" "]}
    run = await runner.begin(prompt="Once upon a time", params=params, extra={"min_tokens": "12"})
    finished = await run.finished()
    assert finished.finish_reason == "stop"
    assert finished.completion_tokens > 12
    assert whole.startswith(finished.output["text"])
    assert finished.output["text"].strip().count(" ") > 1


async def test_a_prompt_is_cut_to_its_last_tokens(start_engine: StartEngine, tiny_lm: Path) -> None:
    from transformers import AutoTokenizer

    runner = await start_engine("text", tiny_lm, ignore_eos=True, window=64)
    ids: list[int] = AutoTokenizer.from_pretrained(str(tiny_lm))("a dog and a cat and a bird", add_special_tokens=True)[
        "input_ids"
    ]
    cut = await begin(runner, "a dog and a cat and a bird", 9, truncate_prompt_tokens=4)
    same = await runner.begin(params={"prompt_token_ids": ids[-4:], **GREEDY, "max_tokens": 9})
    assert cut.prepared.prompt_tokens == 4
    assert (await cut.finished()).output == (await same.finished()).output
    long = [{"role": "user", "content": "a dog " * 200}]
    fits = await runner.begin(
        messages=long, params={**GREEDY, "max_tokens": 10}, extra={"truncate_prompt_tokens": "-1"}
    )
    assert fits.prepared.prompt_tokens == 54
    assert (await fits.finished()).completion_tokens == 10


async def test_variables_and_thoughts_reach_the_chat_template(
    start_engine: StartEngine, tiny_lm: Path, tmp_path: Path
) -> None:
    runner = await start_engine(
        "text", changed_copy(tiny_lm, tmp_path, "chat_template.jinja", TEMPLATE), ignore_eos=True
    )
    thought = {"role": "assistant", "content": "four", "reasoning_content": "two and two"}

    async def text(message: dict[str, Any], **extra: Any) -> str:
        texts = {name: json.dumps(value) for name, value in extra.items()}
        run = await runner.begin(messages=[message], params={**GREEDY, "max_tokens": 9}, extra=texts)
        return (await run.finished()).output["text"]

    async def prompted(prompt: str) -> str:
        run = await runner.begin(prompt=prompt, params={**GREEDY, "max_tokens": 9})
        return (await run.finished()).output["text"]

    assert await text(thought) == await prompted("four thought two and two ")
    variables = {"mood": "gay", "messages": [], "tokenize": False, "unknown": 1}
    asked = {"chat_template_kwargs": variables, "reasoning_effort": "low"}
    assert await text({"role": "user", "content": "Hi"}, **asked) == await prompted("Hi  mood gay! effort low")
    with pytest.raises(InvalidRequest) as caught:
        await text({"role": "user", "content": "Hi"}, chat_template_kwargs={"mood": 1})
    assert caught.value.param == "extra.chat_template_kwargs"
    assert await text(thought) == await prompted("four thought two and two ")
