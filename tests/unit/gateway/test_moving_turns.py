"""Which turns another priority moves: a conversation's turns keep the order of their log."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.gateway_records import ORIGIN, status
from penstock.gateway.service.moving_turns import moved_turns, rank_of
from penstock.gateway.view.entries import Entry

PRIORITY = {"h": 1, "m": 5, "l": 9}


def turn(number: int, priority: int, *, task: str = "text_generation") -> Entry:
    entry = Entry("t", f"r{number}", 0)
    entry.task, entry.conversation_id, entry.priority, entry.accepted_ms = task, "c", priority, 1_000 + number
    entry.origin = replace(ORIGIN, offset=number, append_time_ms=entry.accepted_ms)
    return entry


@pytest.mark.parametrize(
    ("classes", "chosen", "to", "moved"),
    [
        ("lll", "2", "h", ["r0", "r1", "r2"]),
        ("lll", "0", "h", ["r0"]),
        ("mml", "2", "m", ["r2"]),
        ("hml", "2", "h", ["r1", "r2"]),
        ("mmm", "0", "l", ["r2", "r1", "r0"]),
        ("mmm", "2", "l", ["r2"]),
        ("mlm", "0", "l", ["r2", "r0"]),
        ("lmh", "1", "m", []),
        ("lmh", "02", "m", ["r0", "r2"]),
        ("llll", "13", "h", ["r0", "r1", "r2", "r3"]),
    ],
)
def test_which_turns_move(classes: str, chosen: str, to: str, moved: list[str]) -> None:
    turns = [turn(number, PRIORITY[klass]) for number, klass in enumerate(classes)]
    ids = {f"r{number}" for number in chosen}
    found = moved_turns(turns, lambda one: one.request_id in ids, PRIORITY[to])
    assert [one.request_id for one in found] == moved


def test_running_and_ended_turns_and_summaries_do_not_move() -> None:
    runs, ended, summary, last = turn(0, 9), turn(1, 9), turn(2, 9, task="summarization"), turn(3, 9)
    runs.status = status(request_id="r0")
    ended.ended_as = "completed"
    assert moved_turns([runs, ended, summary, last], lambda one: one is last, 1) == [last]


@given(st.lists(st.integers(0, 12), max_size=8), st.sets(st.integers(0, 7)), st.integers(0, 12))
def test_turns_that_were_in_order_are_in_order_after_each_command(
    priorities: list[int], chosen: set[int], priority: int
) -> None:
    turns = [turn(number, rank) for number, rank in enumerate(sorted(priorities, key=rank_of))]
    picked = {f"r{number}" for number in chosen}
    for one in moved_turns(turns, lambda one: one.request_id in picked, priority):
        one.priority = priority
        ranks = [rank_of(each.priority) for each in turns]
        assert ranks == sorted(ranks)
    assert all(one.priority == priority for one in turns if one.request_id in picked)
