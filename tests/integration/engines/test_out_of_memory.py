"""Memory runs out in real engine processes: batches are halved and tried again, and nobody else notices."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.common.engine_kinds import KINDS
from penstock.processors.core.fleet.ledger import OutOfMemory
from penstock.processors.engines.base import Limits
from support import wait_until_async

from .conftest import StartEngine


async def test_streams_go_on_where_they_were_when_memory_runs_out(
    start_engine: StartEngine, tiny_lm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = await start_engine("text", tiny_lm, ignore_eos=True, slots=8)
    texts = [(await (await plain.chat(f"Story {n}", max_tokens=150)).finished()).output["text"] for n in range(2)]
    told: list[object] = []
    monkeypatch.setitem(KINDS, "text", replace(KINDS["text"], backend="engine_backends:StarvedText"))
    hungry = tmp_path / "hungry"
    starved = await start_engine(
        "text",
        tiny_lm,
        host={"on_out_of_memory": lambda: told.append("ran out"), "on_limits": told.append},
        ignore_eos=True,
        slots=8,
        most_tokens=2,
        max_batch_tokens=32,
        hungry=str(hungry),
    )
    runs = [await starved.chat(f"Story {n % 2}", max_tokens=150) for n in range(8)]
    await asyncio.wait_for(runs[7].first.wait(), 60)
    hungry.write_text("2")  # eight are in a step from here on, and memory is there for two
    await wait_until_async(
        lambda: 2 in (limits.slots for limits in told if isinstance(limits, Limits)), 60, lambda: told
    )
    for number, run in enumerate(runs):
        finished = await run.finished(120)
        assert finished.output["text"] == run.text == texts[number % 2]
        indices = [delta.first_token_index for delta in run.deltas]
        lengths = [len(delta.token_ids) for delta in run.deltas]
        assert indices == [sum(lengths[:at]) for at in range(len(lengths))], "no gap, and nothing twice"
    assert starved.engine.measured_memory()


@pytest.mark.parametrize(
    "params",
    [{"response_format": {"type": "json_object"}, "seed": 3}, {"seed": 4, "frequency_penalty": 0.5}],
    ids=["guided", "seeded"],
)
async def test_grammars_seeds_and_penalties_go_on_where_they_were(
    start_engine: StartEngine, tiny_lm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, params: dict[str, Any]
) -> None:
    params = {"temperature": 0.9, "max_tokens": 120, **params}
    plain = await start_engine("text", tiny_lm, slots=8)
    messages = [{"role": "user", "content": "An object"}]
    alone = (await (await plain.begin(messages=messages, params=params)).finished()).output["text"]
    told: list[object] = []
    monkeypatch.setitem(KINDS, "text", replace(KINDS["text"], backend="engine_backends:StarvedText"))
    hungry = tmp_path / "hungry"
    options = {"slots": 8, "most_tokens": 2, "max_batch_tokens": 32, "hungry": str(hungry)}
    starved = await start_engine("text", tiny_lm, host={"on_out_of_memory": lambda: told.append("ran out")}, **options)
    runs = [await starved.begin(messages=messages, params=params) for _ in range(4)]
    await asyncio.wait_for(runs[3].first.wait(), 60)
    hungry.write_text("1")
    await wait_until_async(lambda: "ran out" in told, 60)
    for run in runs:
        assert (await run.finished(120)).output["text"] == run.text == alone


async def test_a_run_that_does_not_fit_alone_fails_and_takes_no_other_along(
    start_engine: StartEngine, tiny_lm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(KINDS, "text", replace(KINDS["text"], backend="engine_backends:StarvedText"))
    options = {"ignore_eos": True, "slots": 4, "max_batch_tokens": 128, "most_tokens": 24}
    runner = await start_engine("text", tiny_lm, **options)
    small = [await runner.begin(prompt="Once", params={"temperature": 0, "max_tokens": 60}) for _ in range(2)]
    large = await runner.begin(prompt="word " * 60, params={"temperature": 0, "max_tokens": 4})
    assert large.prepared.prompt_tokens > 32, "the smallest step is larger than what fits"
    failed = await large.failed(90)
    assert isinstance(failed.error, OutOfMemory)
    assert (failed.error.code, failed.retryable_here) == ("engine_failed", True)
    for run in small:
        assert (await run.finished(90)).completion_tokens == 60
    again = await runner.begin(prompt="Once", params={"temperature": 0, "max_tokens": 5})
    assert (await again.finished(60)).completion_tokens == 5


async def test_a_load_that_memory_runs_out_in_says_so(
    start_engine: StartEngine, tiny_lm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(KINDS, "text", replace(KINDS["text"], backend="engine_backends:NoMemoryToLoad"))
    with pytest.raises(OutOfMemory, match="can't allocate memory"):
        await start_engine("text", tiny_lm)


async def test_embedding_batches_are_halved_at_a_limit_of_the_kernel(
    start_engine: StartEngine, tiny_lm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [f"{n} " + "word " * 300 for n in range(54)]
    plain = await start_engine("embedding", tiny_lm, max_batch_tokens=16_384)
    expected = (await (await plain.begin(task="embedding", inputs=texts)).finished(120)).output["embeddings"]
    await plain.engine.stop()
    told: list[str] = []
    monkeypatch.setitem(KINDS, "embedding", replace(KINDS["embedding"], backend="engine_backends:TightEmbedding"))
    tight = await start_engine(
        "embedding",
        tiny_lm,
        host={"on_out_of_memory": lambda: told.append("ran out")},
        max_batch_tokens=16_384,
        room_bytes=80 << 20,
    )
    other = await tight.begin(task="embedding", inputs=["short"])
    run = await tight.begin(task="embedding", inputs=texts)
    found = (await run.finished(120)).output["embeddings"]
    for vector, known in zip(found, expected, strict=True):
        assert vector == pytest.approx(known, abs=1e-4)
    assert len((await other.finished(60)).output["embeddings"]) == 1
    await wait_until_async(lambda: told, 30, "the kernel refused nothing: the limit is too large for this test")
