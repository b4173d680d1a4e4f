"""The circuit breaker: when it opens, for how long, and that one try at a time tells whether it may close."""

from __future__ import annotations

from penstock.processors.core.breaker import NEVER, Breaker, Circuit


def test_it_opens_after_failures_in_a_row_and_each_pause_is_longer() -> None:
    breaker = Breaker(threshold=3, pause_s=5, longest_pause_s=12)
    breaker.failed(0.0)
    breaker.failed(0.0)
    assert breaker.allows(0.0)
    breaker.succeeded()
    for _ in range(3):
        assert breaker.allows(1.0)
        breaker.failed(1.0)
    assert breaker.state(5.9) is Circuit.OPEN
    assert breaker.broken_until == 6.0
    for now, until in ((6.0, 16.0), (16.0, 28.0), (28.0, 40.0)):
        assert breaker.state(now) is Circuit.HALF_OPEN
        breaker.tried(now)
        breaker.failed(now)
        assert breaker.broken_until == until, "one failure is enough now, and the longest pause is 12 s"


def test_half_open_allows_one_try_until_its_end_is_known() -> None:
    breaker = Breaker(threshold=1, pause_s=5)
    breaker.failed(0.0)
    breaker.tried(5.0)
    assert breaker.broken_until == NEVER
    assert not breaker.allows(1e9)
    breaker.given_up()
    assert breaker.allows(5.0)
    breaker.tried(5.0)
    breaker.succeeded()
    assert breaker.state(5.0) is Circuit.CLOSED
    assert breaker.allows(5.0)
    breaker.tried(5.0)
    assert breaker.allows(5.0), "a closed circuit counts no tries"


def test_what_is_hopeless_opens_it_at_once_and_for_long_until_an_order() -> None:
    breaker = Breaker(threshold=3, pause_s=5, longest_pause_s=300)
    breaker.failed(0.0, hopeless=True)
    assert breaker.broken_until == 300.0
    breaker.reset()
    assert breaker.allows(0.0)
    assert breaker.failures == 0
