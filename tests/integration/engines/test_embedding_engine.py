"""The embedding engine: meaning, batches that change nothing, limits."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

import pytest

from penstock.schemas.errors import ContextLengthExceeded, InvalidRequest

from .conftest import Runner, StartEngine

pytestmark = pytest.mark.model

SENTENCE = "A man is playing the guitar on stage."
PARAPHRASE = "A guitarist is performing on stage."
LOOSE_PARAPHRASE = "Someone performs guitar music in front of an audience."
UNRELATED = "The central bank raised interest rates by a quarter point."


def cosine(one: list[float], other: list[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True)) / (math.hypot(*one) * math.hypot(*other))


async def embed(runner: Runner, *texts: str, dimensions: int | None = None) -> list[list[float]]:
    params = {} if dimensions is None else {"dimensions": dimensions}
    run = await runner.begin(task="embedding", inputs=list(texts), params=params)
    found = await run.finished()
    assert found.usage is not None
    assert found.usage["prompt_tokens"] == run.prepared.prompt_tokens > 0
    return found.output["embeddings"]


async def test_embeddings(start_engine: StartEngine, minilm: Path) -> None:
    runner = await start_engine("embedding", minilm)
    alone, paraphrase, unrelated = [(await embed(runner, text))[0] for text in (SENTENCE, PARAPHRASE, UNRELATED)]
    assert cosine(alone, paraphrase) > 0.7
    assert cosine(alone, unrelated) < 0.2
    assert math.hypot(*alone) == pytest.approx(1, abs=1e-5)
    # What the model gives without us: AutoModel on one sentence, mean of its hidden states. It is not always above 0.7.
    loose = (await embed(runner, LOOSE_PARAPHRASE))[0]
    happy, dog, very, sunny = await embed(
        runner, "That is a happy person", "That is a happy dog", "That is a very happy person", "Today is a sunny day"
    )
    found = [cosine(alone, loose), cosine(happy, dog), cosine(happy, very), cosine(happy, sunny)]
    assert found == pytest.approx([0.6059, 0.6946, 0.9429, 0.2569], abs=1e-4)

    # In company of texts of all lengths, within a request and across requests that come together.
    company = [" ".join(["word"] * count) for count in (1, 3, 40, 200, 8)]
    together = await asyncio.gather(
        embed(runner, company[2], SENTENCE, company[3], UNRELATED, *company),
        *(embed(runner, SENTENCE, text) for text in company),
    )
    assert max(abs(a - b) for a, b in zip(together[0][1], alone, strict=True)) < 1e-5
    assert max(abs(a - b) for a, b in zip(together[0][3], unrelated, strict=True)) < 1e-5
    for found in together[1:]:
        assert max(abs(a - b) for a, b in zip(found[0], alone, strict=True)) < 1e-5

    short = (await embed(runner, SENTENCE, dimensions=64))[0]
    assert len(short) == 64
    assert math.hypot(*short) == pytest.approx(1, abs=1e-5)
    assert cosine(short, alone[:64]) == pytest.approx(1, abs=1e-5)

    with pytest.raises(ContextLengthExceeded) as caught:
        await runner.begin(task="embedding", inputs=["fine", "word " * 600])
    assert caught.value.param == "payload.input[1]"
    for dimensions in (0, 385):
        with pytest.raises(InvalidRequest):
            await runner.begin(task="embedding", inputs=["x"], params={"dimensions": dimensions})
    with pytest.raises(InvalidRequest):
        await runner.begin(task="embedding", inputs=[])

    many = await runner.begin(task="embedding", inputs=["word " * 200] * 200)
    runner.engine.cancel(many.spec.run_id)
    assert (await embed(runner, SENTENCE))[0] == pytest.approx(alone, abs=1e-5)
    assert not many.done.done()
    assert runner.engine.limits().slots == 256


async def test_an_urgent_text_does_not_wait_for_all_that_came_before(start_engine: StartEngine, minilm: Path) -> None:
    """A question to an index waited until all that was being put into it had its vectors."""
    runner = await start_engine("embedding", minilm)
    texts = [f"{number} " + "word " * 60 for number in range(40)]
    low = [await runner.begin(task="embedding", inputs=texts, priority=8) for _ in range(20)]
    urgent = await runner.begin(task="embedding", inputs=[SENTENCE], priority=1)
    await urgent.finished()
    assert sum(run.done.done() for run in low) < 10
    await asyncio.gather(*(run.finished() for run in low))
