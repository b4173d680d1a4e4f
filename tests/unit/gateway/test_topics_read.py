"""Topics that do not exist are remembered for a moment."""

from __future__ import annotations

from penstock.gateway.view import topics_read
from penstock.gateway.view.topics_read import UNKNOWN_S, UnknownTopics, partitions_of


def test_an_unknown_topic_is_looked_up_again_after_a_while() -> None:
    now = 100.0
    unknown = UnknownTopics(lambda: now)
    assert "t" not in unknown
    unknown.add("t")
    assert "t" in unknown
    now += UNKNOWN_S
    assert "t" not in unknown


def test_unknown_topics_are_bounded() -> None:
    unknown, most = UnknownTopics(), topics_read.MAX_UNKNOWN
    for number in range(3 * most):
        unknown.add(f"t{number}")
    assert [number for number in range(3 * most) if f"t{number}" in unknown] == [*range(2 * most, 3 * most)]


def test_partitions() -> None:
    assert partitions_of({"a": 2, "b": 1}) == [("a", 0), ("a", 1), ("b", 0)]
