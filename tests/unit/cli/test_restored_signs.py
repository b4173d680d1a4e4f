"""What the newest results say of the group's generation."""

from __future__ import annotations

import pytest

from penstock.cli.restored.signs import ZOMBIE_MS, Told, begins_again

LATER = ZOMBIE_MS + 2


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ([], False),
        ([Told(1, 3, 0), Told(2, 4, 1), Told(LATER, 5, 2)], False),
        ([Told(1, 5, 0), Told(2, 3, 1)], False),  # a worker that has lost its partitions
        ([Told(1, 6, 0), Told(LATER, 5, 0)], False),  # a long run that a rebalance has not ended
        ([Told(1, 5, 0), Told(LATER, 1, LATER)], True),
        ([Told(1, 5, 0), Told(LATER, 1, LATER), Told(LATER, 6, LATER)], False),
    ],
)
def test_a_lower_epoch_than_before_is_a_sign_for_requests_that_came_later(told: list[Told], expected: bool) -> None:
    assert begins_again(told) == expected
