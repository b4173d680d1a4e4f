"""Greedy streams that go on in a batch: under teacher forcing each token is within a tolerance of the best one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from streamed import began
from support import engine_processes
from system import System, eventually
from worker_requests import outcome, send

STREAMS, TOKENS = 12, 400
TOLERANCE = 1e-3
"""Of logits. In float32 a batch and a prefill differ by some 1e-5; a token at a wrong place is off by 1 and more."""
SUBJECTS = ("a dog", "the sea", "Paris", "a red house", "my friend Ada", "rain")


def messages(number: int) -> list[dict[str, str]]:
    subject = SUBJECTS[number % len(SUBJECTS)]
    return [{"role": "user", "content": f"Tell me a story of {subject}. " + "Make it long. " * (number // 2)}]


def tokens_of(system: System) -> dict[str, dict[int, int]]:
    """By request, the token at each place of its text. What was told never changes."""
    found: dict[str, dict[int, int]] = {}
    for event in system.results():
        places = found.setdefault(event.request_id, {})
        for place, token in enumerate(event.token_ids or (), event.first_token_index or 0):
            assert places.setdefault(place, token) == token, (event.request_id, place)
    return found


def worst(model: Any, prompt: list[int], tokens: Mapping[int, int]) -> float:
    """By how much the chosen tokens are at most below the best ones, where each follows those before it."""
    import torch

    chosen = [tokens[place] for place in range(len(tokens))]
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *chosen]])).logits[0, len(prompt) - 1 : -1]
    best = logits.max(dim=-1).values
    return float((best - logits[torch.arange(len(chosen)), torch.tensor(chosen)]).max())


def gone_on(system: System) -> set[str]:
    """Streams that a second attempt has gone on with."""
    return {e.request_id for e in system.results() if e.kind == "chunk" and e.token_ids and e.since_attempt is not None}


@pytest.mark.slow
def test_each_is_within_the_tolerance(make_system: Callable[..., System], tiny_lm: Path) -> None:
    """Their engine is killed, and when they have gone on the worker."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    options = {"ignore_eos": True, "window": 4096, "cache_tokens": 16384}
    entry = {"id": "tiny", "source": str(tiny_lm), "engine": "text", "tasks": ["text_generation"], "options": options}
    system = make_system(models=[entry])
    worker = system.worker().wait_ready()
    ids = {f"r{number}": messages(number) for number in range(STREAMS)}
    payload = {"max_tokens": TOKENS, "temperature": 0}
    send(system, *({"request_id": i, "payload": {"messages": m, **payload}, "stream": True} for i, m in ids.items()))
    eventually(lambda: began(system.results()) == set(ids), 90, worker.tail)
    for engine in engine_processes(worker.popen.pid):
        engine.kill()
        engine.wait(20)
    eventually(lambda: gone_on(system) == set(ids), 90, worker.tail)
    epoch = max(event.epoch for event in system.results())
    worker.kill9()
    worker = system.worker("w2").wait_ready()
    ends = {one: outcome(system, one, 120) for one in ids}
    assert {event.status for event in ends.values()} == {"completed"}, worker.tail()
    assert any(event.epoch > epoch for event in ends.values()), "they were over before the worker was killed"

    found = tokens_of(system)
    # A last token without text of its own, as half of a character, stands in no chunk.
    assert {len(found[one]) for one in ids} <= {TOKENS - 1, TOKENS}
    assert all([*sorted(found[one])] == [*range(len(found[one]))] for one in ids), "there are gaps"
    tokenizer: Any = AutoTokenizer.from_pretrained(str(tiny_lm))
    model: Any = AutoModelForCausalLM.from_pretrained(str(tiny_lm)).eval()
    off: dict[str, float] = {}
    for one, asked in ids.items():
        prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=True, return_dict=False)
        off[one] = worst(model, list(prompt), found[one])
    assert max(off.values()) < TOLERANCE, off
    shifted = {place: found["r0"][(place + 1) % len(found["r0"])] for place in found["r0"]}
    prompt = tokenizer.apply_chat_template(ids["r0"], add_generation_prompt=True, tokenize=True, return_dict=False)
    assert worst(model, list(prompt), shifted) > 100 * TOLERANCE, "this measure sees nothing"
    assert worker.stop() == 0, worker.tail()
