"""Fault points: parsed strictly, and death at the wanted passage."""

from __future__ import annotations

import signal

import pytest

from penstock.processors.faults import Faults, parse_faults


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", {}),
        ("kill:before_commit", {"before_commit": ("kill", 1)}),
        ("stall:fetch@3", {"fetch": ("stall", 3)}),
        ("plant:commit_first", {"commit_first": ("plant", 1)}),
        ("kill:mid_stream@60, stop:intake@2", {"mid_stream": ("kill", 60), "intake": ("stop", 2)}),
    ],
)
def test_parse(text: str, found: dict[str, tuple[str, int]]) -> None:
    assert parse_faults(text) == found


@pytest.mark.parametrize(
    "text", ["before_commit", "kill:nowhere", "plant:mid_stream", "stall:mid_stream", "kill:fetch", "kill:mid_stream@x"]
)
def test_what_is_not_a_point_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_faults(text)


@pytest.mark.parametrize(
    ("action", "sent"),
    [("kill", [signal.SIGKILL, signal.SIGKILL]), ("stop", [signal.SIGSTOP])],
)
def test_a_signal_at_the_nth_passage(action: str, sent: list[signal.Signals]) -> None:
    """Whoever is let go on after a stop is not stopped again."""
    signals: list[signal.Signals] = []
    faults = Faults({"mid_stream": (action, 3)}, signals.append)
    for _ in range(2):
        faults.hit("mid_stream")
    faults.hit("before_commit")
    assert signals == []
    faults.hit("mid_stream")
    faults.hit("mid_stream")
    assert signals == sent
