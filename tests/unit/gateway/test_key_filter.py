"""The filter of keys: what was added is known, and little else."""

from __future__ import annotations

from penstock.gateway.view.key_filter import KeyFilter


def test_what_was_added_is_known_and_little_else() -> None:
    known = KeyFilter()
    for number in range(20_000):
        known.add(("default", f"r{number}"))
    assert all(("default", f"r{number}") in known for number in range(20_000))
    taken_for_known = sum(("other", f"r{number}") in known for number in range(20_000))
    assert taken_for_known < 20
