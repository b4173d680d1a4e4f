"""The flow: every request of a worker from its arrival to its commit. Events in, effects out, time passed in.

A shell calls one method per event, then `step`, then carries out what `take_effects` gives. The flow does no I/O and
knows no clock. It owns its parts and asks them in a fixed order; each part is given those that it uses, and no part
knows the flow. Events of one kind go to the part that has them:

- `commit`: ranges that were delivered, and what the broker has committed
- `arrivals`: parked records that were read again
- `attempts`: answers of engines about runs; `output`: what runs say meanwhile
- `durable`: answers of conversations and stores about requests that end; `awaiting_store`: what a store did not take
- `replicas`: engines that come up, die and go; `measurements`: memory of devices and engines
- `orders`: what operators and the configuration want; `peers`: what the workers of the pool report

The states of a request are in `work/states.py`. Models: websockets' `protocol.py` and vLLM's
`schedule()` / `update_from_output()`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from penstock.processors.core.commit.commit import Arrival, Commit
from penstock.processors.core.effects import Effect
from penstock.processors.core.fleet.alone import AloneClaim
from penstock.processors.core.fleet.dirty_set import DirtySet
from penstock.processors.core.fleet.estimates import Estimates
from penstock.processors.core.fleet.lane import Lane, Lanes
from penstock.processors.core.fleet.ledger import DeviceCapacity, Ledger
from penstock.processors.core.fleet.measurements import Measurements
from penstock.processors.core.fleet.memory import DeviceMemory
from penstock.processors.core.fleet.run_memory import RunMemory
from penstock.processors.core.intake.arrivals import Poison, Taken
from penstock.processors.core.intake.arriving import Arrivals
from penstock.processors.core.intake.commanding import Commanding
from penstock.processors.core.intake.queueing import Queueing
from penstock.processors.core.intake.screening import Screening
from penstock.processors.core.intake.start_times import StartTimes
from penstock.processors.core.intake.unserved import UnservedRequests
from penstock.processors.core.loading.lane_failures import LaneFailures
from penstock.processors.core.loading.lifecycle import Lifecycle
from penstock.processors.core.loading.memory_waiters import MemoryWaiters
from penstock.processors.core.loading.orders import Orders
from penstock.processors.core.loading.placing import Placing
from penstock.processors.core.loading.replicas import Replicas
from penstock.processors.core.loading.view_maker import Views
from penstock.processors.core.loading.watch import FleetWatch
from penstock.processors.core.outcomes.awaiting_store import AwaitingStore
from penstock.processors.core.outcomes.durable import Durable
from penstock.processors.core.outcomes.endings import Endings
from penstock.processors.core.queue.budget import Budget
from penstock.processors.core.queue.forecast import Forecast
from penstock.processors.core.queue.lifetimes import Lifetimes
from penstock.processors.core.queue.rereads import Rereads
from penstock.processors.core.queue.scheduler import Scheduler
from penstock.processors.core.requests.admission import Admission
from penstock.processors.core.requests.explaining import Explainer
from penstock.processors.core.requests.granting import Grants
from penstock.processors.core.requests.histories import Histories
from penstock.processors.core.requests.holdings import Holdings
from penstock.processors.core.requests.registry import Registry
from penstock.processors.core.requests.statuses import Statuses
from penstock.processors.core.requests.streams import Streams
from penstock.processors.core.requests.waits import Waits
from penstock.processors.core.runs.attempts import Attempts
from penstock.processors.core.runs.fetching import Fetching
from penstock.processors.core.runs.preparing import Preparing
from penstock.processors.core.runs.progress import Steps
from penstock.processors.core.runs.replica_choice import ReplicaChoice
from penstock.processors.core.runs.retry_queue import RetryQueue
from penstock.processors.core.runs.run_output import RunOutput
from penstock.processors.core.runs.starting import Starter
from penstock.processors.core.runs.suspect_starts import SuspectStarts
from penstock.processors.core.settings import Catalog, Commands, FlowSettings
from penstock.processors.core.work.peers import Peers
from penstock.processors.core.work.states import IN_SCHEDULER, NOT_DUE, ON_LANE, Stage
from penstock.processors.core.work.work import Body, Subject, Work, WorkKey
from penstock.schemas.errors import ExecutionTimeout
from penstock.schemas.records import AttemptHistory, ControlCommand, WaitingFor
from penstock.schemas.topics import TP

ROUNDS_A_STEP = 1_000
"""Rounds of one step beyond four for each request and lane that is held."""

EXPIRED_AT_ONCE = 256
"""Requests that one tick ends by their deadlines: a flood of one age must not hold up the event loop."""


class EndlessStep(RuntimeError):
    """A step went round without coming to an end: parts of the flow undo each other's decisions."""


