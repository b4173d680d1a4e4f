"""Placement in virtual time: made-up traces under the worker's scheduler, placement and ledger, and simpler policies.

The figures depend on no machine. A trace is a fleet, its models and their requests, from a seed. Policies:

- penstock: the worker's own
- fifo: in the order of arrival. While the first request waits for its model, all others wait; the model that has been
  idle for the longest time makes room, as in Ollama
- strict: the same by class first
- bound: what no policy can beat

Columns: switches (loads of a model), makespan (first arrival to last end), p95 wait by class (arrival to start, or to
the deadline), deadline misses, utilisation (of the fleet's memory and time).
"""

from __future__ import annotations

import random
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import Any, Protocol

from penstock.processors.core.fleet.ledger import DeviceCapacity, Ledger, MemoryGrant
from penstock.processors.core.fleet.placement import DEFAULTS, decide
from penstock.processors.core.fleet.views import (
    Demand,
    Drain,
    ModelView,
    Need,
    PlannedLoad,
    PlannedUnload,
    ReplicaView,
    Reserve,
    UseRate,
)
from penstock.processors.core.queue.scheduler import Scheduler
from penstock.schemas.topics import RANKS, priority_class

GB = 1 << 30
PRIORITIES = (1, 5, 9)
WEIGHTS = {"high": 16.0, "medium": 4.0, "low": 1.0}
UNLOAD_S = 0.5
TICK_S = 1.0


# -- traces


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """Each replica runs `slots` requests at a time."""

    name: str
    bytes: int
    load_s: float
    slots: int = 8
    max_replicas: int = 1


@dataclass(eq=False, kw_only=True, slots=True)
class Job:
    """A request; the scheduler queues it."""

    arrived_at: float
    lane: str
    priority: int
    run_s: float
    tenant: str
    ttl_s: float | None = None
    seq: int = 0
    ticket: int = 0
    conversation: None = None
    started_at: float | None = None
    ended_at: float | None = None

    @property
    def klass(self) -> str:
        return priority_class(self.priority)

    @property
    def deadline(self) -> float | None:
        return None if self.ttl_s is None else self.arrived_at + self.ttl_s

    @property
    def cost(self) -> int:
        return max(1, round(self.run_s * 1000))

    def wait_s(self) -> float:
        until = self.deadline if self.started_at is None else self.started_at
        return 0.0 if until is None else until - self.arrived_at


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """`foreign`: (seconds, device, bytes) of other programs from then on."""

    name: str
    devices: tuple[DeviceCapacity, ...]
    models: tuple[Model, ...]
    jobs: tuple[Job, ...]
    foreign: tuple[tuple[float, str, int], ...] = ()


def cards(number: int) -> tuple[DeviceCapacity, ...]:
    return tuple(
        DeviceCapacity(device=f"cuda:{n}", kind="cuda", total_bytes=80 * GB, reserve_bytes=2 * GB)
        for n in range(number)
    )


def turns(seed: int = 1, scale: float = 1.0) -> Trace:
    """One GPU of 80 GB and four models of which one fits; an hour of all classes."""
    sizes = (("code", 60, 25), ("chat", 45, 18), ("vision", 50, 20), ("long", 70, 30))
    models = tuple(Model(name=name, bytes=size * GB, load_s=load_s) for name, size, load_s in sizes)
    jobs = arrivals(random.Random(seed), 3600 * scale, 0.45, models, (4, 3, 2, 1), (0.1, 0.6, 0.3), (2.0, 8.0))
    return Trace(name="turns", devices=cards(1), models=models, jobs=tuple(jobs))


