"""How far a view has read what was in its topics at the start, and how long the rest will take. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.gateway.view.store import TP

ENOUGH_S = 1.0
"""Time of reading after which its rate is known well enough."""
MINUTES_FROM_S = 180


@dataclass(slots=True)
class ReadProgress:
    """The first reading of a view, from `begin` to `goal`."""

    begin: Mapping[TP, int] = field(default_factory=dict[TP, int])
    goal: Mapping[TP, int] = field(default_factory=dict[TP, int])
    began_s: float = 0.0

    def records(self, offsets: Mapping[TP, int]) -> tuple[int, int]:
        """(read, all)"""
        ranges = [(self.begin.get(tp, 0), min(offsets.get(tp, 0), end), end) for tp, end in self.goal.items()]
        return sum(at - first for first, at, _ in ranges), sum(end - first for first, _, end in ranges)

    def left_s(self, offsets: Mapping[TP, int], now_s: float) -> float | None:
        """How long the rest takes at the rate so far; None while that is not known."""
        done, whole = self.records(offsets)
        took_s = now_s - self.began_s
        return None if done <= 0 or took_s < ENOUGH_S else took_s * (whole - done) / done

    def text(self, offsets: Mapping[TP, int], now_s: float) -> str:
        """For people; empty while there is nothing to say. The rest is taken to be read at the rate so far."""
        done, whole = self.records(offsets)
        if whole <= 0:
            return ""
        text, left_s = f"{done:,} of {whole:,} records", self.left_s(offsets, now_s)
        return text if left_s is None else f"{text}, about {duration_text(left_s)} left"


def duration_text(duration_s: float) -> str:
    """For people."""
    return f"{duration_s:.0f} s" if duration_s < MINUTES_FROM_S else f"{duration_s / 60:.0f} min"
