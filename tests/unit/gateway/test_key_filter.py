"""The filter of keys: every row of the file is known, and days of other keys do not fill it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from penstock.gateway.view.key_filter import KeyFilter

KEYS, MOST = 1_024, 4
BYTES = KEYS * 2
"""Of one filter."""

Key = tuple[str, str]


def of_day(day: int, count: int) -> Iterator[Key]:
    return (("default", f"{day}/{number}") for number in range(count))


def taken_for_known(known: KeyFilter) -> float:
    """The part of the keys that nobody added."""
    return sum(("other", f"r{number}") in known for number in range(20_000)) / 20_000


def test_days_of_keys_take_bounded_room_and_unknown_keys_stay_unknown() -> None:
    known = KeyFilter(KEYS, MOST)
    for day in range(1, 41):
        for key in of_day(day, 1_000):
            known.add(key, day)
            known.add(key, day)  # a row is written again with each change
        known.forget(day - 1)
        for kept in range(max(1, day - 1), day + 1):
            assert all(key in known for key in of_day(kept, 1_000))
        assert known.size_bytes <= MOST * BYTES
    assert taken_for_known(known) < MOST * 0.004
    known.forget(41)
    assert (taken_for_known(known), known.size_bytes) == (0, BYTES)


@pytest.mark.parametrize("times", [1, 3])
def test_more_keys_than_it_has_room_for_are_known_all(times: int) -> None:
    """Then it takes more unknown keys for known, and no more room."""
    known, count = KeyFilter(KEYS, MOST), times * MOST * KEYS
    for key in of_day(0, count):
        known.add(key, 0)
    assert all(key in known for key in of_day(0, count))
    assert known.size_bytes == MOST * BYTES
    assert taken_for_known(known) < (0.02 if times == 1 else 0.4)


def test_a_key_that_was_written_again_is_known_when_its_first_filter_is_dropped() -> None:
    known = KeyFilter(KEYS, MOST)
    known.add(("default", "old"), 1)
    for day in range(2, 5):
        for key in of_day(day, KEYS):
            known.add(key, day)
        known.add(("default", "old"), day)
    known.forget(4)
    assert ("default", "old") in known
    assert known.size_bytes < MOST * BYTES