class Flow:
    """One worker's requests. Not thread-safe. Two flows in one process share nothing."""

    def __init__(
        self,
        settings: FlowSettings,
        catalog: Catalog,
        commands: Commands,
        *,
        deaths: Callable[[WorkKey, str], int] = lambda key, request_id: 0,
        earlier_attempts: Callable[[WorkKey, str], AttemptHistory | None] = lambda key, request_id: None,
        devices: Sequence[DeviceCapacity] = (),
        estimate_error: Callable[[str, float], None] | None = None,
        memory_error: Callable[[int, int], None] | None = None,
        estimates: Estimates | None = None,
    ) -> None:
        """Makes each part once, with the parts that it uses.

        `estimate_error` gets the real start less the estimated one, `memory_error` the peak and what was booked.
        `deaths`: how many workers died while a request ran. `earlier_attempts`: those of a request that the crash
        journal knows. `estimates`: what was learned before.
        """
        self.taking = True
        self.peers = Peers(settings.worker_id, settings.pool)
        self._paused: frozenset[TP] = frozenset()
        self._effects: list[Effect] = []
        emit = self._effects.append
        placement = replace(settings.placement, longest_reservation_s=settings.longest_reservation_s)
        dirty = self.dirty = DirtySet()
        registry = self.registry = Registry(emit, settings.output_bytes)
        commit = self.commit = Commit(commit_span=settings.commit_span)
        forecast = self.forecast = Forecast(estimate_error)
        scheduler = self.scheduler = Scheduler[Work](
            aging_s=settings.aging_s, aged_share=settings.aged_share, slack=settings.slack, run_s=forecast.run_s
        )
        budget = self.budget = Budget(settings.intake_bytes)
        lanes = self.lanes = Lanes(budget.register)
        ledger = self.ledger = Ledger(devices, longest_reservation_s=settings.longest_reservation_s)
        estimates = self.estimates = estimates or Estimates()
        run_memory = self.run_memory = RunMemory(ledger)
        claim = self.claim = AloneClaim()
        memory = DeviceMemory(ledger, estimates, lanes, run_memory, dirty)
        admission = Admission(registry, scheduler, lanes, run_memory, memory, ledger, claim)
        explainer = self.explainer = Explainer(scheduler, lanes, admission, forecast)
        lifetimes = Lifetimes(settings.lifetimes)
        waits = self._waits = Waits(forecast, explainer, lifetimes)
        statuses = self.statuses = Statuses(emit, settings.status_linger_s, explainer, waits)
        streams = self._streams = Streams(emit, settings.chunk_linger_s)
        steps = self._steps = Steps(emit)
        self.output = RunOutput(registry, streams, steps, emit)
        grants = self.grants = Grants(
            registry, scheduler, lanes, statuses, run_memory, claim, emit, settings.max_execution_s
        )
        rereads = Rereads(emit, budget.ends_limit)
        holdings = self._holdings = Holdings(
            registry, scheduler, budget, lanes, memory, grants, run_memory, dirty, emit, rereads
        )
        fetching = Fetching(registry, scheduler, budget, holdings, emit)
        replica_choice = ReplicaChoice(admission, grants, run_memory, settings.affinity_s)
        preparing = Preparing(admission, grants, fetching, statuses, run_memory)
        suspects = SuspectStarts(admission, claim, grants, run_memory, preparing)
        starter = Starter(
            scheduler, admission, claim, grants, fetching, replica_choice, run_memory, preparing, suspects
        )
        histories = Histories(lanes, ledger, explainer, emit, settings.worker_id, earlier_attempts)
        endings = self.endings = Endings(registry, holdings, lanes, streams, histories, emit)
        self.durable = Durable(registry, holdings, endings, emit, deaths, commands)
        awaiting_store = self.awaiting_store = AwaitingStore(registry, endings, statuses, emit, settings.keep_least_s)
        retries = self._retries = RetryQueue(registry, scheduler, lanes, statuses, dirty, settings.retries)
        attempts = self.attempts = Attempts(
            registry,
            scheduler,
            lanes,
            memory,
            grants,
            statuses,
            streams,
            forecast,
            holdings,
            endings,
            retries,
            histories,
            dirty,
            emit,
        )
        measurements = self.measurements = Measurements(ledger, estimates, lanes, memory, dirty)
        unserved = self._unserved = UnservedRequests(
            registry,
            commit.leaves,
            scheduler,
            lanes,
            catalog,
            self.peers,
            holdings,
            endings,
            dirty,
            emit,
            settings.model_absent_s,
        )
        failures = LaneFailures(registry, scheduler, unserved, endings, retries, grants)
        self.replicas = Replicas(lanes, memory, measurements, claim, forecast, attempts, failures, dirty, memory_error)
        waiters = MemoryWaiters(scheduler, lanes, ledger, admission, run_memory, dirty, placement)
        views = Views(ledger, memory, run_memory, waiters, forecast)
        lifecycle = self.lifecycle = Lifecycle(lanes, grants, dirty, emit)
        self.placing = Placing(
            registry,
            scheduler,
            lanes,
            ledger,
            memory,
            starter,
            grants,
            run_memory,
            statuses,
            waiters,
            views,
            failures,
            endings,
            lifecycle,
            dirty,
            placement,
        )
        self._commanding = Commanding(
            registry, scheduler, holdings, lanes, endings, awaiting_store, statuses, dirty, emit, commands
        )
        self.orders = Orders(scheduler, lanes, lifecycle, dirty)
        self.watch = FleetWatch(scheduler, lanes, memory, grants, waiters, views, dirty)
        queueing = Queueing(registry, scheduler, budget, lanes, holdings, statuses, unserved, dirty)
        start_times = self._start_times = StartTimes(
            registry, queueing, unserved, statuses, explainer, endings, settings.commit_span
        )
        screening = Screening(lanes, memory, unserved, commands, retries, deaths)
        self.arrivals = Arrivals(
            registry,
            budget,
            lanes,
            screening,
            unserved,
            queueing,
            start_times,
            explainer,
            lifetimes,
            holdings,
            histories,
            endings,
            dirty,
            emit,
        )

    @property
    def works(self) -> dict[WorkKey, Work]:
        """Everything that is held, by the place of its record."""
        return self.registry.works

    def lane(self, model: str) -> Lane:
        """The lane of a model; it is made when it is new."""
        return self.lanes[model]

    def take_effects(self) -> list[Effect]:
        """What the shell is to do, in order."""
        effects = list(self._effects)
        self._effects.clear()
        return effects

    # -- assignments

    def assigned(
        self,
        committed: Mapping[TP, tuple[int, str]],
        generation: int,
        *,
        fenced: bool,
        now: float,
        wall_ms: float = float("inf"),
    ) -> frozenset[int]:
        """A new generation: what is not ours any more is dropped silently; after a fence everything is.

        Returns the `seq` of each dropped request: nothing more may be published of it.
        `wall_ms` is the time now in milliseconds since the epoch: nobody else has worked on what is appended after it.
        """
        self.registry.generation, self.registry.owned_since_ms = generation, wall_ms
        revocation = self.commit.assign(committed, generation, fenced=fenced)
        held = list(self.works.values())
        dropped = set(revocation.dropped)
        gone = [w for w in held if revocation.restart_all or w.key in dropped or w.tp not in committed]
        for work in gone:
            self._holdings.drop(work)
        self.budget.assign(list(committed))
        self.registry.scheduled.assign(committed)
        self._paused = frozenset()
        self._commanding.erase_again()
        self.dirty.look_at_all(self.lanes.values())
        return frozenset(work.number for work in gone)

    def command(self, command: ControlCommand, now: float, wall_ms: int) -> None:
        """A command from the control topic, in log order."""
        self._commanding.command(command, now, wall_ms, self.commit.partitions() if self.taking else ())

    # -- arrivals, and what became durable

    def arrived(self, tp: TP, offset: int, read: Taken | Poison, body: Body, now: float, wall_ms: int) -> Work | None:
        """A record of a range that `commit.delivered` has heard of. Returns the work when it is new."""
        arrival = self.commit.arrive(tp, offset, read.name, leaves=read.moves)
        if arrival is Arrival.DUPLICATE:
            self.arrivals.repeated(read)
        return self.arrivals.arrived((*tp, offset), read, body, now, wall_ms) if arrival is Arrival.NEW else None

    def moved(self, subject: Subject) -> None:
        """Its record is on the partition where it belongs."""
        self._complete(self.durable.moved(subject))

    def dead_lettered(self, subject: Subject, now: float) -> None:
        """Its dead letter is on the topic."""
        self._complete(self.durable.dead_lettered(subject, now))

    def published(self, subject: Subject, status: str) -> bool:
        """The broker has its terminal event. Returns False if it was dropped meanwhile: its new owner ends it."""
        awaited = self.durable.awaits(subject, Stage.PUBLISHING)
        self._complete(self.durable.published(subject, status))
        return awaited

    def _complete(self, ended: WorkKey | None) -> None:
        if ended is not None:
            self.commit.complete(ended[:2], ended[2])

    # -- time

    def step(self, now: float) -> None:
        """Start what can start, on every lane where something changed.

        Raises EndlessStep instead of holding up the event loop for ever.
        """
        self.dirty.now = now
        rounds_left = ROUNDS_A_STEP + 4 * (len(self.works) + len(self.lanes))
        while self.taking:
            rounds_left -= 1
            if rounds_left < 0:
                raise EndlessStep(f"a step does not end; lanes still to look at: {sorted(self.dirty.lanes)}")
            lane = self.dirty.next_lane()
            if lane is not None:
                self.placing.fill_or_load(lane, now)
            elif self.dirty.plan_due:
                self.placing.plan(now)
            else:
                return

    def chunks_under_way(self, size_bytes: int) -> None:
        """Memory of chunks without an acknowledgement. Counts against `output_bytes`; from 1/8 on, streams gather."""
        self.registry.chunk_bytes = size_bytes
        self._streams.slow = size_bytes * 8 >= self.registry.most_output_bytes

    def tick(self, now: float, wall_ms: int) -> None:
        """What is due by time. Call it every 10 ms or so while there is work, and at `next_due`."""
        self.dirty.now = now
        if not self.taking:
            self._hand_back_waiting()  # a run may have failed or lost its engine since
        self.explainer.clock(now, wall_ms)
        self.statuses.tick(now)
        self._streams.tick(now)
        self._steps.tick(now)
        self.awaiting_store.tick(now)
        if not self.taking:
            return
        self._retries.tick(now)
        self._start_times.tick(now, wall_ms, self.commit.lags_below)
        self._unserved.tick(now)
        for work in self.scheduler.statistics.expired(now, EXPIRED_AT_ONCE):
            self._waits.measure(work, now)
            self.endings.expire_waiting(work, now)
        self.watch.tick(now)
        self.dirty.look_at_all(self.lanes.values())

    def check_timeouts(self, now: float) -> None:
        """End runs that take longer than they may; call it a few times a second."""
        for lane in self.lanes.values():
            for work in [w for w in lane.holders() if w.stage is Stage.RUNNING]:
                run = work.run
                if run is not None and run.timeout_at is not None and run.timeout_at <= now:
                    took = now - (run.run_at or now)
                    self.attempts.timed_out(work, ExecutionTimeout(f"the run took longer than {took:.1f} s"), now)

    def next_due(self) -> float | None:
        """When the next status, chunk, retry or paced start is due."""
        due = (
            self.statuses,
            self._streams,
            self._steps,
            self.scheduler.slack,
            self._retries,
            self._start_times,
            self.awaiting_store,
            self._unserved,
        )
        return min((at for part in due if (at := part.next_due()) is not None), default=None)

    def publish_positions(self, count: int) -> None:
        """Publish place and reason of requests that are near the front and have waited for long."""
        ahead: dict[str, tuple[int, int]] = {}
        for position, work in enumerate(self.scheduler.fronts.front(count)):
            work.position = position
            requests, tokens = ahead.get(work.lane, (0, 0))
            self.statuses.near_front(work, self.dirty.now, (requests, tokens))
            ahead[work.lane] = requests + 1, tokens + work.cost
        self.statuses.turns_behind(self.scheduler.eligible, count, self.dirty.now)

    # -- what the consumer should do

    def pauses(self) -> frozenset[TP]:
        """Partitions of which no more should be delivered now; two watermarks keep it from flapping."""
        paused: set[TP] = set()
        for tp in self.commit.partitions():
            endings = self.registry.too_many_endings(tp, was_paused=tp in self._paused)
            if endings or self.commit.full(tp) or self.budget.full(tp):
                paused.add(tp)
        self._paused = frozenset(paused)
        return self._paused

    # -- stopping

    def stop_taking(self) -> None:
        """From here on nothing is started. What waits is handed back silently; what runs may finish."""
        self.taking = False
        self._hand_back_waiting()

    def _hand_back_waiting(self) -> None:
        for work in [w for w in self.works.values() if w.stage in IN_SCHEDULER | NOT_DUE]:
            self._holdings.drop(work)

    def hand_back(self) -> None:
        """Let go of what still runs. It stays uncommitted, so another worker begins it again."""
        for work in [w for w in self.works.values() if w.stage is not Stage.PUBLISHING]:
            self._holdings.drop(work)

    # -- looking

    def check(self) -> None:
        """The invariants between the owners, for tests and the simulator: what one counts, another has."""
        works, scheduler = self.works.values(), self.scheduler
        parked = Counter((work.lane, work.klass) for work in works if work.stage is Stage.PARKED)
        counted = {(name, klass): count for name, lane in self.lanes.items() for klass, count in lane.parked.items()}
        assert parked == Counter(counted), f"parked are {parked}, and {counted} are counted"
        queued = {work.number for work in works if work in scheduler}
        waiting = {work.number for work in works if work.stage in IN_SCHEDULER}
        assert len(queued) == len(scheduler), f"{len(scheduler)} are queued, and {len(queued)} of them are held"
        assert queued <= waiting, f"queued without waiting: {queued - waiting}"
        for work in works:
            left = work.stage is Stage.FETCHING and (work.end_with is not None or work.pass_to is not None)
            assert work.number in queued or work.number not in waiting or left, f"{work} waits, and is not queued"
        granted = {work.number for work in works if work.stage in ON_LANE}
        holders = {work.number for lane in self.lanes.values() for work in lane.holders()}
        assert granted == holders, f"granted are {granted}, and slots are held by {holders}"
        assert len(granted) == self.grants.held, f"{self.grants.held} grants are counted, and {len(granted)} are held"

    def waiting_for(self, work: Work, now: float) -> WaitingFor:
        """Why a request that waits does not run yet."""
        return self.explainer.explain(work, now)

    @property
    def running(self) -> int:
        return self.grants.held
