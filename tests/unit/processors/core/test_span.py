"""The offsets of one partition: what the simulator found in them."""

from __future__ import annotations

from penstock.processors.core.span import Span


def test_a_commit_that_passed_a_redelivery_is_no_gap() -> None:
    """[0, 4) came, then [0, 2) again; 3 was committed meanwhile, so the next assignment goes on at 3."""
    span = Span(0, "")
    span.deliver(0, 4, range(4))
    span.resume(0)
    span.deliver(0, 2, range(2))
    span.resume(3)
    span.deliver(3, 5, [3, 4])
    assert span.end == 5
