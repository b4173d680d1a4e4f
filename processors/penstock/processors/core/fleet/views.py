"""What placement reads and what it decides: frozen views of models and replicas, and its decisions.

A *replica* is one loaded engine of a model, numbered from 0 within the model. All times are seconds of the caller's
clock, all sizes bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import exp

from penstock.schemas.topics import CLASSES, RANKS

NO_DEMAND = len(CLASSES)
"""The rank of what nobody waits for."""
NEVER = float("inf")
SHORTEST_RESERVATION_S = 1e-3
HOST = "cpu"
"""The device whose memory weights pass through on their way to a card."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Need:
    """What a replica takes of each device that it is placed on; `host_bytes` of main memory too while it is loaded."""

    bytes: int
    host_bytes: int = 0
    devices: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand:
    """Requests that wait for a model, by class: how many, and when the oldest arrived. `weight`: of all that wait."""

    counts: Mapping[str, int] = field(default_factory=dict[str, int])
    oldest: Mapping[str, float] = field(default_factory=dict[str, float])
    weight: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelView:
    """A model as placement sees it.

    `needs`: by device ("cuda:1") or kind of device ("cuda"), the preferred first. `load_seconds`: what a load takes.
    `run_seconds`: what a run takes, about; a drained replica runs on that long, half empty.
    `priority`: weight of keeping it, 1 for an ordinary one. `preload`: it is to be loaded though nobody asks; the flow
    clears it once it was loaded, from then on `keep_alive_s` holds. `min_replicas`: so many while memory lies free,
    though nobody asks. `use_rate`: uses per second, see `UseRate`.
    `desired_loaded`: what an operator ordered; False: it is not served any more.
    `broken_until`: after failed loads no other begins before.
    `saturated_since`: since when all of its replicas are full while more waits.
    """

    model: str
    needs: Mapping[str, Need]
    load_seconds: float
    run_seconds: float = 0.0
    priority: float = 1.0
    pinned: bool = False
    preload: bool = False
    keep_alive_s: float | None = None
    min_replicas: int = 0
    max_replicas: int = 1
    desired_loaded: bool | None = None
    paused: bool = False
    broken_until: float = float("-inf")
    saturated_since: float | None = None
    use_rate: float = 0.0
    demand: Demand = field(default_factory=Demand)
    at: tuple[str, int] | None = None
    """Of a run that waits for memory, which is to placement as a model: the (model, replica) on which it will run."""
    waits_since: float | None = None
    """Since when its wait counts against others; None: since its oldest request came."""

    def chance_of_use(self, within_s: float) -> float:
        """That somebody asks for it within so long, if uses come independently (Poisson)."""
        return 1.0 - exp(-self.use_rate * within_s)

    def most_urgent(self) -> tuple[int, float]:
        """The rank of the most urgent class that waits for it, and the arrival of the oldest there."""
        if not self.paused:
            for klass, rank in RANKS.items():
                if self.demand.counts.get(klass, 0) > 0:
                    return rank, self.demand.oldest[klass]
        return NO_DEMAND, NEVER


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaView:
    """A replica as placement sees it.

    `state`: loading, ready, draining, unloading. `bytes`: what comes back when it goes, by device. `queued_for_it`:
    requests that were given to it and do not run yet. `klass`: the most urgent class that runs on it, or else that ran
    on it last. `for_model`: the model that it is drained or unloaded for. `run_bytes`: what its runs hold of each
    device, beyond `bytes`. `end_reason`: why orders want it ended, None when they do not.
    """

    model: str
    replica: int
    device: str
    state: str
    bytes: Mapping[str, int]
    ready_at: float | None = None
    last_used_at: float | None = None
    running: int = 0
    queued_for_it: int = 0
    klass: str | None = None
    for_model: str | None = None
    run_bytes: int = 0
    end_reason: str | None = None
    stands: bool = False
    """Nothing runs on it, because memory for the runs that wait for it is not free."""

    @property
    def devices(self) -> list[str]:
        """Those on which it runs: not main memory that its weights pass through."""
        return [device for device in self.bytes if device != HOST or self.device == HOST]

    @property
    def busy(self) -> bool:
        return self.running > 0 or self.queued_for_it > 0

    @property
    def rank(self) -> int:
        """Of the work that runs here, or ran here last."""
        return NO_DEMAND if self.klass is None else RANKS[self.klass]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedLoad:
    """Load a replica: `needs` are to be granted, by device. Host memory in it comes back once it is ready.

    Reasons: demand, pinned, desired, preload, replicas, saturated.
    """

    model: str
    replica: int
    device: str
    devices: tuple[str, ...]
    needs: Mapping[str, int]
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Drain:
    """Nothing new starts on this replica; it is unloaded once what runs has ended.

    Reasons: class (for more urgent work), turn (its turn is over), stands (nothing can run on it for lack of memory),
    surplus (another replica of it stays), desired.
    """

    model: str
    replica: int
    for_model: str | None
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedUnload:
    """Nothing runs on this replica: end it.

    Reasons: idle (another needs its room), drained, keep_alive, desired, over_limit.
    """

    model: str
    replica: int
    reason: str
    for_model: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Reserve:
    """Room is being made for a model on this device: `Ledger.reserve` it, so that others do not take it.

    No bytes: the model is not wanted any more, and no room is kept for it.
    """

    model: str
    device: str
    bytes: int
    until: float


