"""Log probabilities of prompts: what continuous batching gives is what a plain forward pass of transformers gives."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from penstock.processors.engines.base import RunSpec
from penstock.processors.engines.batching import prompt_logits
from penstock.processors.engines.text.backend import TextBackend
from support import wait_until_async

from .conftest import StartEngine

if TYPE_CHECKING:
    from torch import Tensor  # importing it takes three seconds of each process that collects the tests

LONG = "Once upon a time there was a dog who lived near the river. " * 4
PROMPTS = ["The capital of France is Paris.", LONG, LONG + "It swam.", "Ünïcode: 日本 🐶 and x"]
TOLERANCE = 2e-3
"""Sums are formed in another order when a prompt is computed beside others, and in parts."""


def plain_pass(folder: Path, prompts: list[str]) -> list[tuple[list[int], Tensor]]:
    """For each prompt its tokens, and the log probabilities at each place, of one forward pass of it alone."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found: list[tuple[list[int], Tensor]] = []
    with torch.no_grad():
        for prompt in prompts:
            ids = tokenizer(prompt)["input_ids"]
            found.append((ids, torch.log_softmax(model(torch.tensor([ids])).logits[0], dim=-1)))
    return found


def check(told: list[dict[str, Any]], ids: list[int], expected: Tensor, top: int) -> None:
    assert len(told) == len(ids)
    assert told[0]["logprob"] is None
    assert "top_logprobs" not in told[0]
    for place, one in enumerate(told[1:], 1):
        row = expected[place - 1]
        assert one["logprob"] == pytest.approx(row[ids[place]].item(), abs=TOLERANCE), place
        likeliest = row.topk(top).values.tolist() if top else []
        assert [each["logprob"] for each in one.get("top_logprobs", [])] == pytest.approx(likeliest, abs=TOLERANCE)


async def test_the_prompts_of_a_batch_have_the_log_probabilities_of_a_plain_pass(
    start_engine: StartEngine, smollm2: Path
) -> None:
    expected = await asyncio.to_thread(plain_pass, smollm2, PROMPTS)
    # Steps of 32 tokens: long prompts come in parts, beside answers that are being made.
    runner = await start_engine("text", smollm2, dtype="float32", threads=2, batch_tokens=32, ignore_eos=True)

    async def scored(prompt: str | None, top: int, **params: Any) -> Any:
        run = await runner.begin(
            prompt=prompt, params={"temperature": 0, "max_tokens": 1, "prompt_logprobs": top, **params}
        )
        return (await run.finished(120)).output

    mate = await runner.begin(prompt=LONG, params={"temperature": 0, "max_tokens": 12})
    together = [scored(prompt, number % 2 * 3) for number, prompt in enumerate(PROMPTS)]
    outputs = await asyncio.gather(*together, scored(None, 1, prompt_token_ids=expected[1][0], n=2, logprobs=True))
    for number, output in enumerate(outputs[:-1]):
        check(output["prompt_logprobs"], *expected[number], number % 2 * 3)
    several = outputs[-1]
    check(several["prompt_logprobs"], *expected[1], 1)
    assert [sorted(choice) for choice in several["choices"]] == [["finish_reason", "index", "logprobs", "text"]] * 2
    # The cache holds this prompt by now, and what it holds has no logits.
    assert (await mate.finished(120)).completion_tokens == 12
    again = await scored(LONG, 3)
    check(again["prompt_logprobs"], *expected[1], 3)
    assert "".join(one["token"] for one in again["prompt_logprobs"]) == LONG


async def test_logits_of_a_prompt_are_made_a_few_positions_at_a_time(
    tiny_lm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[tuple[Any, ...]] = []
    backend = TextBackend(str(tiny_lm), {"threads": 1, "cache_tokens": 1024}, events.append)
    await asyncio.to_thread(backend.load)
    model = backend._model
    monkeypatch.setattr(prompt_logits, "CHUNK_VALUES", 7 * backend._vocabulary)
    sizes: list[int] = []
    handle = model.get_output_embeddings().register_forward_hook(
        lambda module, inputs, output: sizes.append(output.shape[-2])
    )
    try:
        outputs: list[Any] = []
        for chunked in (True, False):
            if not chunked:
                monkeypatch.setattr(prompt_logits, "CHUNK_VALUES", 1 << 22)
            params = {"temperature": 0, "max_tokens": 1, "prompt_logprobs": 2}
            spec = RunSpec(run_id=f"{chunked}", task="text_generation", model="m", prompt=LONG, params=params)
            await backend.before_prepare(spec)
            backend.run(spec, backend.prepare(spec)[1])
            await wait_until_async(lambda: events and events[-1][0] == "finished", 30)
            outputs.append(events.pop()[1].output["prompt_logprobs"])
            assert (max(sizes) <= 7) is chunked
    finally:
        handle.remove()
        backend._batching.stop(block=True)
    first, second = ([one["logprob"] for one in output[1:]] for output in outputs)
    assert first == pytest.approx(second, abs=1e-4)
