"""Committed offsets that are not known are asked for again: unknown never means none."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition

from penstock.processors.kafka.batches import TP
from penstock.processors.kafka.offsets import commit_results, committed_or_start

A, B = ("t", 0), ("t", 1)
GENERATION_IS_OVER = (
    KafkaError.ILLEGAL_GENERATION,
    KafkaError.UNKNOWN_MEMBER_ID,
    KafkaError.REBALANCE_IN_PROGRESS,
    KafkaError.GROUP_ID_NOT_FOUND,
)
NONE = -1001


def partition(tp: TP, offset: int, metadata: str | None = None, error: KafkaError | None = None) -> Any:
    """As TopicPartition, with an error of one's choice."""
    return SimpleNamespace(topic=tp[0], partition=tp[1], offset=offset, metadata=metadata, error=error)


class FakeConsumer:
    """Answers `committed`, `offsets_for_times` and `commit` from scripts, whose last line repeats."""

    def __init__(self, committed: Sequence[Any], starts: Sequence[Any] = (), commits: Sequence[Any] = ((),)) -> None:
        self.scripts = {"committed": list(committed), "starts": list(starts), "commits": list(commits)}
        self.asked: list[str] = []
        self.written: list[dict[TP, int]] = []

    def _next(self, name: str) -> Any:
        self.asked.append(name)
        script = self.scripts[name]
        answer = script.pop(0) if len(script) > 1 else script[0]
        if isinstance(answer, int):
            raise KafkaException(KafkaError(answer))
        return list(answer)

    def committed(self, partitions: Sequence[TopicPartition], timeout: float) -> Any:
        return self._next("committed")

    def offsets_for_times(self, partitions: Sequence[TopicPartition], timeout: float) -> Any:
        assert all(p.offset == -2 for p in partitions)
        return self._next("starts")

    def commit(self, *, offsets: Sequence[TopicPartition], asynchronous: bool) -> Any:
        assert not asynchronous
        self._next("commits")
        self.written.append({(p.topic, p.partition): p.offset for p in offsets})
        return offsets


def patient(limit: int = 50) -> Any:
    left = [limit]

    def wait(seconds: float, reason: str) -> bool:
        left[0] -= 1
        return left[0] <= 0

    return wait


def test_only_a_clear_none_gets_the_start_committed() -> None:
    kafka = FakeConsumer([[partition(A, 0, "map"), partition(B, NONE)]], [[partition(B, 3)]])
    assert committed_or_start(kafka, [A, B], patient()) == {A: (0, "map"), B: (3, "")}
    assert kafka.written == [{B: 3}]


@pytest.mark.parametrize(
    "unknown",
    [
        KafkaError._TIMED_OUT,
        KafkaError._WAIT_COORD,
        KafkaError.COORDINATOR_NOT_AVAILABLE,
        KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
        KafkaError.NOT_COORDINATOR,
        KafkaError._TRANSPORT,
        KafkaError.GROUP_AUTHORIZATION_FAILED,
        KafkaError.UNKNOWN_TOPIC_OR_PART,
    ],
)
@pytest.mark.parametrize("of_one_partition", [False, True])
def test_an_error_is_asked_again_and_never_none(unknown: int, of_one_partition: bool) -> None:
    error: Any = unknown
    if of_one_partition:
        error = [partition(A, 2491), partition(B, NONE, error=KafkaError(unknown))]
    kafka = FakeConsumer([error] * 9 + [[partition(A, 2491), partition(B, 2492)]])
    assert committed_or_start(kafka, [A, B], patient()) == {A: (2491, ""), B: (2492, "")}
    assert kafka.asked == ["committed"] * 10
    assert kafka.written == []


@pytest.mark.parametrize("strange", [-1, -2, -1000, -3001])
def test_an_offset_that_is_neither_an_offset_nor_none_is_asked_again(strange: int) -> None:
    kafka = FakeConsumer([[partition(A, strange)], [partition(A, 9)]])
    assert committed_or_start(kafka, [A], patient()) == {A: (9, "")}


TIMED_OUT, TAKEN = KafkaError._TIMED_OUT, ()
NO_COMMIT, START = [partition(A, NONE)], [partition(A, 3)]


@pytest.mark.parametrize(
    ("committed", "starts", "commits", "found", "tries"),
    [
        (TIMED_OUT, [TAKEN], [TAKEN], None, 0),
        (NO_COMMIT, [TIMED_OUT], [TAKEN], None, 0),
        (NO_COMMIT, [START], [TIMED_OUT], None, 3),
        (NO_COMMIT, [START], [KafkaError.NOT_COORDINATOR, TAKEN], {A: (3, "")}, 2),
        *((NO_COMMIT, [START], [over], None, 1) for over in GENERATION_IS_OVER),
    ],
)
def test_a_start_is_committed_until_it_is_taken_or_nobody_waits_or_the_generation_is_over(
    committed: Any, starts: Sequence[Any], commits: Sequence[Any], found: Any, tries: int
) -> None:
    kafka = FakeConsumer([committed], starts, commits)
    assert committed_or_start(kafka, [A], patient(3)) == found
    assert kafka.asked.count("commits") == tries


def test_an_error_of_the_whole_leaves_nothing_surely_taken() -> None:
    offsets = {A: (1, ""), B: (2, "")}
    answer: Any = [partition(A, 1), partition(B, 2, error=KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART))]
    assert commit_results(offsets, KafkaError(TIMED_OUT), answer) == {A: False, B: False}
    assert commit_results(offsets, None, answer) == {A: True, B: False}
