"""The loads of the fault table: one request's text in place of another's must be seen."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.faults import loads
from penstock.cli.faults.loads import Load, load_of
from penstock.cli.faults.matrix import Plan
from penstock.cli.makers.tiny_lm import ANIMALS, COLORS, NAMES
from penstock.processors.outputs import INLINE_BYTES


def load(row: str, count: int) -> Load:
    return load_of(Plan(row=row, moment="mid_stream"), count, "http://127.0.0.1:1", random.Random(1))


def test_large_outputs_are_just_over_the_limit_and_differ_among_clients_of_one_kind() -> None:
    by_client: defaultdict[str, set[str]] = defaultdict(set)
    asked = load("store", 64).asked
    for one in asked:
        assert INLINE_BYTES < len(one.text.encode()) < 1.5 * INLINE_BYTES
        by_client[one.client].add(one.text)
    assert [len(texts) for texts in by_client.values()] == [16] * 4


@pytest.mark.parametrize("count", [60, 1_000])
def test_large_outputs_last_as_long_as_other_streams(count: int) -> None:
    options: dict[str, Any] = load("store", count).models[0]["options"]
    shortest = min(one.body["payload"]["max_tokens"] for one in load("store", count).asked)
    assert options["tokens"] >= max(one.body["payload"]["max_tokens"] for one in load("store", count).asked)
    assert options["delay_ms"] * shortest >= max(15 * 1_000, shortest * count)


def test_each_story_prefers_words_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = {f"Ġ{word}": number for number, word in enumerate([*ANIMALS, *COLORS, *NAMES])}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": words}}))
    monkeypatch.setattr(loads, "prepare_model", lambda model: tmp_path)
    found = load("engine", 1_000)
    biases = {prompt["extra"]["logit_bias"] for prompt in found.prompts}
    assert len(biases) == len(found.prompts) == 64
    assert all(len(json.loads(bias)) == 3 for bias in biases)
    for one in found.asked:
        assert one.body["extra"] == found.prompts[one.number % 64]["extra"]
    assert len(load("engine", 20).prompts) == 20
