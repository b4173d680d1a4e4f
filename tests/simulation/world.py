"""The simulated world's time: events in the order of virtual time, randomness from one seed, a hash of the history.

Nothing here knows the machine's clock, the addresses of objects or the order of sets, so one seed has one history.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

from simulation.livelock import MOST_EVENTS, Turns

WALL_EPOCH_MS = 1_700_000_000_000


class Actor:
    """A process of the world. `gone`: killed, hears nothing. `paused`: stopped, hears it later, in order."""

    def __init__(self) -> None:
        self.gone = False
        self.paused = False
        self.backlog: list[tuple[str, Callable[..., None], tuple[Any, ...]]] = []

    def after_event(self) -> None:
        """It has handled an event."""


class World:
    """Virtual seconds, an event queue, named streams of randomness."""

    def __init__(self, seed: int, *, keep_trace: bool = False) -> None:
        self.seed = seed
        self.now = 0.0
        self.steps = 0
        self.faults: Counter[str] = Counter()
        self.trace: list[str] = []
        self.after_step: Callable[[], None] = lambda: None
        self.keeps_trace = keep_trace
        self._digest = hashlib.blake2b(digest_size=12)
        self._queue: list[tuple[float, int, Actor | None, str, Callable[..., None], tuple[Any, ...]]] = []
        self._order = itertools.count()
        self._turns = Turns("events", MOST_EVENTS)

    def stream(self, name: str) -> Random:
        """Randomness for one purpose, so that leaving out one kind of fault changes no other."""
        return Random(f"{self.seed}/{name}")

    @property
    def wall_ms(self) -> int:
        return WALL_EPOCH_MS + int(self.now * 1000)

    def at(self, delay_s: float, actor: Actor | None, label: str, do: Callable[..., None], *args: Any) -> None:
        """`do` happens after a delay; with an actor, in its process."""
        self.on(self.now + delay_s, actor, label, do, *args)

    def on(self, time_s: float, actor: Actor | None, label: str, do: Callable[..., None], *args: Any) -> None:
        """As `at`, at a time. What is set to the same time happens in the order of setting."""
        heapq.heappush(self._queue, (time_s, next(self._order), actor, label, do, args))

    def fault(self, name: str, detail: str = "") -> None:
        """A fault of the world happens."""
        self.faults[name] += 1
        self.note(f"fault {name} {detail}")

    def note(self, text: str) -> None:
        """A line of the history; one that begins with a space is for people, and not part of its hash."""
        line = f"{self.now:.6f} {text}"
        if not text.startswith(" "):
            self._digest.update(line.encode())
        if self.keeps_trace:
            self.trace.append(line)

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()

    def run(self, until: Callable[[], bool], *, most_steps: int) -> bool:
        """Events until `until` is true (looked at after each); False when there are none left, or too many were."""
        while self._queue and self.steps < most_steps:
            at, _, actor, label, do, args = heapq.heappop(self._queue)
            self.now = at
            if actor is not None:
                if actor.gone:
                    continue
                if actor.paused:
                    actor.backlog.append((label, do, args))
                    continue
            self._happen(actor, label, do, args)
            if until():
                return True
        return False

    def wake(self, actor: Actor) -> None:
        """A paused process goes on, with what has gathered for it."""
        actor.paused = False
        backlog, actor.backlog = actor.backlog, []
        for label, do, args in backlog:
            self.at(0.0, actor, label, do, *args)

    def _happen(self, actor: Actor | None, label: str, do: Callable[..., None], args: tuple[Any, ...]) -> None:
        self.steps += 1
        self._turns.turn(self.now, label)
        self.note(label)
        do(*args)
        if actor is not None and not actor.gone:
            actor.after_event()
        self.after_step()
