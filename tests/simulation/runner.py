"""Runs seeds, shows progress, shrinks what fails, and says in one line of JSON what came of it."""

from __future__ import annotations

import argparse
import builtins
import gc
import hashlib
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial

from penstock.processors.core.work.states import TRANSITIONS, Transition
from simulation import plan as plans
from simulation.plants import NEEDS, PLANTS, planted
from simulation.seeds import Outcome, run, shrink
from simulation.worlds import PLANTS as OTHER_PLANTS
from simulation.worlds import WORLDS, simulate_world

ALL_TRANSITIONS_FROM = 500
"""From so many seeds on, a transition that none visits is named: chance, or a line of the table that cannot happen."""
EXCEPTIONS = {name for name, one in vars(builtins).items() if isinstance(one, type) and issubclass(one, Exception)}
SHRINK_TRIES = 150
PROGRESS_S = 2.0
LAST_LINES = 60
NAMES = sorted({*plans.FAULTS, *plans.KINDS, plans.START_LATER, *plans.OPERATORS, *plans.CHECKS} - {"plain"})
"""What can be left out of plans."""


@dataclass(slots=True)
class Report:
    """What all seeds together showed."""

    seeds: int = 0
    steps: int = 0
    transitions: set[Transition] = field(default_factory=set[Transition])
    faults: Counter[str] = field(default_factory=Counter[str])
    failed: list[Outcome] = field(default_factory=list[Outcome])
    histories: str = ""
    """A hash of all histories, in the order of their seeds: a change that only moves code keeps it."""

    def add(self, outcome: Outcome) -> None:
        self.seeds += 1
        self.steps += outcome.steps
        self.transitions |= outcome.transitions
        self.faults.update(outcome.faults)
        self.histories = hashlib.sha256(f"{self.histories}{outcome.digest}".encode()).hexdigest()[:16]
        if outcome.violation is not None:
            self.failed.append(outcome)

    @property
    def missing(self) -> list[Transition]:
        return sorted(TRANSITIONS - self.transitions)

    @property
    def unvisited(self) -> list[Transition]:
        """Of many seeds: what none of them visits."""
        return self.missing if self.seeds >= ALL_TRANSITIONS_FROM else []

    def line(self) -> str:
        return json.dumps(
            {
                "seeds": self.seeds,
                "steps": self.steps,
                "transitions_seen": len(self.transitions),
                "transitions": len(TRANSITIONS),
                "unvisited": [" ".join(transition) for transition in self.unvisited],
                "faults": sum(self.faults.values()),
                "violations": len(self.failed),
                "histories": self.histories,
            }
        )


def left_out(plant: str | None, *, without: Collection[str] = (), including: Collection[str] = ()) -> frozenset[str]:
    """What plans lack: what is known to be open and not asked for. A plant needs what finds it."""
    needed = NEEDS.get(plant or "", frozenset[str]())
    return frozenset(plans.KNOWN_OPEN).difference(including, needed).union(without)


def _seed(plant: str | None, without: Collection[str], number: int) -> Outcome:
    with planted(plant):
        outcome = run(plans.draw(number, without))
    # Else a plant that calls what has changed would count as found, by its own exception and by no check.
    assert plant is None or outcome.kind not in EXCEPTIONS, f"{plant} breaks by itself: {outcome.violation}"
    return outcome


def _collect_seldom() -> None:
    """What a history leaves in cycles is small, and to look for it took a tenth of the time."""
    gc.freeze()
    gc.set_threshold(100_000, 50, 50)


def outcomes(seeds: Sequence[int], plant: str | None, without: Collection[str], jobs: int) -> Iterator[Outcome]:
    """In the order of the seeds, whatever number of processes runs them."""
    one = partial(_seed, plant, without)
    if jobs <= 1:
        yield from map(one, seeds)
        return
    with ProcessPoolExecutor(jobs, initializer=_collect_seldom) as pool:
        try:
            yield from pool.map(one, seeds, chunksize=4)
        finally:
            pool.shutdown(cancel_futures=True)  # it waits: a process that ends before its pool leaves torn pipes


