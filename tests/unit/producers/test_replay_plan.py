"""Decisions of a replay of many conversations, without Kafka."""

from __future__ import annotations

import re
from contextlib import nullcontext
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.common.group_positions import Kept
from penstock.producers.replay_plan import (
    Erasures,
    Pace,
    ReplayedRecord,
    begin_at,
    check_kept,
    check_options,
    cut,
    matching,
    next_window,
)  # fmt: skip
from penstock.schemas.errors import Conflict, InvalidRequest


@pytest.mark.parametrize(
    ("kept", "start", "position"),
    [
        (None, 5, 5),
        (None, 0, 3),  # before the log
        (Kept(offset=7, topic_id="a"), 5, 7),
        (Kept(offset=7, topic_id=""), 5, 7),  # set by Kafka's own tools
        (Kept(offset=7, topic_id="b"), 5, 5),  # that conversation was deleted
        (Kept(offset=11, topic_id="a"), 5, 5),  # the log lost records
        (Kept(offset=10, topic_id="a"), 5, 10),
        (Kept(offset=1, topic_id="a"), 5, 3),  # those records are gone
    ],
)
def test_where_a_conversation_begins(kept: Kept | None, start: int, position: int) -> None:
    assert begin_at(kept, "a", start, (3, 10)) == position


@pytest.mark.parametrize(
    ("kept", "says"),
    [
        (Kept(offset=7, topic_id="a", note='["acme", "trip-*"]'), None),
        (Kept(offset=7, topic_id="b", note='["acme", "*"]'), None),  # of a topic that is gone
        (Kept(offset=7, topic_id="a"), None),  # set by Kafka's own tools
        (Kept(offset=7, topic_id="a", note='["acme", "*"]'), "the conversations '*' of the tenant acme"),
        (Kept(offset=7, topic_id="a", note="0 0"), "another service"),
        (Kept(offset=7, topic_id="a", note="7"), "another service"),
    ],
)
def test_a_group_of_another_replay_is_refused(kept: Kept, says: str | None) -> None:
    refusal = pytest.raises(Conflict, match=f"the group index keeps the positions of {re.escape(says or '')}: each")
    with nullcontext() if says is None else refusal as refused:
        check_kept(kept, "a", '["acme", "trip-*"]', "index")
    assert refused is None or refused.value.param == "group"
    check_kept(kept, "a", "", "index")  # in a topic of its own nothing is skipped


@pytest.mark.parametrize(
    ("pattern", "found"), [("*", ["a", "trip-1", "trip-2"]), ("trip-*", ["trip-1", "trip-2"]), ("A", []), ("?", ["a"])]
)
def test_ids_match_a_glob(pattern: str, found: list[str]) -> None:
    assert matching(pattern, ["trip-2", "a", "trip-1"]) == found


@given(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=20), most=st.integers(1, 60), topics=st.integers(1, 5))
def test_windows_read_each_record_once_within_their_bounds(lengths: list[int], most: int, topics: int) -> None:
    positions = {(str(number), 0): 0 for number in range(len(lengths))}
    goals = dict(zip(positions, lengths, strict=True))
    while behind := [(place, (at, goals[place])) for place, at in positions.items() if at < goals[place]]:
        window = next_window(behind, most, topics)
        assert 1 <= len(window) <= topics
        assert 1 <= sum(end - begin for begin, end in window.values()) <= most
        for place, (begin, end) in window.items():
            assert begin == positions[place]
            assert begin < end <= goals[place]
            positions[place] = end
    assert positions == goals


def test_only_records_before_their_tombstone_are_erased() -> None:
    erased = Erasures()
    erased.add(b"k", 5)
    erased.add(b"k", 3)
    asked = [(b"k", 4), (b"k", 5), (b"k", 6), (b"other", 0)]
    assert [erased.erase(*one) for one in asked] == [True, False, False, False]
    erased.drop_before(5)
    assert erased.erase(b"k", 4)
    erased.drop_before(6)
    assert not erased.erase(b"k", 4)


def record(conversation: str, offset: int) -> ReplayedRecord:
    return ReplayedRecord(conversation_id=conversation, offset=offset, timestamp_ms=0, key="k", message=None)


@given(of=st.lists(st.sampled_from("abc"), max_size=30), most=st.integers(1, 5), more=st.integers(0, 3))
def test_pieces_are_complete_and_each_position_is_before_the_rest(of: list[str], most: int, more: int) -> None:
    records = [record(one, offset) for offset, one in enumerate(of)]
    conversations = [[one for one in records if one.conversation_id == name] for name in "cab"]
    pieces = cut(conversations, most, len(of) + more)
    for number, (found, through) in enumerate(pieces):
        assert len(found) <= most
        left = [one.offset for later in pieces[number + 1 :] for one in later.records]
        assert through == min(left, default=len(of) + more)
    for conversation in conversations:
        names = {one.conversation_id for one in conversation}
        assert [one for found, _ in pieces for one in found if one.conversation_id in names] == conversation


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
def test_impossible_options_are_refused(options: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check_options(options)
    assert refused.value.param == param
