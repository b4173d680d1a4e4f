"""Suspects: one culprit among any number is found, alone, after few deaths, and nobody else is ever accused."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from penstock.processors.core.work.suspects import SuspectGroup, clear_suspicion, suspect_all


class Victim:
    def __init__(self, seq: int) -> None:
        self.seq = seq
        self.deaths = 0
        self.group: SuspectGroup | None = None


@given(st.integers(1, 300), st.data())
def test_the_culprit_is_found_by_halves(count: int, data: st.DataObject) -> None:
    works = [Victim(n) for n in range(count)]
    culprit = works[data.draw(st.integers(0, count - 1))]
    accused = suspect_all(works)
    deaths = 1
    waiting = set(works)
    while accused is None:
        group = next(iter(sorted((w for w in waiting if w.group is not None), key=lambda w: w.seq))).group
        members = list(group.members)
        if culprit in members:
            deaths += 1
            accused = suspect_all(members)
        else:
            for member in members:
                clear_suspicion(member)
                waiting.discard(member)
    assert accused is culprit
    assert deaths <= math.ceil(math.log2(count)) + 1
    assert culprit.deaths == deaths


@given(st.lists(st.integers(0, 40), min_size=1, max_size=41, unique=True))
def test_each_victim_is_in_one_group_of_about_half(seqs: list[int]) -> None:
    works = [Victim(seq) for seq in seqs]
    old = SuspectGroup(works)
    for work in works:
        work.group = old
    accused = suspect_all(works)
    assert not old.members
    groups = {id(work.group): work.group for work in works if work.group is not None}
    assert sum(len(group) for group in groups.values()) == len(works)
    sizes = sorted(len(group) for group in groups.values())
    assert sizes[-1] - sizes[0] <= 1
    assert (accused is not None) == (len(works) == 1)
