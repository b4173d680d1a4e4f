"""Labels of metrics have a bound."""

from __future__ import annotations

from penstock.common.labels import BoundedLabel


def test_only_so_many_values_are_told_apart() -> None:
    label = BoundedLabel(2)
    assert [label.of(value) for value in ("a", "b", "c", "a", "", None)] == ["a", "b", "other", "a", "none", "none"]
