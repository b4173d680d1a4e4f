"""Runs the tests in stages, repeats failed tests once, and prints a last page: `make test`."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from kit.examples import ALL_VARIABLE
from kit.run.budget import BUDGET, PaceMeter, exceeded, read_budget, table, write_budget
from kit.run.contracts import LOCK, Contract, digests, load_contracts, read_lock, record
from kit.run.results import Report, Results, Verdict, nodeids_to_repeat, passed, times_of

INTERRUPTED = 130
LOGS = Path(".test-logs")
WITHOUT_SERVICES = ("tests/unit", "tests/property")
BY_FILE = ("--dist", "loadfile", "--no-loadscope-reorder")


def say(*lines: str) -> None:
    print(*(f"[run] {line}" for line in lines), sep="\n", flush=True)


class Runner:
    """Runs pytest once for each stage. All tests run in processes of xdist, which names and replaces one that dies."""

    def __init__(self) -> None:
        self._pace = PaceMeter()
        self._interrupted = False
        # SIGINT too: a shell that started this in the background lets it be ignored.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._interrupt)

    def _interrupt(self, number: int, frame: object) -> None:
        """A terminal signals pytest's processes too. What these start ends with them (`penstock.cli.children`)."""
        self._interrupted = True
        for process in psutil.Process().children() if number == signal.SIGTERM else ():
            process.send_signal(signal.SIGINT)
        raise KeyboardInterrupt

    def stage(self, name: str, *arguments: str) -> Results:
        say(f"stage: {name}")
        results = Results(name=name, pace=self._pace)
        results.status = pytest.main([*BY_FILE, *arguments], plugins=[results])
        if self._interrupted:
            raise KeyboardInterrupt
        return results

    def prepare_models(self) -> Results:
        say("stage: preparing models")
        status = subprocess.run([sys.executable, "tests/prepare_models.py"], check=False).returncode
        return Results(name="preparing models", pace=self._pace, status=status)


def run_stages(runner: Runner, processes: str, excused: Iterable[str], *, everything: bool) -> list[Results]:
    """All tests but those at the paths `excused` and, unless `everything` runs, those that are marked `thorough`.

    Unit tests use all cores. Integration tests mostly wait: more processes than cores run, each with its own broker.
    Tests that compare times or memory run alone.
    """
    quick = "" if everything else "not thorough"
    also = f" and {quick}" if quick else ""
    left_out = (*WITHOUT_SERVICES, *excused)
    ignored = [f"--ignore={path}" for path in left_out]
    stages = [
        runner.prepare_models(),
        runner.stage("unit", "-n", "auto", "--maxprocesses", "8", "-m", quick, *WITHOUT_SERVICES),
        runner.stage("integration", "-n", processes, "-m", f"not alone{also}", *ignored, "tests"),
    ]
    if files := files_alone(left_out):
        stages.append(runner.stage("alone", "-n", "1", "-m", f"alone{also}", *files))
    return stages


def files_alone(left_out: Iterable[str]) -> list[str]:
    """The files with tests marked `alone`: to collect every file takes longer than they take."""
    files = [path for path in sorted(Path("tests").rglob("test_*.py")) if "mark.alone" in path.read_text()]
    return [str(path) for path in files if not any(path.is_relative_to(out) for out in left_out)]


def repeat(runner: Runner, stages: Sequence[Results]) -> Results | None:
    os.environ["PENSTOCK_TEST_REPEAT"] = ".repeat"
    nodeids = nodeids_to_repeat(stages)
    return runner.stage("repeat of failed tests", "-n", "1", *nodeids) if nodeids else None


def of_contract(contract: Contract, stages: Sequence[Results]) -> Iterator[Report]:
    for stage in stages:
        for nodeid in filter(contract.has, stage.reports):
            yield from stage.reports[nodeid]


def over_budget(stages: Sequence[Results], *, write: bool, green: bool) -> list[str]:
    """Why the run exceeds its budget. `write`: record this run's times as the budget instead."""
    path = Path(BUDGET)
    times, recorded = times_of(stages), read_budget(path)
    say("where the time went, over all processes", *table(times, recorded))
    if write and green:
        write_budget(path, times)
    if write:
        say(f"{BUDGET} is {'written' if green else 'not written: the run failed'}")
        return []
    lines = exceeded(times, recorded) if recorded.folders else []
    if os.environ.get("PENSTOCK_TEST_BUDGET") == "report":
        say(*lines)
        return []
    return lines


def run(options: argparse.Namespace, runner: Runner) -> int:
    root = Path.cwd()
    now, locked = digests(root), read_lock(root)
    contracts = load_contracts(root)
    changed = [one for one in contracts if options.all or now[one.name] not in locked[one.name]]
    excused = [path for one in contracts if one not in changed for path in one.tests]
    say(f"contracts that run: {', '.join(one.name for one in changed) or 'none'}; the others are unchanged")
    stages = run_stages(runner, options.processes, excused, everything=options.all)
    verdict = Verdict(stages, repeat(runner, stages))
    complete = [] if any(stage.problem() for stage in stages) else changed
    may_skip = "PENSTOCK_CI" in os.environ  # there a missing tool fails its tests
    if green := {one.name: now[one.name] for one in complete if passed(of_contract(one, stages), may_skip=may_skip)}:
        write = options.all or options.lock
        names = ", ".join(record(root, green) if write else green)
        say(f"{LOCK} {'records' if write else 'is unchanged; `make test RUN=--lock` would record'}: {names}")
    verdict.problems += over_budget(stages, write=options.budget, green=not verdict.red)
    say(*verdict.page())
    return int(verdict.red)


def main() -> int:
    parser = argparse.ArgumentParser(prog="kit.run", description=__doc__)
    parser.add_argument("--all", action="store_true", help="run contracts that did not change too, and write the lock")
    parser.add_argument("--lock", action="store_true", help=f"record contracts that ran and passed in {LOCK}")
    parser.add_argument("--budget", action="store_true", help=f"record the times of this run in {BUDGET}")
    parser.add_argument("--processes", default="3", help="processes of the integration stage")
    options = parser.parse_args()
    shutil.rmtree(LOGS, ignore_errors=True)
    if options.all:
        os.environ[ALL_VARIABLE] = "1"
    try:
        return run(options, Runner())
    except KeyboardInterrupt:
        say("interrupted")
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