def chat(seed: int = 2, scale: float = 1.0) -> Trace:
    """Two GPUs, twelve models of which a few are popular; people, batches of low work, and foreign use for a while."""
    chance = random.Random(seed)
    models = tuple(
        Model(name=f"m{n:02}", bytes=chance.randint(14, 40) * GB, load_s=chance.randint(8, 20)) for n in range(12)
    )
    popular = [1 / (n + 1) for n in range(12)]
    jobs = list(arrivals(chance, 3600 * scale, 0.8, models, popular, (0.35, 0.65, 0.0), (1.0, 5.0)))
    for _ in range(max(1, int(12 * scale))):
        at, model = chance.uniform(0, 3000 * scale), chance.choice(models)
        for _ in range(40):
            run_s = chance.uniform(2, 10)
            jobs.append(Job(arrived_at=at, lane=model.name, priority=9, run_s=run_s, tenant="batch", ttl_s=7200))
    jobs.sort(key=lambda job: job.arrived_at)
    foreign = ((900 * scale, "cuda:1", 12 * GB), (1800 * scale, "cuda:1", 0))
    return Trace(name="chat", devices=cards(2), models=models, jobs=tuple(jobs), foreign=foreign)


def batch(seed: int = 3, scale: float = 1.0) -> Trace:
    """Two GPUs, six models of which four fit: 5,000 mixed requests within ten seconds."""
    models = tuple(Model(name=f"b{n}", bytes=38 * GB, load_s=8 + n, slots=4, max_replicas=2) for n in range(6))
    chance, rate = random.Random(seed), 500 * scale
    jobs = arrivals(chance, 10, rate, models, (2, 2, 2, 2, 1, 1), (0.04, 0.56, 0.4), (1.0, 6.0))
    return Trace(name="batch", devices=cards(2), models=models, jobs=tuple(jobs))


def arrivals(
    chance: random.Random,
    seconds: float,
    rate: float,
    models: Sequence[Model],
    popular: Sequence[float],
    classes: Sequence[float],
    run_s: tuple[float, float],
) -> Iterator[Job]:
    """Independent arrivals; `popular` and `classes` are shares."""
    at = chance.expovariate(rate)
    while at < seconds:
        yield Job(
            arrived_at=round(at, 3),
            lane=chance.choices(models, popular)[0].name,
            priority=chance.choices(PRIORITIES, classes)[0],
            run_s=round(chance.uniform(*run_s), 3),
            tenant=f"t{chance.randint(1, 4)}",
            ttl_s=1800.0 if chance.random() < 0.5 else None,
        )
        at += chance.expovariate(rate)


TRACES: tuple[Callable[..., Trace], ...] = (turns, chat, batch)


# -- the world


@dataclass(eq=False, slots=True)
class Replica:
    model: Model
    number: int
    device: str
    grant: MemoryGrant
    state: str = "loading"
    ready_at: float | None = None
    last_used_at: float | None = None
    running: list[Job] = field(default_factory=list[Job])
    klass: str | None = None
    for_model: str | None = None

    @property
    def free_slots(self) -> int:
        return self.model.slots - len(self.running) if self.state == "ready" else 0

    def view(self, ledger: Ledger) -> ReplicaView:
        return ReplicaView(
            model=self.model.name,
            replica=self.number,
            device=self.device,
            state=self.state,
            bytes={device: ledger.held_bytes(self.grant, device) for device in self.grant.needs},
            ready_at=self.ready_at,
            last_used_at=self.last_used_at,
            running=len(self.running),
            klass=self.klass,
            for_model=self.for_model,
        )


class Policy(Protocol):
    """`act` may load, unload and start anything."""

    def arrived(self, job: Job) -> None: ...
    def waiting(self) -> int: ...
    def act(self) -> None: ...


