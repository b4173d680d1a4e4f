"""Which model a request without a name gets: the best ready one for its task, or else the one that is ready soonest.

Pure: what is known of each candidate goes in, the choice with its reason comes out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

UNKNOWN_LOAD_S = 60.0
"""What a model is taken to need for loading before it was ever loaded here."""
_SOONEST = {"ready": 0, "draining": 1, "loading": 2, "unloading": 3, "absent": 3, "failed": 4}
_LOADED = ("ready", "draining")
_WHY = {
    "ready": "it is ready",
    "draining": "none is ready; it is still loaded",
    "loading": "none is ready; it is loading",
    "unloading": "none is loaded",
    "absent": "none is loaded",
    "failed": "none is loaded, and loading failed",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A model that serves the task.

    `order`: its place in the configuration. `queued`: requests that wait for it or run on it; `slots`: those that run
    together. `load_s`: how long its last load took, None if it was never loaded.
    """

    model: str
    state: str
    order: int
    priority: int = 5
    queued: int = 0
    slots: int = 1
    load_s: float | None = None
    paused: bool = False


class Choice(NamedTuple):
    """A model, and why it was chosen; None when its name was asked for."""

    model: str
    reason: str | None = None


def only(model: str) -> Choice:
    """The one that serves a task: nothing is compared."""
    return Choice(model, "it is the only model for the task")


def choose(candidates: Iterable[Candidate]) -> Choice | None:
    """Ready before loading before absent before failed; then by priority, queue, load time and order. None of none.

    How long one takes to load says nothing of one that is loaded: small models load fast, and answer badly.

    A paused model is chosen only when all are. The queue counts in turns of the engine (queued / slots), so that a
    model which runs sixty-four at once is not longer than one which runs two.
    """
    ranked = sorted(candidates, key=_rank)
    if not ranked:
        return None
    best = ranked[0]
    return only(best.model) if len(ranked) == 1 else Choice(best.model, _why(best, ranked[1]))


def _rank(one: Candidate) -> tuple[bool, int, int, int, float, int]:
    load_s = UNKNOWN_LOAD_S if one.load_s is None else one.load_s
    if one.state in _LOADED:
        load_s = 0.0
    return (one.paused, _SOONEST.get(one.state, 4), one.priority, one.queued // max(1, one.slots), load_s, one.order)


def _why(best: Candidate, second: Candidate) -> str:
    """The first thing in which the best differs from the next."""
    if best.paused:
        return "all models for the task are paused"
    mine, others = _rank(best), _rank(second)
    state = _WHY.get(best.state, _WHY["failed"])
    if mine[:2] != others[:2]:
        return state
    if mine[2] != others[2]:
        return f"{state}; best priority"
    if mine[3] != others[3]:
        return f"{state}; shortest queue"
    return f"{state}; {'fastest to load' if mine[4] != others[4] else 'first in the configuration'}"
