"""Records gather under load, and only then."""

from __future__ import annotations

import pytest

from penstock.processors.kafka.pace import AVERAGE_S, GATHER_S, LOAD_PER_S, Pace


def after(per_s: float, seconds: float, at_once: int = 1) -> tuple[Pace, float]:
    """The pace when records have come so fast for so long, and the time."""
    pace, now = Pace(), 1_000.0
    for _ in range(round(per_s * seconds / at_once)):
        now += at_once / per_s
        pace.count(at_once, now)
    return pace, now


@pytest.mark.parametrize("at_once", [1, 4])
@pytest.mark.parametrize("per_s", [50.0, 400.0, 4_000.0])
def test_the_rate_is_told(per_s: float, at_once: int) -> None:
    pace, now = after(per_s, 8 * AVERAGE_S, at_once)
    assert pace.per_s(now) == pytest.approx(per_s, rel=0.2)


def test_the_first_records_are_handed_over_at_once() -> None:
    pace = Pace()
    assert pace.gather_s(5.0) == 0
    pace.count(1, 5.0)
    assert pace.gather_s(5.001) == 0


def test_under_load_records_wait_for_others_until_few_come() -> None:
    pace, now = after(2 * LOAD_PER_S, 4 * AVERAGE_S)
    assert pace.gather_s(now) == GATHER_S
    assert pace.gather_s(now + 2 * AVERAGE_S) == 0
    pace, now = after(LOAD_PER_S / 2, 4 * AVERAGE_S)
    assert pace.gather_s(now) == 0


def test_one_burst_is_no_load_for_long() -> None:
    pace = Pace()
    pace.count(500, 9.0)
    assert pace.gather_s(9.0) == GATHER_S
    assert pace.gather_s(9.0 + 3 * AVERAGE_S) == 0
