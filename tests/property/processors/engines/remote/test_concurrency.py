"""The adaptive limit and the token budget of remote servers, for any history of answers and refusals."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from penstock.processors.engines.remote.concurrency import AdaptiveLimit, RemoteGate, TokenBudget

EVENTS = st.lists(st.tuples(st.sampled_from(["answered", "refused"]), st.integers(1, 100)), max_size=200)


@given(st.integers(1, 256), EVENTS)
def test_the_limit_stays_between_one_and_its_ceiling(ceiling: int, events: list[tuple[str, int]]) -> None:
    limit = AdaptiveLimit(ceiling)
    for now, (what, in_flight) in enumerate(events):
        before = limit.limit
        if what == "answered":
            limit.answered(in_flight)
            assert limit.limit in (before, before + 1)
        else:
            shrunk = limit.refused(now, now)
            assert shrunk == (limit.limit < before)
        assert 1 <= limit.limit <= ceiling


@given(st.integers(2, 256), st.integers(1, 256))
def test_what_was_refused_together_shrinks_the_limit_once(ceiling: int, count: int) -> None:
    limit = AdaptiveLimit(ceiling)
    for number in range(count):
        limit.refused(sent_at=1.0, now=2.0 + number)
    assert limit.limit == max(1, int(ceiling * 0.7))


@given(st.integers(2, 64), st.integers(1, 63))
def test_a_server_with_a_fixed_capacity_is_found_and_kept_near_it(ceiling: int, capacity: int) -> None:
    """As many are sent as the limit allows; the server refuses what goes beyond its capacity."""
    capacity = min(capacity, ceiling)
    limit, now = AdaptiveLimit(ceiling), 0.0
    sent = 0
    for round_ in range(600):
        now += 1.0
        in_flight = limit.limit
        for _ in range(min(in_flight, capacity)):
            limit.answered(in_flight)
        for _ in range(max(0, in_flight - capacity)):
            limit.refused(sent_at=now, now=now + 0.5)
        if round_ >= 100:
            sent += min(in_flight, capacity)
    assert sent / 500 >= 0.75 * capacity


def test_a_limit_that_nobody_uses_does_not_grow() -> None:
    limit = AdaptiveLimit(100)
    limit.refused(0, 1)
    for _ in range(1000):
        limit.answered(in_flight=2)
    assert limit.limit == 70


@given(st.floats(1, 1e6), st.lists(st.tuples(st.floats(0, 30), st.floats(0, 5_000), st.floats(0, 5_000)), max_size=60))
def test_the_budget_is_kept_but_for_what_one_request_takes(
    per_minute: float, requests: list[tuple[float, float, float]]
) -> None:
    """`requests`: seconds since the one before, the estimate, what it used in fact."""
    budget, now, spent, largest = TokenBudget(per_minute), 0.0, 0.0, 0.0
    burst = per_minute / 6
    for after_s, estimated, used in requests:
        now += after_s
        now += (wait_s := budget.wait_s(now))
        assert math.isfinite(wait_s)
        if budget.wait_s(now) > 0:  # the float's last bit
            continue
        budget.spend(estimated, now)
        budget.settle(estimated, used)
        spent, largest = spent + used, max(largest, used)
        assert spent <= (burst + largest + per_minute * now / 60) * (1 + 1e-9) + 1e-6


@given(st.lists(st.sampled_from(["answered", "turned_away"]), max_size=100), st.floats(0.01, 5))
def test_a_gate_gives_up_only_after_its_patience_without_an_answer(events: list[str], every_s: float) -> None:
    patience_s = 20.0
    gate, now, since = RemoteGate(8, patience_s=patience_s), 0.0, None
    for what in events:
        sent_at, now = now, now + every_s
        if what == "answered":
            gate.answered(1)
            since = None
            continue
        since = now if since is None else since
        wait_s = gate.turned_away(sent_at, now, None)
        if wait_s is None:
            assert now - since > patience_s - 10.0 - 1e-6  # the longest wait would pass it
            return
        assert 0 < wait_s <= 10.0
        now += wait_s
