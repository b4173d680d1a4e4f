"""What all layers of the flow share: parts, requests held, effects gathered, and the one method for transitions.

The flow is one object in layers, each in a file of its own and using only those below it:
board ← endings ← runs ← memory ← loads ← heads ← placing ← arriving ← flow.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from penstock.processors.core import states
from penstock.processors.core.budget import Budget
from penstock.processors.core.effects import Effect
from penstock.processors.core.estimates import Estimates
from penstock.processors.core.explaining import Explainer, LaneFacts
from penstock.processors.core.fleet import PlacementSettings
from penstock.processors.core.forecast import Forecast
from penstock.processors.core.gate import CommitGate
from penstock.processors.core.lane import Lane
from penstock.processors.core.ledger import DeviceCapacity, Ledger
from penstock.processors.core.lifetimes import Lifetimes, LifetimeSettings
from penstock.processors.core.progress import Steps
from penstock.processors.core.rereads import Rereads
from penstock.processors.core.run_memory import RunMemory
from penstock.processors.core.scheduler import Scheduler
from penstock.processors.core.slack import SlackSettings
from penstock.processors.core.starting import Starter
from penstock.processors.core.states import ENDING, Stage
from penstock.processors.core.statuses import Statuses
from penstock.processors.core.streams import Streams
from penstock.processors.core.work import Work, WorkKey
from penstock.schemas.abilities import Need
from penstock.schemas.choosing import Choice
from penstock.schemas.records import ControlCommand
from penstock.schemas.topics import TP


class Catalog(Protocol):
    """Which lane serves a request."""

    def resolve(self, task: str, model: str | None, need: Need | None = None) -> Choice:
        """The model, which is the lane's name, and why when none was named.

        Raises ModelNotFound, UnsupportedParameter when it lacks what the request needs.
        """
        ...


class Commands(Protocol):
    """The control topic as remembered."""

    def apply(self, command: ControlCommand, now_ms: int) -> bool: ...
    def cancelled(self, tenant: str, request_id: str) -> ControlCommand | None: ...
    def priority(self, tenant: str, request_id: str) -> int | None: ...
    def deleted_at(self, tenant: str, conversation_id: str) -> int | None: ...
    def erasures(self) -> list[ControlCommand]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowSettings:
    """Limits and lingers; seconds unless named otherwise."""

    aging_s: float = 20.0
    aged_share: int = 8
    commit_span: int = 50_000
    intake_bytes: int = 256 << 20
    chunk_linger_s: float = 0.03
    status_linger_s: float = 0.025
    max_execution_s: float = 900.0
    retry_delay_s: float = 0.05
    affinity_s: float = 0.5
    """So long a conversation waits for the replica that has its beginning."""
    longest_reservation_s: float = 30.0
    """So long room is kept from small requests for one that needs much, at first."""
    placement: PlacementSettings = field(default_factory=PlacementSettings)
    slack: SlackSettings | None = None
    """None: low work is held back by nothing but the order."""
    lifetimes: LifetimeSettings | None = None
    """None: a request that names no deadline has the default one."""


class Board:
    """The parts of one worker's flow and what they know together."""

    def __init__(
        self,
        settings: FlowSettings,
        catalog: Catalog,
        commands: Commands,
        *,
        deaths: Callable[[WorkKey, str], int] = lambda key, request_id: 0,
        devices: Sequence[DeviceCapacity] = (),
        estimate_error: Callable[[str, float], None] | None = None,
        memory_error: Callable[[int, int], None] | None = None,
        estimates: Estimates | None = None,
    ) -> None:
        """`estimate_error` hears what came less what was estimated, `memory_error` the peak and what was booked.

        `estimates`: what was learned before.
        """
        self.ledger = Ledger(devices, longest_reservation_s=settings.longest_reservation_s)
        self.estimates = estimates or Estimates()
        self.memory_error = memory_error
        self._plan_due = True
        """Something changed that placement reads: the next step plans anew."""
        self._planned_at = float("-inf")
        self._reserved_for: set[str] = set()
        self._head_ended: dict[str, float] = {}
        """By device, when the newest of those for whom room was kept had it, or did not wait any more."""
        self._idle_since: float | None = None
        self._watched_at = float("-inf")
        self.evictions = 0
        """Replicas that were given up for another model, in all."""
        self._settings = settings
        self._placement = replace(settings.placement, longest_reservation_s=settings.longest_reservation_s)
        self._catalog = catalog
        self._commands = commands
        self._deaths = deaths
        self._effects: list[Effect] = []
        self.gate = CommitGate(commit_span=settings.commit_span)
        self.forecast = Forecast(estimate_error)
        self.scheduler: Scheduler[Work] = Scheduler(
            aging_s=settings.aging_s,
            aged_share=settings.aged_share,
            slack=settings.slack,
            run_s=lambda lane: self.forecast.run_s(lane),
        )
        self.budget = Budget(settings.intake_bytes)
        self.rereads = Rereads(self._emit, self.budget.ends_limit)
        self.streams = Streams(self._emit, settings.chunk_linger_s)
        self.steps = Steps(self._emit)
        self.lifetimes = Lifetimes(settings.lifetimes)
        self.explainer = Explainer(self.scheduler, self.forecast, self._lane_facts)
        self.statuses = Statuses(self._emit, settings.status_linger_s, self.explainer, self._on_run)
        self.starter = Starter(
            self.scheduler,
            self.budget,
            self.statuses,
            self._emit,
            self._transition,
            lambda: self.generation,
            max_execution_s=settings.max_execution_s,
            affinity_s=settings.affinity_s,
            memory=RunMemory(self.ledger),
        )
        self.lanes: dict[str, Lane] = {}
        self.works: dict[WorkKey, Work] = {}
        self._subjects: dict[tuple[str, str], Work] = {}
        self._seq = itertools.count(1)
        self._retries: list[tuple[float, int, Work]] = []
        self._endings: Counter[TP] = Counter()
        self._ending_bytes: Counter[TP] = Counter()
        self._ends_under_way = 0
        self._paused: frozenset[TP] = frozenset()
        self._dirty: dict[str, Lane] = {}
        self.generation = -1
        self.owned_since_ms: float = float("inf")
        """Wall-clock milliseconds of the newest assignment."""
        self.now = float("-inf")
        """The time of the newest step or tick."""
        self.taking = True
        self.transitions: set[states.Transition] | None = None
        """Set it to a set to have every transition noted (the simulator does)."""

    # -- effects

    def _emit(self, effect: Effect) -> None:
        self._effects.append(effect)

    def take_effects(self) -> list[Effect]:
        """What the shell is to do, in order."""
        effects, self._effects = self._effects, []
        return effects

    def _transition(self, work: Work, event: str, after: Stage) -> None:
        """The one place where a request changes its state. Raises IllegalTransition."""
        before = work.stage
        states.check(before, event, after)
        if self.transitions is not None:
            self.transitions.add((str(before), event, str(after)))
        work.stage = after
        if (after in ENDING) != (before in ENDING):
            change = 1 if after in ENDING else -1
            self._endings[work.tp] += change
            self._ending_bytes[work.tp] += change * work.size_bytes
            self._ends_under_way += change

    def lane(self, name: str) -> Lane:
        """The lane of this name; it is made when it is new."""
        lane = self.lanes.get(name)
        if lane is None:
            lane = self.lanes[name] = Lane(name)
            self.budget.register(name)
        return lane

    def _lane_facts(self, work: Work) -> LaneFacts:
        """What is known of the request's lane; told by the layer that places models."""
        raise NotImplementedError

    def _on_run(self, work: Work, now: float) -> None:
        """The work goes to its engine: its wait is measured, and the estimate of it held against that."""
        if not work.counted_wait:
            self.forecast.started(work.told_start_at, now)
        self._measure_wait(work, now)

    def _measure_wait(self, work: Work, now: float) -> None:
        """From its append time on: what waited in the log while no worker lived has waited too."""
        if not work.counted_wait:
            work.counted_wait = True
            waited_ms = self.explainer.wall_ms(now) - work.first_place.append_time_ms
            self.lifetimes.waited(work.klass, waited_ms / 1000, now)

    def _mark_changed(self, lane: Lane) -> None:
        """Something changed on the lane: the next `step` looks at it."""
        self._dirty[lane.name] = lane

    def _touch_later(self, lane: Lane) -> None:
        """Look at the lane at the next tick, not at once."""
        lane.look_due = True

    def _all_dirty(self) -> None:
        for lane in self.lanes.values():
            lane.look_due = True
            self._dirty[lane.name] = lane
