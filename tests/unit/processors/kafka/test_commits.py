"""Commits: one at a time, the newest of each partition, never lower, each question answered once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from penstock.processors.kafka.batches import TP, Committed
from penstock.processors.kafka.commits import CommitQueue, Sent

A, B = ("t", 0), ("t", 1)


def begun(**offsets: int) -> CommitQueue:
    commits = CommitQueue()
    commits.begin({A: (offsets.get("a", 0), ""), B: (offsets.get("b", 0), "")})
    return commits


def ask(commits: CommitQueue, offsets: dict[TP, Committed]) -> list[dict[TP, bool]]:
    answers: list[dict[TP, bool]] = []
    commits.ask(offsets, answers.append)
    return answers


def test_what_comes_while_one_is_on_its_way_is_sent_together_the_newest_only() -> None:
    commits = begun()
    first = ask(commits, {A: (1, "")})
    sent = commits.next()
    assert sent.offsets == {A: (1, "")}
    later = [ask(commits, {A: (n, "")}) for n in (2, 3)]
    other = ask(commits, {B: (1, "m")})
    assert commits.next() is None
    commits.answer(sent, {A: True})
    assert first == [{A: True}]
    assert later == [[], []]
    sent = commits.next()
    assert sent.offsets == {A: (3, ""), B: (1, "m")}
    commits.answer(sent, {A: True, B: False})
    assert later == [[{A: True}], [{A: True}]]
    assert other == [[{B: False}]][0]


def test_metadata_that_changes_back_while_it_is_on_its_way_is_sent_again() -> None:
    commits = begun(a=5)
    ask(commits, {A: (5, "map")})
    sent = commits.next()
    assert ask(commits, {A: (5, "")}) == []
    commits.answer(sent, {A: True})
    sent = commits.next()
    assert sent.offsets == {A: (5, "")}


def test_one_partition_to_blame_does_not_fail_the_others() -> None:
    commits = begun()
    answers = ask(commits, {A: (1, "too large"), B: (1, "")})
    sent = commits.next()
    commits.answer(sent, {}, one_by_one=True)
    alone: list[dict[TP, Committed]] = []
    while (sent := commits.next()) is not None:
        alone.append(sent.offsets)
        commits.answer(sent, {tp: tp == B for tp in sent.offsets}, one_by_one=True)
    assert sorted(alone, key=str) == [{A: (1, "too large")}, {B: (1, "")}]
    assert answers == [{A: False, B: True}]


def test_a_new_assignment_answers_all_that_is_open_and_ignores_old_answers() -> None:
    commits = begun()
    sent_answers = ask(commits, {A: (1, "")})
    sent = commits.next()
    assert sent is not None
    waiting = ask(commits, {A: (2, ""), B: (3, "")})
    commits.begin({A: (7, "")})
    assert sent_answers == [{A: False}]
    assert waiting == [{A: False, B: False}]
    commits.answer(sent, {A: True})
    assert ask(commits, {A: (7, "")}) == [{A: True}]
    assert ask(commits, {A: (6, "")}) == [{A: False}]


def test_before_partitions_go_all_that_is_open_is_sent_once_more() -> None:
    commits = begun()
    first = ask(commits, {A: (1, "")})
    commits.next()
    second = ask(commits, {A: (2, ""), B: (3, "")})
    assert commits.all_open() == {A: (2, ""), B: (3, "")}
    commits.answer_all({A: True, B: False})
    assert first == [{A: True}]
    assert second == [{A: True, B: False}]
    assert commits.all_open() == {}


steps = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.sampled_from([A, B]), st.integers(0, 9), st.sampled_from(["", "m", "n"])),
        st.tuples(st.just("send")),
        st.tuples(st.just("answer"), st.booleans(), st.booleans()),
    ),
    max_size=40,
)


@given(steps)
def test_the_broker_never_sees_a_lower_offset_and_everyone_is_answered_once(steps: list[tuple[Any, ...]]) -> None:
    commits, log = begun(a=2), dict[TP, list[int]]({A: [2], B: [0]})
    answers: list[list[dict[TP, bool]]] = []
    sent: Sent | None = None

    def send() -> Sent | None:
        found = commits.next()
        for tp, (offset, _) in found.offsets.items() if found is not None else ():
            log[tp].append(offset)
        return found

    def answer(ok: bool, one_by_one: bool) -> None:
        if sent is not None:
            commits.answer(sent, dict.fromkeys(sent.offsets, ok), one_by_one=one_by_one)

    actions: dict[str, Callable[..., Any]] = {
        "ask": lambda tp, offset, metadata: answers.append(ask(commits, {tp: (offset, metadata)})),
        "answer": answer,
    }
    for step in steps:
        if step[0] == "send":
            sent = send() or sent
        else:
            actions[step[0]](*step[1:])
            sent = None if step[0] == "answer" else sent
    while (sent := send() or commits.sent) is not None:
        answer(True, False)
    assert all(len(answer) == 1 for answer in answers)
    assert all(offsets == sorted(offsets) for offsets in log.values())
