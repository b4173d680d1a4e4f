"""One seed from its beginning to its quiet end; and the smallest plan that still fails."""

from __future__ import annotations

import traceback
from collections import Counter
from dataclasses import dataclass, field

from penstock.processors.core.work.states import Transition
from simulation import plants
from simulation.clients import Clients
from simulation.cluster import Cluster
from simulation.inside import ends_per_partition
from simulation.livelock import MOST_CPU_S, bounded_cpu
from simulation.mischief import Mischief
from simulation.operators import Operators
from simulation.plan import Plan
from simulation.truth import Violation

FAULTS_S = 6.0
"""Faults happen in this time; after it and the last request there are none."""
QUIET_WITHIN_S = 300.0
AFTER_A_DEATH_S = 30.0
"""So much more for each worker that a prompt kills after that: a reservation may last so long in each life."""
LOOK_S = 0.25
REST_S = 3.0
MOST_STEPS = 150_000


@dataclass(slots=True)
class Outcome:
    """What came of a seed."""

    plan: Plan
    violation: str | None
    steps: int
    digest: str
    virtual_s: float
    transitions: set[Transition] = field(default_factory=set[Transition])
    faults: Counter[str] = field(default_factory=Counter[str])
    trace: list[str] = field(default_factory=list[str])
    left: int = 0
    """Requests that orders held up to the end."""

    @property
    def kind(self) -> str:
        """The name of the invariant that does not hold."""
        return (self.violation or "").split(":")[0]


class _Watch:
    """Looks now and then whether all is quiet."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.over = False
        self.stuck = False
        self.standing = False
        """Only what orders forbid is left."""
        self._rests_since: float | None = None
        self._give_up = 0.0
        self.operators = Operators(cluster)

    def calm(self) -> None:
        self._cluster.world.note("no more faults")
        self._cluster.calm = True
        for host in self._cluster.hosts:
            host.devices.foreign = dict.fromkeys(host.devices.foreign, 0)
        self.operators.calm()
        if self._cluster.gateway is not None:
            self._cluster.gateway.calm()
        for life in self._cluster.lives():
            if life.consumer.skipped:  # where no later delivery shows the gap, only a restart finds what was skipped
                self._cluster.kill_worker(life, "the end of faults")
        self._give_up = self._cluster.world.now + QUIET_WITHIN_S
        self._look()

    def _look(self) -> None:
        world = self._cluster.world
        if self._cluster.quiet:
            self.over = True
        elif self._rests(world.now):
            self.over = self.standing = True
        elif world.now >= self._give_up + AFTER_A_DEATH_S * self._cluster.deaths_in_calm:
            self.stuck = True
        else:
            world.at(LOOK_S, None, "looks", self._look)

    def _rests(self, now: float) -> bool:
        """Whether orders alone have held up what is left for a while."""
        if not self._cluster.plan.has("standing_orders") or not self._cluster.at_rest:
            self._rests_since = None
            return False
        if self._rests_since is None:
            self._rests_since = now
        return now - self._rests_since >= REST_S


def run(plan: Plan, *, keep_trace: bool = False) -> Outcome:
    """Simulate a plan. Whatever goes wrong in the product or breaks an invariant is in the outcome."""
    cluster = Cluster(plan, keep_trace=keep_trace)
    world = cluster.world
    watch = _Watch(cluster)
    violation: str | None = None
    try:
        with ends_per_partition(plan.endings), bounded_cpu(MOST_CPU_S):
            violation = _until_quiet(cluster, watch)
    except Violation as error:
        violation = str(error)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        if where.filename == plants.__file__:
            raise  # a plant that breaks by itself is found by no check
        violation = (
            f"{type(error).__name__}: {error} ({where.name} in {where.filename.rsplit('/', 1)[-1]}:{where.lineno})"
        )
    world.note(f"violation {violation}")
    return Outcome(
        plan,
        violation,
        world.steps,
        world.digest,
        world.now,
        cluster.transitions,
        world.faults,
        world.trace,
        sum(len(life.inside.works()) for life in cluster.lives()) if watch.standing else 0,
    )


def _until_quiet(cluster: Cluster, watch: _Watch) -> str | None:
    plan, world = cluster.plan, cluster.world
    for number, host in enumerate(cluster.hosts):
        late = plan.has("join") and number == len(cluster.hosts) - 1 and number > 0
        world.at(3.0 if late else 0.0, None, f"{host.name} begins", cluster.start_worker, host)
    Clients(cluster).start()
    Mischief(cluster).start(FAULTS_S)
    watch.operators.start(FAULTS_S)
    world.at(max(FAULTS_S, plan.span_s) + 2.0, None, "calm", watch.calm)
    over = world.run(lambda: watch.over or watch.stuck, most_steps=MOST_STEPS)
    return _verdict(cluster, watch, over)


def _verdict(cluster: Cluster, watch: _Watch, over: bool) -> str | None:
    if watch.over:
        if watch.standing:
            cluster.checks.at_rest()
        else:
            cluster.checks.at_end()
        return None
    waiting = [f"{life.name} {work} {work.klass}" for life in cluster.lives() for work in life.inside.works()]
    offsets = cluster.log.group.offsets
    behind = {
        tp: (offsets.get(tp), partition.end)
        for tp, partition in cluster.log.partitions.items()
        if offsets.get(tp, (0, ""))[0] != partition.end
    }
    lost = [] if cluster.gateway is None else [entry.key for entry in cluster.gateway.left()]
    why = f"after {QUIET_WITHIN_S:.0f} s without faults" if watch.stuck else f"after {cluster.world.steps} steps"
    rebalancing = "rebalancing" if cluster.log.group.rebalancing else ""
    return f"stuck: {why}: {waiting[:5]}, lost {lost[:5]}, uncommitted {behind}, {rebalancing}"


def shrink(outcome: Outcome, tries: int) -> Outcome:
    """Leave out what the violation does not need, as long as the same invariant fails."""
    smallest = outcome
    found = True
    while found and tries > 0:
        found = False
        for plan in smallest.plan.smaller():
            tries -= 1
            if tries <= 0:
                break
            again = run(plan)
            if again.kind == outcome.kind:
                smallest, found = again, True
                break
    return smallest
