"""Slack: how much of an engine low work leaves free for more urgent work that is about to come.

Work that is running is never stopped, so what urgent work waits for is a slot that low work took just before. How many
slots to leave free follows from what urgent work uses on average: `R + BETA * sqrt(R)` of them, the square-root rule of
staffing (Erlang 1924; Halfin and Whitt 1981: with BETA 2.5 about 1 % of those who come find no slot free). `R` is the
time average of the load of high and medium work, decayed with a half-life. A share of the engine's time stays low
work's whatever the load, so it never stops.

Beside this, and always, low starts are *paced* while urgent work comes: runs of equal length that began together end
together, and who comes in between would wait for all of them. Started one after the other they end so, a slot becomes
free every `run / slots`, and no throughput is lost.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import exp2, floor, sqrt

BETA = 2.5
UP = 0.5
"""A further slot is kept free when the rule asks for so much of it."""
PACE = 0.8
"""Low starts follow each other by this share of the time in which a slot becomes free."""
TRACE = 0.02
"""A load of urgent work, in slots, below which nobody is there to be served faster."""
DOWN = 0.25
"""It is given up when the rule asks for less of it than this: between the two nothing changes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlackSettings:
    """`share`: of the engine's time, what low work may use in any case while nothing urgent waits."""

    half_life_s: float = 3.0
    share: float = 0.125


@dataclass(slots=True)
class Average:
    """A time average of the load of some classes, decayed: what was `half_life_s` ago counts half."""

    half_life_s: float
    mean: float = 0.0
    level: float = 0.0
    requests: int = 0
    tokens: int = 0

    def pass_time(self, seconds: float) -> None:
        """The level has been as it is for so long."""
        self.mean = self.level + (self.mean - self.level) * exp2(-seconds / self.half_life_s)


@dataclass(slots=True)
class EngineSlack:
    """One model's engines. Loads are in slots; tokens of cache count as the share of the slots that they take."""

    settings: SlackSettings
    reserves: bool = True
    """False: only the pace is kept."""
    slots: float = 0.0
    tokens: int | None = None
    reserve: int = 0
    """Slots that low work leaves to the others, used by them or free."""
    urgent: Average = field(init=False)
    low: Average = field(init=False)
    due_at: float | None = None
    """When the next low start is due, while one waits for that."""
    _held: dict[int, tuple[str, int]] = field(default_factory=dict[int, tuple[str, int]])
    """Class and tokens of each request that holds a slot, by its `seq`."""
    _low_started_at: float = float("-inf")
    _at: float | None = None

    def __post_init__(self) -> None:
        self.urgent, self.low = Average(self.settings.half_life_s), Average(self.settings.half_life_s)

    def resize(self, slots: int, tokens: int | None) -> None:
        """The engines run `slots` at once, in `tokens` of cache (None: no such limit)."""
        if (slots, tokens) != (self.slots, self.tokens):
            self.slots, self.tokens = slots, tokens
            self._set_level(self.urgent)
            self._set_level(self.low)

    def took(self, seq: int, klass: str, tokens: int, now: float) -> None:
        """A request of the class got a slot and tokens."""
        if klass == "low":
            self._low_started_at = now
        self._held[seq] = (klass, tokens)
        self._change(klass, 1, tokens)

    def ended(self, seq: int) -> None:
        """A request holds its slot no more. Nothing happens for one that was not started."""
        held = self._held.pop(seq, None)
        if held is not None:
            klass, tokens = held
            self._change(klass, -1, -tokens)

    @property
    def restrains(self) -> bool:
        """Whether low work may have to wait at all."""
        return self.reserves or self.urgent.mean >= TRACE

    def holds_back(self, *, urgent_waits: bool) -> bool:
        """Whether low work must wait now, although it may fit; as of the time that was passed last."""
        if not self.reserves:
            return False
        if urgent_waits:
            return True
        share = self.settings.share * self.slots
        if self.low.level + 1 <= max(self.slots - self.reserve, floor(share)):
            return False
        return self.low.level > 0 or self.low.mean >= share  # of few slots it gets its share by turns

    def is_paced(self, now: float, run_s: float | None) -> bool:
        """Whether a low start must keep its distance from the one before; `due_at` says until when.

        `run_s`: how long a run takes, None when that is not known.
        """
        self.due_at = None
        if run_s is None or self.slots < 2 or self.urgent.mean < TRACE:
            return False
        due_at = self._low_started_at + PACE * run_s / self.slots
        if now < due_at:
            self.due_at = due_at
        return now < due_at

    @property
    def utilisation(self) -> float:
        """The recent load of all classes, as a share of what the engines can take."""
        return min(1.0, (self.urgent.mean + self.low.mean) / self.slots) if self.slots else 0.0

    def _change(self, klass: str, requests: int, tokens: int) -> None:
        load = self.low if klass == "low" else self.urgent
        load.requests += requests
        load.tokens += tokens
        self._set_level(load)

    def _set_level(self, load: Average) -> None:
        load.level = float(load.requests)
        if self.tokens and load.tokens:
            load.level = max(load.level, self.slots * load.tokens / self.tokens)

    def pass_time(self, now: float) -> None:
        """Loads have been as they are since the last call."""
        since, self._at = self._at, now
        if since is None or now <= since:
            return
        if self.urgent.mean or self.urgent.level or self.low.mean or self.low.level:
            self.urgent.pass_time(now - since)
            self.low.pass_time(now - since)
        wanted = self.urgent.mean + BETA * sqrt(max(0.0, self.urgent.mean))
        if wanted >= self.reserve + UP:
            self.reserve = floor(wanted + UP)
        elif wanted < self.reserve - 1 + DOWN:
            self.reserve = floor(wanted + 1 - DOWN)
        self.reserve = min(self.reserve, int(self.slots))


class Slack:
    """All engines of a worker, by model. Without settings low work is paced, and nothing is kept free of it."""

    def __init__(self, settings: SlackSettings | None) -> None:
        self._settings = settings or SlackSettings()
        self._reserves = settings is not None
        self._engines: dict[str, EngineSlack] = {}

    def of(self, model: str) -> EngineSlack:
        engine = self._engines.get(model)
        if engine is None:
            engine = self._engines[model] = EngineSlack(self._settings, self._reserves)
        return engine

    def observe(self, model: str, slots: int, tokens: int | None, now: float) -> None:
        """The engines of a model run `slots` at once, in `tokens` of cache (None: no such limit).

        Call it steadily: what they do is measured from one call to the next.
        """
        engine = self.of(model)
        engine.pass_time(now)
        engine.resize(slots, tokens)

    def next_due(self) -> float | None:
        """When the next paced start is due."""
        return min((one.due_at for one in self._engines.values() if one.due_at is not None), default=None)
