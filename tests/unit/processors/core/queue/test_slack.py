"""Low work leaves as much of an engine free as urgent work needs, and never stops."""

from __future__ import annotations

import itertools

import pytest

from penstock.processors.core.queue.slack import EngineSlack, Slack, SlackSettings

SETTINGS = SlackSettings(half_life_s=3.0, share=0.125)
SEQS = itertools.count(1)


def took(found: EngineSlack, klass: str, tokens: int, now: float) -> int:
    """A new request got a slot; returns its `seq`."""
    seq = next(SEQS)
    found.took(seq, klass, tokens, now)
    return seq


def held(found: EngineSlack, now: float, *, urgent: bool) -> bool:
    found.pass_time(now)
    return found.holds_back(urgent_waits=urgent)


def engine(slots: int = 8, tokens: int | None = None) -> EngineSlack:
    found = EngineSlack(SETTINGS)
    found.resize(slots, tokens)
    held(found, 0.0, urgent=False)
    return found


def fill_with_low(found: EngineSlack, now: float) -> int:
    count = 0
    while count < found.slots and not held(found, now, urgent=False):
        took(found, "low", 0, 0.0)
        count += 1
    return count


def test_without_urgent_work_low_takes_all() -> None:
    assert fill_with_low(engine(), 1.0) == 8


def test_without_settings_nothing_is_kept_free() -> None:
    found = Slack(None).of("m")
    found.resize(1, None)
    took(found, "high", 0, 0.0)
    assert not held(found, 9.0, urgent=True)


def test_low_starts_keep_their_distance_while_urgent_work_comes() -> None:
    found = engine()
    assert not found.is_paced(0.0, 0.8), "nobody is there to be served faster"
    took(found, "high", 0, 0.0)
    held(found, 1.0, urgent=False)
    took(found, "low", 0, 1.0)
    assert found.is_paced(1.05, 0.8)
    assert found.due_at == pytest.approx(1.08)
    assert not found.is_paced(1.09, 0.8)
    assert found.due_at is None
    assert not found.is_paced(1.0, None)


def test_room_follows_the_square_root_of_the_urgent_load() -> None:
    found = engine()
    took(found, "high", 0, 0.0)  # two slots are always in use: 2 + 2.5 * sqrt(2) are kept, those two included
    took(found, "high", 0, 0.0)
    held(found, 60.0, urgent=False)
    assert found.reserve == 6
    assert fill_with_low(found, 60.0) == 2


def test_urgent_work_that_waits_comes_first() -> None:
    assert held(engine(), 1.0, urgent=True)


def test_under_full_urgent_load_low_keeps_its_share() -> None:
    found = engine()
    for _ in range(7):
        took(found, "medium", 0, 0.0)
    held(found, 60.0, urgent=False)
    assert found.reserve == 8
    assert fill_with_low(found, 60.0) == 1


def test_of_one_slot_low_gets_its_share_by_turns() -> None:
    """Urgent runs of a second follow each other, with a moment between them in which low work may start."""
    found, now, used = engine(slots=1), 0.0, 0.0
    for _ in range(400):
        if not held(found, now, urgent=False):
            low = took(found, "low", 0, 0.0)
            now, used = now + 1.0, used + 1.0
            held(found, now, urgent=True)
            found.ended(low)
        high = took(found, "high", 0, 0.0)
        now += 1.0
        held(found, now, urgent=True)
        found.ended(high)
    assert 0.08 < used / now < 0.25


def test_hysteresis_the_reserve_does_not_follow_every_wave() -> None:
    found = engine()
    took(found, "high", 0, 0.0)
    held(found, 60.0, urgent=False)
    changes, before, now = 0, found.reserve, 60.0
    for _ in range(1_000):  # the load swings by a tenth around one slot
        for level in (0.9, 1.1):
            found.urgent.level = level
            now += 0.3
            held(found, now, urgent=False)
            changes += found.reserve != before
            before = found.reserve
    assert changes <= 1


def test_the_reserve_is_given_up_after_the_urgent_work() -> None:
    found = engine()
    high = took(found, "high", 0, 0.0)
    held(found, 60.0, urgent=False)
    found.ended(high)
    held(found, 90.0, urgent=False)
    assert found.reserve == 0


def test_tokens_count_as_slots() -> None:
    found = engine(tokens=800)
    took(found, "high", 400, 0.0)  # one request with half of the cache is a load of four slots
    held(found, 60.0, urgent=False)
    assert found.reserve == 8
    assert found.utilisation == pytest.approx(0.5, rel=0.01)
