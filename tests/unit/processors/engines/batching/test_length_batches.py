"""Batches of texts of like length: none is lost or waits for ever, and padding stays small."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from penstock.processors.engines.batching.length_batches import LengthBatches

LENGTHS = st.lists(st.integers(1, 40), max_size=60)


def turn(text: int) -> int:
    return text * 7 % 13


def padded(lengths: list[int]) -> int:
    return len(lengths) * max(lengths)


@given(steps=st.lists(st.one_of(LENGTHS, st.just("take")), max_size=30), most=st.integers(1, 200))
def test_each_text_comes_once_in_a_batch_that_fits_and_in_its_turn(steps: list[object], most: int) -> None:
    waiting: dict[int, int] = {}
    batches: LengthBatches[int] = LengthBatches()
    count = 0

    def take() -> None:
        full = batches.fills(most)
        batch = batches.take(most)
        assert len(set(batch)) == len(batch)
        assert bool(batch) == bool(waiting)
        if batch:
            assert min(waiting, key=lambda text: (turn(text), text)) in batch
            lengths = [waiting.pop(text) for text in batch]
            assert lengths == sorted(lengths)
            assert len(batch) == 1 or padded(lengths) <= most
            assert full or all(length <= min(lengths) for length in waiting.values())
        assert len(batches) == len(waiting)

    for step in steps:
        if isinstance(step, list):
            for length in step:
                waiting[count] = length
                batches.add(count, length, turn(count))
                count += 1
        else:
            take()
    while waiting:
        take()
    assert batches.take(most) == []


@given(lengths=LENGTHS, most=st.integers(1, 200))
def test_what_waits_together_pads_as_little_as_sorted_texts(lengths: list[int], most: int) -> None:
    batches: LengthBatches[int] = LengthBatches()
    for number, length in enumerate(lengths):
        batches.add(number, length, number)
    taken = []
    while batch := batches.take(most):
        taken.append([lengths[number] for number in batch])
    expected, rest = [], sorted(lengths)
    while rest:
        end = 1
        while end < len(rest) and rest[end] * (end + 1) <= most:
            end += 1
        expected.append(rest[:end])
        rest = rest[end:]
    assert sorted(taken) == sorted(expected)


def test_who_is_dropped_is_in_no_batch() -> None:
    batches: LengthBatches[tuple[str, int]] = LengthBatches()
    for number in range(20):
        batches.add(("even" if number % 2 == 0 else "odd", number), number + 1, number)
    batches.drop(lambda text: text[0] == "even")
    assert len(batches) == 10
    found = []
    while batch := batches.take(30):
        found += batch
    assert sorted(found) == [("odd", number) for number in range(1, 20, 2)]


def test_with_texts_that_keep_coming_padding_stays_small() -> None:
    chance = random.Random(1)
    batches: LengthBatches[int] = LengthBatches()
    real = spent = 0
    lengths: list[int] = []
    for _ in range(300):
        while len(batches) < 512:
            batches.add(len(lengths), length := chance.randint(12, 130), len(lengths))
            lengths.append(length)
        batch = [lengths[number] for number in batches.take(2048)]
        real, spent = real + sum(batch), spent + padded(batch)
    assert spent / real < 1.05
