"""A lane: one model's queue as the flow sees it, and the replicas that serve it. When it may be loaded again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from penstock.processors.core.fleet.ledger import CannotLoad
from penstock.processors.core.fleet.replica import Replica, ReplicaState
from penstock.processors.core.fleet.residents import ModelSpec, Needs
from penstock.processors.core.fleet.views import UseRate
from penstock.processors.core.work.work import Work
from penstock.schemas.errors import EngineFailed, InternalError, PenstockError
from penstock.schemas.topics import CLASSES

MAX_LOAD_FAILURES = 3
"""Loads that may fail in a row before requests that wait for the model fail; after these each failure fails them."""
QUIET_DEATHS = 16
"""How many deaths in a row are followed by a restart at once: finding the culprit among many takes some."""
UNSERVED = ""
"""The lane of requests whose model this worker does not serve. Nothing starts from it."""
PREFIXES = 4_096
"""Conversations of which is remembered which replica has their beginning."""


@dataclass(frozen=True, slots=True)
class RunWant:
    """A request whose run waits for memory of a device of its replica, in bytes."""

    work: Work
    replica: Replica
    device: str
    need_bytes: int


class Lanes(dict[str, "Lane"]):
    """The lanes by model. One that is asked for by `lanes[name]` is made when it is new."""

    def __init__(self, on_new: Callable[[str], None]) -> None:
        super().__init__()
        self._on_new = on_new

    def __missing__(self, name: str) -> Lane:
        lane = self[name] = Lane(name)
        if name == UNSERVED:  # all of its requests are parked: it needs no share of the budget
            lane.served = lane.size_due = False
        else:
            self._on_new(name)
        return lane


class Lane:
    """All replicas of a model serve one queue."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.replicas: dict[int, Replica] = {}
        self.ready: list[Replica] = []
        """Those that may take runs."""
        self.wanted = False
        """It was up: it is loaded again when its engine dies, whether somebody waits or not."""
        self.was_up = False
        self.parked: dict[str, int] = dict.fromkeys(CLASSES, 0)
        """Requests by class whose bytes are not here."""
        self.not_before = 0.0
        self.failures = 0
        self.last_error: PenstockError | None = None
        """Why its newest load failed; None once one has succeeded."""
        self.deaths = 0
        self.short = False
        """It waits for memory."""
        self.spec = ModelSpec(model=name)
        self.needs: Needs | None = None
        self.size_due = True
        """Its needs are not known, or may be outdated: it is sized before its next load."""
        self.sizing = False
        self.sizing_of: object = None
        """What is being sized, see `ModelSpec.made_of`."""
        self.too_small: set[str] = set()
        """Devices that can never hold a run that was asked of it, beside the model; others can."""
        self.never_fits: PenstockError | None = None
        self.paused = False
        self.desired: bool | None = None
        """Whether an operator wants it loaded."""
        self.pinned: bool | None = None
        """Whether an operator wants it kept loaded; None: as its spec says."""
        self.asked_for = False
        """Somebody waits for it, and placement knows."""
        self.unload_revision = -1
        """The newest order to unload it. Replicas of before it are unloaded; it is loaded again for who asks for it."""
        self.served = True
        """False once it was removed from the catalog."""
        self.uses = UseRate()
        self.saturated_since: float | None = None
        self.run_wants: dict[str, RunWant] = {}
        """By device, the first in the order of starting whose run lacked memory there when it was looked at."""
        self.load_span = (0.0, 0.0)
        self.fail_through = -1
        self.fail_error: PenstockError | None = None
        self.look_due = False
        self._prefixes: OrderedDict[str, Replica] = OrderedDict()

    # -- replicas

    def add(self, replica: Replica, now: float) -> None:
        """A replica is being loaded from now on."""
        self.replicas[replica.number] = replica
        replica.load_began = now
        replica.made_of, replica.orders_revision = self.spec.made_of, self.unload_revision
        self.load_span = (now, float("inf"))

    def up(self, replica: Replica, slots: int, tokens: int | None, *, inline: bool, now: float) -> None:
        if replica.state is ReplicaState.LOADING:
            self.load_span = (self.load_span[0], now)
        replica.up(slots, tokens, inline=inline, now=now)
        self.was_up, self.wanted = True, self.served and self.desired is not False
        self.failures, self.short, self.fail_error, self.last_error = 0, False, None, None
        self.count_ready()

    def remove(self, replica: Replica) -> None:
        if self.replicas.get(replica.number) is replica:
            del self.replicas[replica.number]
        self.count_ready()

    def count_ready(self) -> None:
        """A replica's state has changed."""
        self.ready = [one for one in self.replicas.values() if one.state is ReplicaState.READY]

    def next_number(self) -> int:
        """The least that no replica has."""
        return next(number for number in range(len(self.replicas) + 1) if number not in self.replicas)

    @property
    def loading(self) -> bool:
        return any(one.state is ReplicaState.LOADING for one in self.replicas.values())

    @property
    def is_pinned(self) -> bool:
        return self.spec.pinned if self.pinned is None else self.pinned

    def reason_to_end(self, replica: Replica) -> str | None:
        """Why orders want the replica ended; None when they do not. Level-triggered: it is asked at each planning.

        Reasons: removed, replaced, desired.
        """
        if not self.served:
            return "removed"
        if replica.made_of != self.spec.made_of:
            return "replaced"
        ordered = self.desired is False and replica.orders_revision != self.unload_revision
        return "desired" if ordered else None

    @property
    def state(self) -> str:
        """The model's state as reports publish it: that of its best replica."""
        states = {one.state for one in self.replicas.values()}
        for state in (ReplicaState.READY, ReplicaState.LOADING, ReplicaState.DRAINING, ReplicaState.UNLOADING):
            if state in states:
                return state.value
        if self.sizing:
            return "loading"
        return "failed" if self.failures or self.never_fits is not None else "absent"

    @property
    def why_not_ready(self) -> str | None:
        """Why it has no replica that takes runs; None when nobody wants one."""
        if self.never_fits is not None:
            return str(self.never_fits)
        if self.failures:
            return "its load failed" if self.failures == 1 else f"{self.failures} loads in a row failed"
        return "it waits for memory" if self.short else None

    def replica_of(self, work: Work) -> Replica | None:
        """The replica that has prepared the work's run, or runs it."""
        return None if work.run is None else self.replicas.get(work.run.replica)

    def holders(self) -> Iterator[Work]:
        for replica in self.replicas.values():
            yield from replica.holders

    def running(self) -> int:
        """Works that are on its engines."""
        return sum(replica.running() for replica in self.replicas.values())

    # -- conversations

    def remember_prefix(self, conversation: str, replica: Replica) -> None:
        """The replica has the beginning of this conversation in its cache."""
        self._prefixes[conversation] = replica
        self._prefixes.move_to_end(conversation)
        if len(self._prefixes) > PREFIXES:
            self._prefixes.popitem(last=False)

    def with_prefix(self, conversation: str) -> Replica | None:
        """The ready replica that has the beginning of this conversation."""
        replica = self._prefixes.get(conversation)
        return replica if replica is not None and replica in self.ready else None

    # -- loading

    def loading_ms(self, since: float, until: float) -> int:
        """How much of a time the newest load of this model took."""
        began, ended = self.load_span
        return max(0, round((min(until, ended) - max(since, began)) * 1000))

    @property
    def lost(self) -> bool:
        """It was up, its engine died, and it cannot be loaded again."""
        return self.was_up and not self.ready and self.failures >= MAX_LOAD_FAILURES

    def died(self, now: float, *, with_work: bool) -> None:
        """An engine died. With work on it the work is the first suspect, so it is started again at once."""
        self.deaths += 1
        quiet = QUIET_DEATHS if with_work else 1
        self.not_before = now if self.deaths <= quiet else now + min(30.0, 0.5 * 2 ** min(self.deaths - quiet, 8))

    def survived(self) -> None:
        """A run has ended well: whatever made it die is not here now."""
        self.deaths = 0

    def forget_failures(self) -> None:
        """What made its loads fail was changed, or an operator wants it tried again: it may be loaded at once."""
        self.failures, self.not_before, self.last_error = 0, 0.0, None

    def load_failed(self, error: BaseException, now: float) -> PenstockError | None:
        """Plan the next try. Returns the error for those who wait, once waiting is of no use any more."""
        self.load_span = (self.load_span[0], now)
        self.size_due = True  # perhaps its files are mended before the next try
        self.not_before = now + min(30.0, 0.5 * 2 ** min(self.failures, 8))
        self.failures += 1
        self.last_error = error if isinstance(error, PenstockError) else None
        hopeless = isinstance(error, CannotLoad) or not isinstance(error, EngineFailed)
        if not hopeless and self.failures < MAX_LOAD_FAILURES:
            return None
        return error if isinstance(error, PenstockError) else InternalError(f"{self.name} could not be loaded")
