"""A fleet in virtual time: loads and runs take the time that the trace says, a policy decides what to do.

The memory is the product's ledger in every policy, so that none can use more than there is.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import Any, Protocol

from penstock.processors.core.fleet.ledger import Grant, Ledger
from penstock.processors.core.fleet.views import ReplicaView
from penstock.processors.replay.trace import Request, Trace, TraceModel
from penstock.schemas.topics import RANKS

UNLOAD_S = 0.5
TICK_S = 1.0


@dataclass(eq=False, slots=True)
class Job:
    """A request on its way; it is what the scheduler queues."""

    request: Request
    seq: int
    klass: str
    lane: str
    priority: int
    ticket: int = 0
    started_at: float | None = None
    ended_at: float | None = None
    expired: bool = False

    @property
    def tenant(self) -> str:
        return self.request.tenant

    @property
    def line(self) -> str | None:
        return None

    @property
    def deadline(self) -> float | None:
        ttl_s = self.request.ttl_s
        return None if ttl_s is None else self.request.at_s + ttl_s

    @property
    def arrived_at(self) -> float:
        return self.request.at_s

    @property
    def cost(self) -> int:
        return max(1, round(self.request.run_s * 1000))


@dataclass(eq=False, slots=True)
class Replica:
    """A loaded model, or one that is on its way there or back."""

    model: TraceModel
    number: int
    devices: tuple[str, ...]
    grant: Grant
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
            model=self.model.model,
            replica=self.number,
            device=self.devices[0],
            state=self.state,
            bytes={device: ledger.held_bytes(self.grant, device) for device in self.grant.needs},
            ready_at=self.ready_at,
            last_used_at=self.last_used_at,
            running=len(self.running),
            klass=self.klass,
            for_model=self.for_model,
        )


class Policy(Protocol):
    """Decides: what arrived is queued, `act` may load, unload and start whatever it likes."""

    def arrived(self, job: Job) -> None: ...
    def waiting(self) -> int: ...
    def act(self) -> None: ...


class World:
    """Events in the order of their times; after those of one time the policy acts."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.ledger = Ledger(trace.devices)
        self.models = {one.model: one for one in trace.models}
        self.replicas: list[Replica] = []
        self.jobs: list[Job] = []
        self.loads = 0
        self.now = 0.0
        self._events: list[tuple[float, int, str, Any]] = []
        self._order = count()
        for device in trace.devices:
            self.ledger.observe(device.device, 0)
        for seq, request in enumerate(trace.requests, 1):
            job = Job(request, seq, request.klass, request.model, request.priority)
            self.jobs.append(job)
            self._at(request.at_s, "arrived", job)
        for use in trace.foreign:
            self._at(use.at_s, "foreign", use)

    def run(self, policy: Policy) -> None:
        """Until all has ended. Raises RuntimeError when a policy leaves work waiting for ever."""
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
                    raise RuntimeError(f"{policy.waiting()} requests wait for ever")
                ticking = True
                self._at(self.now + TICK_S, "tick", None)

    def _at(self, at: float, kind: str, subject: object) -> None:
        heappush(self._events, (at, next(self._order), kind, subject))

    def _happen(self, kind: str, subject: Any, policy: Policy) -> None:
        match kind:
            case "arrived":
                policy.arrived(subject)
            case "foreign":
                held = self.ledger.reserved_bytes(subject.device)
                self.ledger.observe(subject.device, held + subject.foreign_bytes, held)
            case "loaded":
                self._loaded(subject)
            case "unloaded":
                self.replicas.remove(subject)
                self.ledger.release(subject.grant)
            case _:
                replica, job = subject
                replica.running.remove(job)
                replica.last_used_at = job.ended_at = self.now

    def _loaded(self, replica: Replica) -> None:
        replica.state, replica.ready_at = "ready", self.now
        for device in replica.grant.needs:
            if device not in replica.devices:
                self.ledger.resize(replica.grant, device, 0, self.now)

    # -- what a policy may do

    def load(self, model: str, number: int, devices: tuple[str, ...], needs: dict[str, int]) -> bool:
        """Begin to load, if the ledger grants it."""
        grant = self.ledger.grant(model, needs, self.now)
        if grant is None:
            return False
        replica = Replica(self.models[model], number, devices, grant)
        self.replicas.append(replica)
        self.loads += 1
        self._at(self.now + replica.model.load_s, "loaded", replica)
        return True

    def unload(self, replica: Replica) -> None:
        """Nothing runs on it: its memory is back in a moment."""
        replica.state = "unloading"
        self._at(self.now + UNLOAD_S, "unloaded", replica)

    def start(self, job: Job, replica: Replica) -> None:
        """Give it a free slot."""
        if replica.free_slots <= 0:
            raise ValueError(f"{replica.model.model} has no free slot")
        job.started_at = self.now
        replica.running.append(job)
        replica.last_used_at = self.now
        replica.klass = min((one.klass for one in replica.running), key=RANKS.__getitem__)
        self._at(self.now + job.request.run_s, "ended", (replica, job))