class World:
    """Handles events in the order of their times; after those of one time the policy acts.

    All policies use the product's ledger, so none can use more memory than there is.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.ledger = Ledger(trace.devices)
        self.models = {one.name: one for one in trace.models}
        self.replicas: list[Replica] = []
        self.loads = 0
        self.now = 0.0
        self._events: list[tuple[float, int, str, Any]] = []
        self._order = count()
        for device in trace.devices:
            self.ledger.observe(device.device, 0)
        for seq, job in enumerate(trace.jobs):
            job.seq = seq
            self._at(job.arrived_at, "arrived", job)
        for at, device, used in trace.foreign:
            self._at(at, "foreign", (device, used))

    def run(self, policy: Policy) -> None:
        """Run until all requests have ended. Raises RuntimeError if a policy leaves work waiting forever."""
        ticking = False
        last_change = 0.0
        while self._events:
            self.now = self._events[0][0]
            while self._events and self._events[0][0] <= self.now:
                _, _, kind, subject = heappop(self._events)
                if kind == "tick":
                    ticking = False
                else:
                    self._happen(kind, subject, policy)
                    last_change = self.now
            policy.act()
            if policy.waiting() and not ticking:
                if self.now - last_change > 86_400:
                    raise RuntimeError(f"{policy.waiting()} requests wait forever")
                ticking = True
                self._at(self.now + TICK_S, "tick", None)

    def _at(self, at: float, kind: str, subject: object) -> None:
        heappush(self._events, (at, next(self._order), kind, subject))

    def _happen(self, kind: str, subject: Any, policy: Policy) -> None:
        match kind:
            case "arrived":
                policy.arrived(subject)
            case "foreign":
                device, used = subject
                held = self.ledger.reserved_bytes(device)
                self.ledger.observe(device, held + used, held)
            case "loaded":
                subject.state, subject.ready_at = "ready", self.now
            case "unloaded":
                self.replicas.remove(subject)
                self.ledger.release(subject.grant)
            case _:
                replica, job = subject
                replica.running.remove(job)
                replica.last_used_at = job.ended_at = self.now

    def load(self, model: Model, number: int, device: str) -> bool:
        """Load the model if the ledger grants its memory."""
        grant = self.ledger.grant(model.name, {device: model.bytes}, self.now)
        if grant is None:
            return False
        replica = Replica(model, number, device, grant)
        self.replicas.append(replica)
        self.loads += 1
        self._at(self.now + model.load_s, "loaded", replica)
        return True

    def unload(self, replica: Replica) -> None:
        replica.state = "unloading"
        self._at(self.now + UNLOAD_S, "unloaded", replica)

    def start(self, job: Job, replica: Replica) -> None:
        if replica.free_slots <= 0:
            raise ValueError(f"{replica.model.name} has no free slot")
        job.started_at = self.now
        replica.running.append(job)
        replica.last_used_at = self.now
        replica.klass = min((one.klass for one in replica.running), key=RANKS.__getitem__)
        self._at(self.now + job.run_s, "ended", (replica, job))


# -- policies


class InOrder:
    """One queue in a fixed order: while its head waits for a model, all wait."""

    def __init__(self, world: World, *, by_class: bool) -> None:
        self._world = world
        self._by_class = by_class
        self._queue: list[tuple[int, int, Job]] = []
        self._assigned: dict[str, deque[Job]] = {model: deque() for model in world.models}

    def arrived(self, job: Job) -> None:
        insort(self._queue, (RANKS[job.klass] if self._by_class else 0, job.seq, job))

    def waiting(self) -> int:
        return len(self._queue) + sum(map(len, self._assigned.values()))

    def act(self) -> None:
        self._start()
        while self._queue:
            job = self._queue[0][2]
            if not self._expired(job):
                if not self._loaded(job.lane) and not self._load(self._world.models[job.lane]):
                    return
                self._assigned[job.lane].append(job)
            self._queue.pop(0)
            self._start()

    def _expired(self, job: Job) -> bool:
        return job.deadline is not None and self._world.now >= job.deadline

    def _loaded(self, model: str) -> bool:
        return any(r.model.name == model and r.state in ("loading", "ready") for r in self._world.replicas)

    def _start(self) -> None:
        for replica in self._world.replicas:
            waiting = self._assigned[replica.model.name]
            while waiting and replica.free_slots > 0:
                job = waiting.popleft()
                if not self._expired(job):
                    self._world.start(job, replica)

    def _load(self, model: Model) -> bool:
        """Load it where it fits; else unload idle models, as few as possible, the longest idle first."""
        world = self._world
        devices = sorted((d.device for d in world.trace.devices), key=lambda name: -world.ledger.free_bytes(name))
        if any(world.load(model, 0, device) for device in devices):
            return True
        if any(replica.state == "unloading" for replica in world.replicas):
            return False
        found = [(len(idle), device, idle) for device in devices if (idle := self._idle(device, model.bytes))]
        for replica in min(found, key=lambda one: one[:2])[2] if found else ():
            world.unload(replica)
        return False

    def _idle(self, device: str, need: int) -> list[Replica]:
        """Idle replicas of the device that free this much memory; empty if all of them free too little."""
        missing, chosen = need - self._world.ledger.free_bytes(device), list[Replica]()
        on_device = [one for one in self._world.replicas if one.device == device and one.state == "ready"]
        idle = [one for one in on_device if not one.running and not self._assigned[one.model.name]]
        for replica in sorted(idle, key=lambda one: one.last_used_at or 0.0):
            if missing > 0:
                chosen.append(replica)
                missing -= replica.model.bytes
        return chosen if missing <= 0 else []


class Penstock:
    """The product's scheduler, placement and ledger, connected as in the worker's flow."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._scheduler: Scheduler[Job] = Scheduler(aging_s=DEFAULTS.aging_s, aged_share=DEFAULTS.aged_share)  # pyright: ignore[reportInvalidTypeArguments]
        self._arrivals = {model: {klass: deque[Job]() for klass in RANKS} for model in world.models}
        self._rates = {model: UseRate() for model in world.models}
        self._saturated: dict[str, float] = {}
        self._run_s = dict.fromkeys(world.models, 0.0)
        self._expired = set[Job]()

    def arrived(self, job: Job) -> None:
        self._scheduler.add(job)
        self._arrivals[job.lane][job.klass].append(job)
        self._rates[job.lane].used(self._world.now)

    def waiting(self) -> int:
        return len(self._scheduler)

    def act(self) -> None:
        now = self._world.now
        for job in self._scheduler.statistics.expired(now):
            self._scheduler.remove(job)
            self._expired.add(job)
        self._start()
        views = [self._view(model) for model in self._world.trace.models]
        replicas = [replica.view(self._world.ledger) for replica in self._world.replicas]
        for decision in decide(now, views, replicas, self._world.ledger):
            self._carry_out(decision)

    def _start(self) -> None:
        for replica in sorted(self._world.replicas, key=lambda one: -one.free_slots):
            while replica.free_slots > 0:
                job = next(self._scheduler.candidates(replica.model.name, self._world.now), None)
                if job is None:
                    break
                self._scheduler.start(job, self._world.now)
                self._run_s[job.lane] += 0.1 * (job.run_s - self._run_s[job.lane])
                self._world.start(job, replica)

    def _view(self, known: Model) -> ModelView:
        model, now = known.name, self._world.now
        counts = {klass: self._scheduler.fronts.depth(model, klass) for klass in RANKS}
        oldest: dict[str, float] = {}
        for klass, jobs in self._arrivals[model].items():
            while jobs and (jobs[0].started_at is not None or jobs[0] in self._expired):
                jobs.popleft()
            if counts[klass]:
                oldest[klass] = jobs[0].arrived_at
        up = [one for one in self._world.replicas if one.model is known and one.state == "ready"]
        if up and any(counts.values()) and not any(one.free_slots for one in up):
            self._saturated.setdefault(model, now)
        else:
            self._saturated.pop(model, None)
        return ModelView(
            model=model,
            needs={"cuda": Need(bytes=known.bytes)},
            load_seconds=known.load_s,
            run_seconds=self._run_s[model],
            max_replicas=known.max_replicas,
            saturated_since=self._saturated.get(model),
            use_rate=self._rates[model].rate(now),
            demand=Demand(
                counts=counts, oldest=oldest, weight=sum(WEIGHTS[klass] * number for klass, number in counts.items())
            ),
        )

    def _carry_out(self, decision: PlannedLoad | Drain | PlannedUnload | Reserve) -> None:
        world = self._world
        match decision:
            case PlannedLoad():
                world.load(world.models[decision.model], decision.replica, decision.devices[0])
            case Reserve():
                world.ledger.reserve(decision.device, decision.bytes, decision.model, decision.until, world.now)
            case Drain() | PlannedUnload():
                place = (decision.model, decision.replica)
                replica = next(one for one in world.replicas if (one.model.name, one.number) == place)
                replica.for_model = decision.for_model
                if isinstance(decision, Drain):
                    replica.state = "draining"
                else:
                    world.unload(replica)


