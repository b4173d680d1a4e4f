"""What the newest results say of the group's generation."""

from __future__ import annotations

import pytest

from penstock.cli.restored.signs import ZOMBIE_MS, Told, begins_again

LATER = ZOMBIE_MS + 2


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ([], False),
        ([Told(1, 3), Told(2, 4), Told(LATER, 5)], False),
        ([Told(1, 5), Told(2, 3)], False),  # a worker that has lost its partitions
        ([Told(1, 5), Told(LATER, 1)], True),
        ([Told(1, 5), Told(LATER, 1), Told(LATER, 6)], False),
    ],
)
def test_a_lower_epoch_than_before_is_a_sign_when_it_stays(told: list[Told], expected: bool) -> None:
    assert begins_again(told) == expected
