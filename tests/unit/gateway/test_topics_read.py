"""Topics that are not there, remembered for a moment."""

from __future__ import annotations

from penstock.gateway.view import topics_read
from penstock.gateway.view.topics_read import UNKNOWN_S, UnknownTopics, partitions_of


def test_an_unknown_topic_is_looked_for_again_after_a_while() -> None:
    now = 100.0
    unknown = UnknownTopics(lambda: now)
    assert "t" not in unknown
    unknown.add("t")
    assert "t" in unknown
    now += UNKNOWN_S
    assert "t" not in unknown


def test_a_caller_that_makes_names_up_fills_no_memory() -> None:
    unknown = UnknownTopics()
    for number in range(3 * topics_read.MAX_UNKNOWN):
        unknown.add(f"t{number}")
    assert len(unknown._since) == topics_read.MAX_UNKNOWN
    assert "t0" not in unknown


def test_partitions() -> None:
    assert partitions_of({"a": 2, "b": 1}) == [("a", 0), ("a", 1), ("b", 0)]