POLICIES: dict[str, Callable[[World], Policy]] = {
    "fifo": lambda world: InOrder(world, by_class=False),
    "strict": lambda world: InOrder(world, by_class=True),
    "penstock": Penstock,
}


# -- figures


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    policy: str
    trace: str
    switches: int
    makespan_s: float
    p95_wait_s: dict[str, float]
    deadline_misses: int
    utilisation: float


def replay(trace: Callable[..., Trace], scale: float = 1.0, policies: Sequence[str] = tuple(POLICIES)) -> list[Row]:
    """The figures of each policy on the trace, and the bound."""
    return [*(_row(trace(scale=scale), policy) for policy in policies), bound(trace(scale=scale))]


def _row(trace: Trace, policy: str) -> Row:
    world = World(trace)
    world.run(POLICIES[policy](world))
    if any(world.ledger.over_bytes(device.device) for device in trace.devices):
        raise RuntimeError(f"{policy} uses more memory of {trace.name}'s devices than there is")
    done = [job for job in trace.jobs if job.ended_at is not None]
    makespan_s = max(job.ended_at or 0.0 for job in done) - trace.jobs[0].arrived_at
    waits = {klass: sorted(job.wait_s() for job in trace.jobs if job.klass == klass) for klass in RANKS}
    return Row(
        policy=policy,
        trace=trace.name,
        switches=world.loads,
        makespan_s=makespan_s,
        p95_wait_s={klass: found[min(len(found) - 1, int(0.95 * len(found)))] for klass, found in waits.items()},
        deadline_misses=sum(job.started_at is None for job in trace.jobs),
        utilisation=_utilisation(trace, done, makespan_s),
    )


