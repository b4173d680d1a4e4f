"""Fault points: parsed strictly, and death at the wanted passage."""

from __future__ import annotations

import pytest

from penstock.processors.faults import Faults, parse_faults


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", {}),
        ("kill:before_commit", {"before_commit": 1}),
        ("stall:fetch@3", {"fetch": 3}),
        ("kill:mid_stream@60, kill:before_terminal@2", {"mid_stream": 60, "before_terminal": 2}),
    ],
)
def test_parse(text: str, found: dict[str, int]) -> None:
    assert parse_faults(text) == found


@pytest.mark.parametrize(
    "text", ["before_commit", "kill:nowhere", "stop:mid_stream", "stall:mid_stream", "kill:fetch", "kill:mid_stream@x"]
)
def test_what_is_not_a_point_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_faults(text)


def test_death_at_the_nth_passage() -> None:
    deaths: list[int] = []
    faults = Faults({"mid_stream": 3}, die=lambda: deaths.append(1))
    for _ in range(2):
        faults.hit("mid_stream")
    faults.hit("before_commit")
    assert deaths == []
    faults.hit("mid_stream")
    assert deaths == [1]
