"""The merge policies."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.queues.merge import Merge

POLICIES: list[Any] = ["strict", "weighted", "round_robin", "random"]


def drawn(policy: Any, weights: list[int], count: int, ready: set[int] | None = None) -> list[int]:
    merge = Merge(policy, weights, Random(7))
    return [merge.next(ready or set(range(len(weights)))) for _ in range(count)]


@pytest.mark.parametrize(
    ("policy", "weights", "ready", "chosen"),
    [
        ("strict", [1, 1, 1], {0, 1, 2}, [0, 0, 0]),
        ("strict", [1, 1, 1], {2, 1}, [1, 1, 1]),
        ("round_robin", [1, 9, 1], {0, 1, 2}, [0, 1, 2, 0, 1, 2]),
        ("round_robin", [1, 9, 1], {0, 2}, [0, 2, 0, 2]),
        ("weighted", [5, 1, 1], {0, 1, 2}, [0, 0, 1, 0, 2, 0, 0]),
    ],
)
def test_the_order_of_a_policy(policy: Any, weights: list[int], ready: set[int], chosen: list[int]) -> None:
    assert drawn(policy, weights, len(chosen), ready) == chosen


def test_an_empty_queue_does_not_catch_up_later_and_random_is_in_proportion() -> None:
    merge = Merge("weighted", [1, 1], Random(7))
    for _ in range(100):
        merge.next({0})
    assert Counter(merge.next({0, 1}) for _ in range(100)) == {0: 50, 1: 50}
    assert 2800 < Counter(drawn("random", [3, 1], 4000))[0] < 3200


@given(
    policy=st.sampled_from(POLICIES),
    weights=st.lists(st.integers(1, 20), min_size=1, max_size=6),
    data=st.data(),
)
def test_only_ready_queues_are_chosen(policy: Any, weights: list[int], data: st.DataObject) -> None:
    merge = Merge(policy, weights, Random(7))
    for ready in data.draw(st.lists(st.sets(st.integers(0, len(weights) - 1), min_size=1), max_size=30)):
        assert merge.next(ready) in ready
    with pytest.raises(ValueError, match="ready"):
        merge.next([])


@given(weights=st.lists(st.integers(1, 9), min_size=1, max_size=5))
def test_no_weighted_queue_waits_longer_than_the_sum_of_weights(weights: list[int]) -> None:
    chosen = drawn("weighted", weights, 3 * sum(weights))
    for queue, weight in enumerate(weights):
        assert chosen.count(queue) == 3 * weight