def _utilisation(trace: Trace, jobs: Sequence[Job], makespan_s: float) -> float:
    models = {one.name: one for one in trace.models}
    used = sum(job.run_s / models[job.lane].slots * models[job.lane].bytes for job in jobs)
    return used / (sum(one.limit_bytes for one in trace.devices) * makespan_s)


def bound(trace: Trace) -> Row:
    """No policy ends sooner or loads less.

    A model must be resident while its requests run, with all slots full, and while it loads. Memory times time is
    limited, so the sum of these areas over the fleet's memory is a bound (a model beside which no other fits counts
    with the whole device). So are the work of each model by itself, and the last arrival.
    """
    first, work = trace.jobs[0].arrived_at, {one.name: 0.0 for one in trace.models}
    slots = {one.name: one.slots for one in trace.models}
    for job in trace.jobs:
        work[job.lane] += job.run_s / slots[job.lane]
    area = sum((work[one.name] + one.load_s) * _fraction(trace, one) for one in trace.models)
    alone = (work[one.name] / one.max_replicas + one.load_s for one in trace.models)
    last = (job.arrived_at + job.run_s - first for job in trace.jobs)
    makespan_s = max(area, *alone, *last)
    return Row(
        policy="bound",
        trace=trace.name,
        switches=sum(one > 0 for one in work.values()),
        makespan_s=makespan_s,
        p95_wait_s=dict.fromkeys(RANKS, 0.0),
        deadline_misses=0,
        utilisation=_utilisation(trace, trace.jobs, makespan_s),
    )


def _fraction(trace: Trace, model: Model) -> float:
    """The part of the fleet's memory that the model takes while it is resident."""
    limit = trace.devices[0].limit_bytes
    is_alone = model.bytes + min(one.bytes for one in trace.models) > limit
    return (limit if is_alone else model.bytes) / (limit * len(trace.devices))


def main() -> None:
    print(f"| policy | trace | switches | makespan, s | p95 wait, s: {' / '.join(RANKS)} | misses | utilisation |")
    print("| --- " * 7 + "|")
    for trace in TRACES:
        for row in replay(trace):
            waits = " / ".join(f"{wait:,.0f}" for wait in row.p95_wait_s.values())
            print(
                f"| {row.policy} | {row.trace} | {row.switches:,} | {row.makespan_s:,.0f} | {waits}"
                f" | {row.deadline_misses:,} | {row.utilisation:.3f} |"
            )


if __name__ == "__main__":
    main()
