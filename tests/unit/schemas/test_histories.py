"""Histories of attempts: the newest are kept, the others are counted, and the JSON form names both."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.schemas.histories import MOST_ATTEMPTS, extended, history_json
from penstock.schemas.records import Attempt, AttemptError


@given(st.lists(st.integers(0, 40), max_size=6))
def test_nothing_is_lost_without_being_counted(lengths: list[int]) -> None:
    history, number = None, 0
    for length in lengths:
        history = extended(history, [Attempt(attempt=number + n) for n in range(length)])
        number += length
    if history is None:
        return
    assert len(history.attempts) == min(number, MOST_ATTEMPTS)
    assert history.dropped + len(history.attempts) == number
    assert [one.attempt for one in history.attempts] == list(range(history.dropped, number))


def test_the_json_form() -> None:
    assert history_json(None) == {}
    error = {"code": "engine_failed", "message": "gone"}
    attempt = Attempt(attempt=2, worker_id="w", error=AttemptError(**error), started_at=1_000)
    times = {"started_at": "1970-01-01T00:00:01.000Z", "ended_at": None}
    shown = {"attempt": 2, "worker_id": "w", "device": None, "error": error, **times, "memory": None}
    found = history_json(extended(None, [attempt], dropped=3))
    assert (found["history_dropped"], found["history"]) == (3, [shown])
