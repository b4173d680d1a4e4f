"""The offsets of one partition: what the simulator found in them."""

from __future__ import annotations

from penstock.processors.core.commit.commit import Commit
from penstock.processors.core.commit.span import CommitSpan


def test_a_commit_that_passed_a_redelivery_is_no_gap() -> None:
    """[0, 4) came, then [0, 2) again; 3 was committed meanwhile, so the next assignment goes on at 3."""
    span = CommitSpan(0, "")
    span.deliver(0, 4, range(4))
    span.resume(0)
    span.deliver(0, 2, range(2))
    span.resume(3)
    span.deliver(3, 5, [3, 4])
    assert span.end == 5


def test_what_is_committed_is_done_though_it_was_delivered_again_and_not_taken() -> None:
    """The head stood below the commit for ever: the records between them were never delivered again."""
    span = CommitSpan(0, "")
    span.deliver(0, 6, range(6))
    for offset in range(6):
        span.finish(offset, 3)
    span.forget(6, 100)
    span.deliver(4, 6, [4, 5])  # the consumer went back; an assignment comes before the two are taken
    span.resume(6)
    assert span.head == 6


def test_a_partition_whose_records_were_not_taken_is_not_full_after_an_assignment() -> None:
    """It was held as full by records that nobody had, so they were never delivered again."""
    gate, tp = Commit(commit_span=8), ("inference.request.high", 0)
    gate.assign({tp: (1, "")}, 1)
    gate.delivered(tp, 1, 12, list(range(1, 12)))
    assert gate.full(tp)
    gate.assign({tp: (1, "")}, 2)
    assert not gate.full(tp)
    gate.delivered(tp, 1, 6, list(range(1, 6)))
    assert not gate.full(tp)
    gate.delivered(tp, 6, 12, list(range(6, 12)))
    assert gate.full(tp)


def test_a_partition_whose_records_are_all_held_stays_full_over_an_assignment() -> None:
    """Else each assignment would take another span of records into memory."""
    gate, tp = Commit(commit_span=8), ("inference.request.high", 0)
    gate.assign({tp: (1, "")}, 1)
    gate.delivered(tp, 1, 12, list(range(1, 12)))
    for offset in range(1, 12):
        gate.arrive(tp, offset, f"r{offset}")
    gate.assign({tp: (1, "")}, 2)
    assert gate.full(tp)
    for offset in (1, 2, 3, 4):
        gate.complete(tp, offset)
    assert not gate.full(tp)


def test_a_duplicate_that_an_assignment_forgets_is_delivered_again() -> None:
    """Its first was on a partition that went; records after it are held, and must not keep it away."""
    gate, tp, gone = Commit(commit_span=8), ("inference.request.high", 0), ("inference.request.high", 1)
    gate.assign({tp: (1, ""), gone: (1, "")}, 1)
    gate.delivered(gone, 1, 2, [1])
    gate.arrive(gone, 1, "same")
    gate.delivered(tp, 1, 12, list(range(1, 12)))
    for offset in range(1, 12):
        gate.arrive(tp, offset, "same" if offset == 2 else f"r{offset}")
    gate.assign({tp: (1, "")}, 2)
    assert not gate.full(tp)


def test_what_was_delivered_before_an_assignment_may_arrive_and_end_after_it() -> None:
    """The head then passes `reached`, which fell to it: only the next delivery raises that again."""
    gate, tp = Commit(commit_span=2), ("inference.request.high", 0)
    gate.assign({tp: (0, "")}, 1)
    gate.delivered(tp, 0, 1, [0])
    gate.assign({tp: (0, "")}, 2)
    gate.arrive(tp, 0, "default/r")
    gate.complete(tp, 0)
    gate.check()
    assert gate.commits() == {tp: (1, "")}
    assert not gate.full(tp)
    gate.delivered(tp, 1, 3, [1, 2])
    gate.check()
    assert gate.full(tp)
