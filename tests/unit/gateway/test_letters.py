"""Dead letters are counted by reason, as they lie on the log."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.metrics import GatewayMetrics
from penstock.gateway.view.letters import REASONS, Letters

A, B = ("inference.dlq", 0), ("inference.dlq", 1)


def test_what_retention_removes_is_counted_no_more() -> None:
    letters = Letters(1_000)
    for offset, reason in enumerate(["bad_avro", "engine_failed", "bad_avro"]):
        letters.add(A, offset, reason)
    letters.add(B, 7, "bad_avro")
    assert letters.counts() == {"bad_avro": 3, "engine_failed": 1}
    letters.expired({A: 2})
    assert letters.counts() == {"bad_avro": 2, "engine_failed": 0}
    letters.expired({A: 5, B: 7})
    assert letters.counts() == {"bad_avro": 1, "engine_failed": 0}


def test_a_topic_that_is_made_anew_begins_anew() -> None:
    letters = Letters(1_000)
    for offset in range(5):
        letters.add(A, offset, "bad_avro")
    letters.add(A, 2, "engine_failed")
    assert letters.counts() == {"bad_avro": 2, "engine_failed": 1}
    letters.add(A, 0, "engine_failed")
    assert letters.counts() == {"bad_avro": 0, "engine_failed": 1}


def test_letters_and_reasons_have_bounds() -> None:
    letters = Letters(most=10)
    for offset in range(REASONS * 3):
        letters.add(A, offset, f"r{offset}")
    counts = letters.counts()
    assert sum(counts.values()) == 10
    assert counts["other"] == 10
    assert len(counts) == REASONS + 1


@given(
    st.lists(st.one_of(st.tuples(st.just("add"), st.integers(0, 12)), st.tuples(st.just("expire"), st.integers(0, 12))))
)
def test_counts_are_those_of_a_log(steps: list[tuple[str, int]]) -> None:
    letters, log = Letters(1_000), dict[int, str]()
    for what, offset in steps:
        if what == "add":
            letters.add(A, offset, f"r{offset % 3}")
            log = {at: reason for at, reason in log.items() if at < offset} | {offset: f"r{offset % 3}"}
        else:
            letters.expired({A: offset})
            log = {at: reason for at, reason in log.items() if at >= offset}
    assert +Counter(letters.counts()) == Counter(log.values())


def test_the_gauge_tells_them() -> None:
    metrics = GatewayMetrics()
    assert "penstock_dlq_letters{" not in metrics.render().decode()
    metrics.read_letters = lambda: {"bad_avro": 3, "engine_failed": 0}
    lines = metrics.render().decode().splitlines()
    assert 'penstock_dlq_letters{reason="bad_avro"} 3.0' in lines
    assert 'penstock_dlq_letters{reason="engine_failed"} 0.0' in lines
