"""Decisions of a replay of many conversations, without Kafka."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.common.conversations import ConversationRecord
from penstock.common.group_positions import Kept
from penstock.producers.replay_plan import Erasures, Pace, begin_at, check_options, matching, next_window
from penstock.schemas.errors import InvalidRequest


@pytest.mark.parametrize(
    ("kept", "position"),
    [
        (None, 5),
        (Kept(offset=7, topic_id="a"), 7),
        (Kept(offset=7, topic_id=""), 7),  # set by Kafka's own tools
        (Kept(offset=7, topic_id="b"), 5),  # that conversation was deleted
        (Kept(offset=11, topic_id="a"), 5),  # the log lost records
        (Kept(offset=10, topic_id="a"), 10),
        (Kept(offset=1, topic_id="a"), 3),  # what stood there is gone
    ],
)
def test_where_a_conversation_begins(kept: Kept | None, position: int) -> None:
    assert begin_at(kept, "a", 5, (3, 10)) == position


def test_a_start_before_the_log_is_its_first_record() -> None:
    assert begin_at(None, "a", 0, (3, 10)) == 3


@pytest.mark.parametrize(
    ("pattern", "found"), [("*", ["a", "trip-1", "trip-2"]), ("trip-*", ["trip-1", "trip-2"]), ("A", []), ("?", ["a"])]
)
def test_ids_match_a_glob(pattern: str, found: list[str]) -> None:
    assert matching(pattern, ["trip-2", "a", "trip-1"]) == found


@given(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=20), most=st.integers(1, 60), topics=st.integers(1, 5))
def test_windows_read_each_record_once_and_hold_no_more_than_they_may(
    lengths: list[int], most: int, topics: int
) -> None:
    positions = dict.fromkeys(map(str, range(len(lengths))), 0)
    goals = dict(zip(positions, lengths, strict=True))
    while behind := [(topic, (at, goals[topic])) for topic, at in positions.items() if at < goals[topic]]:
        window = next_window(behind, most, topics)
        assert 1 <= len(window) <= topics
        assert 1 <= sum(end - begin for begin, end in window.values()) <= most
        for topic, (begin, end) in window.items():
            assert begin == positions[topic]
            assert begin < end <= goals[topic]
            positions[topic] = end
    assert positions == goals


def test_only_what_stands_before_its_tombstone_is_erased() -> None:
    erased = Erasures()
    erased.add("k", 5)
    erased.add("k", 3)

    def at(offset: int, key: str = "k") -> ConversationRecord:
        return ConversationRecord(offset=offset, timestamp_ms=0, key=key, message=None)

    assert [erased.erase(at(4)), erased.erase(at(5)), erased.erase(at(6)), erased.erase(at(0, "other"))] == [
        True,
        False,
        False,
        False,
    ]


@pytest.mark.parametrize("rate", [0.5, 3, 40, 1000])
def test_a_rate_holds(rate: float) -> None:
    """Batches as large as it allows, each after the wait that it asks for: on no second more than the rate, and one
    batch."""
    pace, now, handed = Pace(rate), 0.0, list[tuple[float, int]]()
    for _ in range(50):
        now += pace.wait_s(now)
        batch = pace.most(100)
        pace.count(batch, now)
        handed.append((now, batch))
    total = sum(count for _, count in handed[:-1])
    assert handed[-1][0] == pytest.approx(total / rate)
    for begin, _ in handed:
        assert sum(count for at, count in handed if begin <= at < begin + 1) <= rate + pace.most(100)


def test_a_pause_of_the_caller_is_not_made_up_for() -> None:
    pace = Pace(10)
    pace.count(10, 0.0)
    assert pace.wait_s(100.0) == 0
    pace.count(10, 100.0)
    assert pace.wait_s(100.0) == pytest.approx(1)


def test_without_a_rate_nothing_waits() -> None:
    pace = Pace(None)
    pace.count(1_000, 0.0)
    assert (pace.wait_s(0.0), pace.most(1_000)) == (0, 1_000)


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"group": ""}, "group"),
        ({"from_offset": 1, "since_ms": 1}, "since_ms"),
        ({"from_offset": -1}, "from_offset"),
        ({"rate": 0.0}, "rate"),
        ({"rate": float("inf")}, "rate"),
        ({"rate": float("nan")}, "rate"),
        ({"batch_records": 0}, "batch_records"),
    ],
)
def test_options_that_cannot_be_are_refused(options: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check_options(options)
    assert refused.value.param == param