Decision = PlannedLoad | Drain | PlannedUnload | Reserve


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacementSettings:
    """Times in seconds.

    `turn_factor`: a model that others of its class wait for keeps its place for so many times what a change costs:
    the time of its load and of a run.
    `turn_patience`: so many turns, while what waits for it arrived before what waits for the other.
    `lookahead_s`: among models whose oldest requests arrived this near to each other, the choice is placement's.
    `scale_after_s`: a model is saturated for so long, and for a load's time, before it gets a replica more.
    `reserve_after_s`: what has waited for so long keeps the room that becomes free, for `longest_reservation_s` at
    first; then others pass for as long, then it keeps it for twice as long, and so on.
    `aging_s`, `aged_share`: as the scheduler's; the share of turns that a lower class gets beside a higher one.
    `class_patience`: so many times longer an idle model is kept from work that is less urgent by a class.
    `soon_s`: the time in which the chance of use counts for the cost of an eviction.
    """

    turn_factor: float = 15.0
    min_turn_s: float = 1.0
    turn_patience: float = 3.0
    lookahead_s: float = 5.0
    scale_after_s: float = 5.0
    reserve_after_s: float = 5.0
    longest_reservation_s: float = 30.0
    aging_s: float = 20.0
    aged_share: int = 8
    class_patience: float = 4.0
    soon_s: float = 60.0

    def keeps_room(self, waited_s: float) -> bool:
        """Whether others leave the room that becomes free to what has waited so long."""
        waited_s -= self.reserve_after_s
        if waited_s < 0:
            return False
        length = max(self.longest_reservation_s, SHORTEST_RESERVATION_S)
        while waited_s >= 2 * length:
            waited_s -= 2 * length
            length *= 2
        return waited_s < length

    def lets_pass(self, waited_s: float) -> bool:
        """Whether it has kept room for so long that it is the others' time now."""
        return waited_s >= self.reserve_after_s and not self.keeps_room(waited_s)

    def turn_s(self, view: ModelView) -> float:
        return max(self.min_turn_s, self.turn_factor * (view.load_seconds + view.run_seconds))


@dataclass(frozen=True, slots=True)
class Want:
    """A model that wants a replica more.

    `rank` and `oldest`: of its most urgent class. `order`: the group in which it is served, the lowest first.
    `aged`: it has waited so long that it gets a part of the turns of a higher class.
    """

    view: ModelView
    reason: str
    rank: int
    oldest: float
    order: float
    aged: bool = False


class UseRate:
    """How often a model is used: a rate that decays, so that what was used long ago counts little.

    An exponentially decaying sum over the time constant `memory_s`, made up for the time before the first use (as Adam
    corrects its averages). For a steady stream it comes to that stream's rate.
    """

    __slots__ = ("_at", "_first", "_memory_s", "_sum")

    def __init__(self, memory_s: float = 300.0) -> None:
        self._memory_s = memory_s
        self._sum = 0.0
        self._at = 0.0
        self._first: float | None = None

    def used(self, now: float, times: int = 1) -> None:
        if self._first is None:
            self._first = now
        self._sum = self._decayed(now) + times
        self._at = now

    def rate(self, now: float) -> float:
        """Uses per second."""
        if self._first is None:
            return 0.0
        seen_s = max(now - self._first, self._memory_s / 10)
        return self._decayed(now) / (self._memory_s * (1.0 - exp(-seen_s / self._memory_s)))

    def _decayed(self, now: float) -> float:
        return self._sum * exp(min(0.0, (self._at - now) / self._memory_s))
