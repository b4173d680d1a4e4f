"""What a replay comes to: one row for each policy, a lower bound that no policy can beat, and a plot as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from penstock.processors.replay.policies import POLICIES
from penstock.processors.replay.trace import Trace
from penstock.processors.replay.world import Job, World
from penstock.schemas.topics import RANKS

COLUMNS = ("policy", "trace", "switches", "makespan_s", "p95_wait_s", "deadline_misses", "utilisation")
PLOT_WIDTH = 48


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Of one policy on one trace.

    `switches`: loads of a model. `makespan_s`: from the first arrival to the last end. `p95_wait_s`: by class, from
    arrival to start, or to the deadline of what expired. `deadline_misses`: requests that did not start in time.
    `utilisation`: the share of the fleet's memory and time in which full replicas worked.
    """

    policy: str
    trace: str
    switches: int
    makespan_s: float
    p95_wait_s: dict[str, float]
    deadline_misses: int
    utilisation: float


def replay(trace: Trace, policies: Iterable[str] = tuple(POLICIES)) -> list[Row]:
    """Each policy on the trace, and the bound."""
    return [*(_row(trace, policy) for policy in policies), bound(trace)]


def _row(trace: Trace, policy: str) -> Row:
    world = World(trace)
    world.run(POLICIES[policy](world))
    first = min((one.at_s for one in trace.requests), default=0.0)
    makespan_s = max((job.ended_at for job in world.jobs if job.ended_at is not None), default=first) - first
    return Row(
        policy=policy,
        trace=trace.name,
        switches=world.loads,
        makespan_s=round(makespan_s, 1),
        p95_wait_s=_p95_by_class(world.jobs),
        deadline_misses=sum(job.started_at is None for job in world.jobs),
        utilisation=_utilisation(trace, [job for job in world.jobs if job.ended_at is not None], makespan_s),
    )


def _p95_by_class(jobs: Sequence[Job]) -> dict[str, float]:
    found: dict[str, float] = {}
    for klass in RANKS:
        waits = sorted(_wait(job) for job in jobs if job.klass == klass)
        if waits:
            found[klass] = round(waits[min(len(waits) - 1, int(0.95 * len(waits)))], 1)
    return found


def _wait(job: Job) -> float:
    until = job.started_at if job.started_at is not None else job.deadline
    return 0.0 if until is None else until - job.arrived_at


def _utilisation(trace: Trace, jobs: Sequence[Job], makespan_s: float) -> float:
    models = {one.model: one for one in trace.models}
    used = sum(job.request.run_s / models[job.lane].slots * models[job.lane].bytes for job in jobs)
    room = sum(one.limit_bytes for one in trace.devices if one.kind in {m.kind for m in trace.models})
    return round(used / (room * makespan_s), 3) if makespan_s and room else 0.0


# -- the bound


def bound(trace: Trace) -> Row:
    """No policy ends sooner, loads less, waits less.

    A model must be resident for as long as its requests take with all slots full, and as its loading takes. Memory
    times time is limited, so the sum of these areas over the fleet's memory is a bound (a model beside which no other
    fits counts with the whole of the device); so is the work of each model by itself, and the last arrival.
    """
    models = {one.model: one for one in trace.models if any(r.model == one.model for r in trace.requests)}
    first = min((one.at_s for one in trace.requests), default=0.0)
    work = dict.fromkeys(models, 0.0)
    shortest = dict.fromkeys(models, float("inf"))
    for one in trace.requests:
        work[one.model] += one.run_s / models[one.model].slots
        shortest[one.model] = min(shortest[one.model], one.run_s)
    area = sum((work[name] + one.load_s) * _fraction(trace, name) for name, one in models.items())
    alone = [work[name] / one.max_replicas + one.load_s for name, one in models.items()]
    last = [one.at_s + one.run_s - first for one in trace.requests]
    makespan_s = max([area, *alone, *last], default=0.0)
    jobs = [Job(one, 1, one.klass, one.model, one.priority) for one in trace.requests]
    return Row(
        policy="bound",
        trace=trace.name,
        switches=len(models),
        makespan_s=round(makespan_s, 1),
        p95_wait_s={klass: 0.0 for klass in RANKS if any(one.klass == klass for one in trace.requests)},
        deadline_misses=0,
        utilisation=_utilisation(trace, jobs, makespan_s),
    )


def _fraction(trace: Trace, model: str) -> float:
    """The least part of the fleet that the model takes while it is resident."""
    known = next(one for one in trace.models if one.model == model)
    devices = [one for one in trace.devices if known.kind in (one.kind, one.device)]
    smallest = min(one.bytes for one in trace.models if one.kind == known.kind)
    total = sum(one.limit_bytes for one in devices)
    parts = [
        one.limit_bytes if known.bytes + smallest > one.limit_bytes else known.bytes
        for one in devices
        if known.bytes <= one.limit_bytes
    ]
    return min(parts) / total


# -- the plot


def plot(rows: Sequence[Row]) -> str:
    """Switches and the p95 of the wait of the most urgent class, as bars of text, one block for each trace."""
    lines: list[str] = []
    for trace in dict.fromkeys(row.trace for row in rows):
        chosen = [row for row in rows if row.trace == trace]
        urgent = next((klass for klass in RANKS if klass in chosen[0].p95_wait_s), "high")
        for title, values in (
            ("switches", [float(row.switches) for row in chosen]),
            (f"p95 wait of {urgent}, s", [row.p95_wait_s.get(urgent, 0.0) for row in chosen]),
            ("makespan, s", [row.makespan_s for row in chosen]),
        ):
            lines.append(f"{trace}: {title}")
            most = max(values) or 1.0
            for row, value in zip(chosen, values, strict=True):
                lines.append(f"  {row.policy:<9}{'█' * round(PLOT_WIDTH * value / most):<{PLOT_WIDTH}} {value:,.1f}")
    return "\n".join(lines)
