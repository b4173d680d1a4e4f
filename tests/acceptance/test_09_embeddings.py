"""Point 9: embeddings mean something: near for a paraphrase, far for the unrelated; alone or in a batch the same."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from kit.assets import prepared
from system import System

pytestmark = pytest.mark.model
TEXTS = ["The cat sat on the mat.", "A cat was sitting on a rug.", "Interest rates rose by half a percent on Tuesday."]


def SYSTEM() -> dict[str, Any]:
    minilm = str(prepared("all-minilm-l6-v2"))
    return {"models": [{"id": "all-minilm-l6-v2", "source": minilm, "engine": "embedding", "tasks": ["embedding"]}]}


@pytest.fixture(scope="module")
def client(system: System) -> openai.OpenAI:
    return openai.OpenAI(base_url=system.process("g1").url + "/v1", api_key="unused", max_retries=0, timeout=120)


def vectors(client: openai.OpenAI, texts: list[str]) -> list[list[float]]:
    answer = client.embeddings.create(model="all-minilm-l6-v2", input=texts)
    assert [item.index for item in answer.data] == list(range(len(texts)))
    return [item.embedding for item in answer.data]


def cosine(left: list[float], right: list[float]) -> float:
    dot = sum(a * b for a, b in zip(left, right, strict=True))
    norms = (sum(a * a for a in left) * sum(b * b for b in right)) ** 0.5
    return dot / norms


def test_meaning(client: openai.OpenAI) -> None:
    cat, paraphrase, finance = vectors(client, TEXTS)
    assert cosine(cat, paraphrase) > 0.7
    assert cosine(cat, finance) < 0.2


def test_alone_and_in_a_batch_agree(client: openai.OpenAI) -> None:
    batch = vectors(client, TEXTS)
    for text, together in zip(TEXTS, batch, strict=True):
        alone = vectors(client, [text])[0]
        assert max(abs(a - b) for a, b in zip(alone, together, strict=True)) < 1e-5


def test_a_thousand_texts_in_one_request(client: openai.OpenAI) -> None:
    """Their vectors are 1.5 MB: more than a record may hold."""
    many = vectors(client, [f"{TEXTS[n % 3]} Number {n}." for n in range(1_000)])
    assert len(many) == 1_000
    alone = vectors(client, [f"{TEXTS[999 % 3]} Number 999."])[0]
    assert max(abs(a - b) for a, b in zip(alone, many[-1], strict=True)) < 1e-5