def simulate(
    seeds: Sequence[int],
    *,
    plant: str | None = None,
    without: Collection[str] | None = None,
    jobs: int = 1,
    most_s: float | None = None,
    stop_at: int = 1,
) -> Report:
    """Run seeds until `stop_at` of them failed, or the time is over. `without`: None leaves out what is known open."""
    without = left_out(plant) if without is None else without
    report = Report()
    began = told = time.monotonic()
    for outcome in outcomes(seeds, plant, without, jobs):
        report.add(outcome)
        now = time.monotonic()
        if now - told >= PROGRESS_S:
            told = now
            rate = report.steps / (now - began)
            say(f"seed {outcome.plan.seed}: {report.seeds} seeds, {report.steps} steps, {rate:.0f} steps/s")
        if len(report.failed) >= stop_at or (most_s is not None and now - began >= most_s):
            break
    return report


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def explain(outcome: Outcome, plant: str | None, tries: int, lines: int) -> None:
    """The violation, whether it replays, and the smallest plan that shows it."""
    say(f"seed {outcome.plan.seed} violates: {outcome.violation}")
    with planted(plant):
        again = run(outcome.plan)
        same = (again.digest, again.violation) == (outcome.digest, outcome.violation)
        say(f"history {outcome.digest}; replayed {'identically' if same else 'DIFFERENTLY: ' + str(again.violation)}")
        smallest = shrink(outcome, tries)
        traced = run(smallest.plan, keep_trace=True)
    say(f"smallest after shrinking ({smallest.steps} steps): {smallest.violation}\n  {smallest.plan.describe()}")
    for line in traced.trace[-lines:]:
        say(f"    {line}")


def replay(seed: int, plant: str | None, without: Collection[str], *, trace: bool) -> Outcome:
    """One seed, its history and the hash of it."""
    plan = plans.draw(seed, without)
    say(plan.describe())
    with planted(plant):
        outcome = run(plan, keep_trace=trace)
    for line in outcome.trace:
        say(line)
    print(f"seed {seed}: {outcome.steps} steps, {outcome.virtual_s:.2f} virtual seconds, history {outcome.digest}")
    return outcome


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="make simulate", description=__doc__)
    parser.add_argument("--seeds", type=int, default=200, help="how many seeds, from --first on")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, help="replay this one")
    parser.add_argument("--world", choices=["cluster", *WORLDS], default="cluster", help="what to simulate")
    parser.add_argument("--plant", choices=sorted({*PLANTS, *OTHER_PLANTS}), help="put this defect in")
    parser.add_argument("--jobs", type=int, default=min(4, os.cpu_count() or 1), help="processes beside each other")
    parser.add_argument("--trace", action="store_true", help="with --seed: print all that happens")
    parser.add_argument("--stop-at", type=int, default=1, help="stop after so many violations")
    parser.add_argument("--lines", type=int, default=LAST_LINES, help="how much of the history of a violation to print")
    parser.add_argument("--shrink", type=int, default=SHRINK_TRIES, help="tries to make a violation smaller")
    parser.add_argument("--without", action="append", default=[], choices=NAMES, help="leave this out (repeatable)")
    parser.add_argument(
        "--with",
        action="append",
        default=[],
        dest="including",
        choices=NAMES,
        help="take this in, which is left out because it is known to fail (repeatable)",
    )
    options = parser.parse_args(arguments)
    if options.world != "cluster":
        seeds = range(options.first, options.first + options.seeds) if options.seed is None else [options.seed]
        return simulate_world(options.world, seeds, options.plant)
    if options.plant in OTHER_PLANTS:
        parser.error(f"{options.plant} is of another world: give --world")
    without = left_out(options.plant, without=options.without, including=options.including)
    if options.seed is not None:
        report = Report()
        report.add(replay(options.seed, options.plant, without, trace=options.trace))
    else:
        seeds = range(options.first, options.first + options.seeds)
        report = simulate(seeds, plant=options.plant, without=without, jobs=options.jobs, stop_at=options.stop_at)
    for outcome in report.failed[1:]:
        say(f"seed {outcome.plan.seed} violates too: {outcome.violation}")
    if report.failed:
        explain(report.failed[0], options.plant, options.shrink, options.lines)
    for transition in report.unvisited:
        say(f"no seed visits {transition[0]} --{transition[1]}--> {transition[2]}")
    say(f"faults: {dict(sorted(report.faults.items()))}")
    print(report.line(), flush=True)
    return 1 if report.failed else 0
