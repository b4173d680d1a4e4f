"""The policies that a trace is replayed by: the product's own, and two that others use.

`fifo`: in the order of arrival. Whoever is first and whose model is not loaded waits until it is, and all behind wait
too; what is loaded and idle for longest makes room (so does Ollama). `strict`: the same, by class first.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Mapping

from penstock.processors.core.fleet.placement import DEFAULTS, decide
from penstock.processors.core.fleet.views import Demand, Drain, Load, ModelView, Reserve, Unload, UseRate
from penstock.processors.core.queue.scheduler import Scheduler
from penstock.processors.replay.world import Job, Policy, Replica, World
from penstock.schemas.topics import RANKS

WEIGHTS = {"high": 16.0, "medium": 4.0, "low": 1.0}


class InOrder:
    """One queue in a fixed order; at its head everybody waits for a model that is not loaded."""

    def __init__(self, world: World, order: Callable[[Job], tuple[float, ...]]) -> None:
        self._world = world
        self._order = order
        self._queue: list[Job] = []
        self._assigned: dict[str, deque[Job]] = {model: deque() for model in world.models}

    def arrived(self, job: Job) -> None:
        insort(self._queue, job, key=self._order)

    def waiting(self) -> int:
        return len(self._queue) + sum(map(len, self._assigned.values()))

    def act(self) -> None:
        self._start()
        while self._queue:
            job = self._queue[0]
            if _expired(job, self._world.now):
                self._queue.pop(0)
                continue
            if not self._loaded(job.lane) and not self._load(job.lane):
                return
            self._assigned[job.lane].append(self._queue.pop(0))
            self._start()

    def _loaded(self, model: str) -> bool:
        return any(r.model.model == model and r.state in ("loading", "ready") for r in self._world.replicas)

    def _start(self) -> None:
        for replica in self._world.replicas:
            waiting = self._assigned[replica.model.model]
            while waiting and replica.free_slots > 0:
                job = waiting.popleft()
                if not _expired(job, self._world.now):
                    self._world.start(job, replica)

    def _load(self, model: str) -> bool:
        """Load it where it fits; else make room where the fewest idle ones, longest idle first, make it."""
        known, world = self._world.models[model], self._world
        devices = [
            d for d in world.ledger.devices() if known.kind in (d.kind, d.device) and known.bytes <= d.limit_bytes
        ]
        devices.sort(key=lambda d: -world.ledger.free_bytes(d.device))
        for device in devices:
            needs = {device.device: known.bytes} | ({"cpu": known.host_bytes} if known.host_bytes else {})
            if world.load(model, 0, (device.device,), needs):
                return True
        if any(replica.state == "unloading" for replica in world.replicas):
            return False  # room is on its way
        rooms = [(self._room(device.device, known.bytes), device.device) for device in devices]
        possible = [(len(room), device, room) for room, device in rooms if room is not None]
        for replica in min(possible, default=(0, "", list[Replica]()), key=lambda one: one[:2])[2]:
            world.unload(replica)
        return False

    def _room(self, device: str, need: int) -> list[Replica] | None:
        missing, chosen = need - self._world.ledger.free_bytes(device), list[Replica]()
        idle = [
            one
            for one in self._world.replicas
            if device in one.devices
            and one.state == "ready"
            and not one.running
            and not self._assigned[one.model.model]
        ]
        for replica in sorted(idle, key=lambda one: one.last_used_at or 0.0):
            if missing > 0:
                chosen.append(replica)
                missing -= replica.model.bytes
        return chosen if missing <= 0 and chosen else None


class Penstock:
    """The product's scheduler, placement and ledger, wired as the worker's flow wires them."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._scheduler: Scheduler[Job] = Scheduler(aging_s=DEFAULTS.aging_s, aged_share=DEFAULTS.aged_share)
        self._arrivals = {model: {klass: deque[Job]() for klass in RANKS} for model in world.models}
        self._rates = {model: UseRate() for model in world.models}
        self._saturated: dict[str, float] = {}
        self._run_s = dict.fromkeys(world.models, 0.0)

    def arrived(self, job: Job) -> None:
        self._scheduler.add(job)
        self._arrivals[job.lane][job.klass].append(job)
        self._rates[job.lane].used(self._world.now)

    def waiting(self) -> int:
        return len(self._scheduler)

    def act(self) -> None:
        now = self._world.now
        for job in self._scheduler.census.expired(now):
            self._scheduler.remove(job)
            job.expired = True
        self._start()
        views = [self._view(model) for model in self._world.models]
        replicas = [replica.view(self._world.ledger) for replica in self._world.replicas]
        for decision in decide(now, views, replicas, self._world.ledger):
            self._carry_out(decision)

    def _start(self) -> None:
        ready = sorted(self._world.replicas, key=lambda one: -one.free_slots)
        for replica in ready:
            while replica.free_slots > 0:
                job = next(self._scheduler.candidates(replica.model.model, self._world.now), None)
                if job is None:
                    break
                self._scheduler.start(job, self._world.now)
                # What a run takes is known from those that ran; the trace's time stands for it.
                self._run_s[job.lane] += 0.1 * (job.request.run_s - self._run_s[job.lane])
                self._world.start(job, replica)

    def _view(self, model: str) -> ModelView:
        known, now = self._world.models[model], self._world.now
        counts = {klass: self._scheduler.fronts.depth(model, klass) for klass in RANKS}
        oldest: dict[str, float] = {}
        for klass, arrivals in self._arrivals[model].items():
            while arrivals and (arrivals[0].started_at is not None or arrivals[0].expired):
                arrivals.popleft()
            if counts[klass]:
                oldest[klass] = arrivals[0].arrived_at
        up = [one for one in self._world.replicas if one.model.model == model and one.state == "ready"]
        if up and any(counts.values()) and not any(one.free_slots for one in up):
            self._saturated.setdefault(model, now)
        else:
            self._saturated.pop(model, None)
        return ModelView(
            model=model,
            needs={known.kind: known.need},
            load_seconds=known.load_s,
            run_seconds=self._run_s[model],
            max_replicas=known.max_replicas,
            saturated_since=self._saturated.get(model),
            use_rate=self._rates[model].rate(now),
            demand=Demand(
                counts=counts, oldest=oldest, weight=sum(WEIGHTS[klass] * number for klass, number in counts.items())
            ),
        )

    def _carry_out(self, decision: Load | Drain | Unload | Reserve) -> None:
        match decision:
            case Load():
                self._world.load(decision.model, decision.replica, decision.devices, dict(decision.needs))
            case Reserve():
                ledger = self._world.ledger
                ledger.reserve(decision.device, decision.bytes, decision.model, decision.until, self._world.now)
            case Drain() | Unload():
                place = (decision.model, decision.replica)
                replica = next(one for one in self._world.replicas if (one.model.model, one.number) == place)
                replica.for_model = decision.for_model
                if isinstance(decision, Drain):
                    replica.state = "draining"
                else:
                    self._world.unload(replica)


def _expired(job: Job, now: float) -> bool:
    job.expired = job.deadline is not None and now >= job.deadline
    return job.expired


POLICIES: Mapping[str, Callable[[World], Policy]] = {
    "fifo": lambda world: InOrder(world, lambda job: (job.seq,)),
    "strict": lambda world: InOrder(world, lambda job: (RANKS[job.klass], job.seq)),
    "penstock": Penstock,
}
