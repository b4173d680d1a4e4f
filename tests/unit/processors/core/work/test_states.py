"""The table of states: closed, reachable, and enforced."""

from __future__ import annotations

import pytest

from penstock.processors.core.work.states import (
    ENDING,
    IN_SCHEDULER,
    ON_LANE,
    OVER,
    TABLE,
    IllegalTransition,
    Stage,
    check,
)


def test_every_stage_is_in_the_table_and_belongs_to_one_kind_at_most() -> None:
    assert set(TABLE) == set(Stage)
    kinds = [IN_SCHEDULER, ON_LANE, ENDING, OVER]
    for stage in Stage:
        assert sum(stage in kind for kind in kinds) <= 1, stage


def test_every_stage_is_reached_from_new_and_reaches_an_end() -> None:
    reached, frontier = {Stage.NEW}, [Stage.NEW]
    while frontier:
        for follow in TABLE[frontier.pop()].values():
            frontier += [stage for stage in follow if stage not in reached]
            reached |= set(follow)
    assert reached == set(Stage)
    ends = set(OVER)
    while True:
        more = {s for s, events in TABLE.items() if any(set(follow) & ends for follow in events.values())} - ends
        if not more:
            break
        ends |= more
    assert ends == set(Stage)


def test_everything_held_can_be_dropped_and_nothing_follows_an_end() -> None:
    for stage, events in TABLE.items():
        if stage in OVER:
            assert not events
        elif stage is not Stage.NEW:
            assert events["drop"] == (Stage.DROPPED,)


def test_what_is_not_in_the_table_raises() -> None:
    check(Stage.QUEUED, "prepare", Stage.PREPARING)
    with pytest.raises(IllegalTransition, match="queued"):
        check(Stage.QUEUED, "finished", Stage.PUBLISHING)
    with pytest.raises(IllegalTransition):
        check(Stage.DONE, "drop", Stage.DROPPED)
