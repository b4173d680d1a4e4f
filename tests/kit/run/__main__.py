"""Runs the tests in stages, repeats failed integration tests once, and prints a last page: `make test`."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from kit.examples import ALL_VARIABLE
from kit.run.budget import BUDGET, Times, TimeTable, exceeded, format_budget, measured, parse_budget
from kit.run.contracts import LOCK, Decision, decide, load_contracts, record
from kit.run.logs import FOLDER, REPEAT_VARIABLE
from kit.run.pace import PaceMeter
from kit.run.page import contract_lines, last_page
from kit.run.results import (
    REPORT_VARIABLE,
    RunResult,
    StageResult,
    read_phases,
    repeat_files,
    wholly_passed,
)

BUDGET_VARIABLE = "PENSTOCK_TEST_BUDGET"
TEARDOWN_LIMIT_S = 20.0
"""After an interrupt pytest may end its fixtures for this long; then all processes are killed."""
INTERRUPTED = 130
WITHOUT_SERVICES = ("tests/unit", "tests/property")


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One process of the run; `repeatable`: its failed tests run again."""

    name: str
    arguments: Sequence[str]
    repeatable: bool = False

    @property
    def command(self) -> list[str]:
        return [sys.executable, *self.arguments]


def stages(processes: str, excused: Iterable[str], *, everything: bool) -> list[Stage]:
    """All stages but the tests at the paths `excused` and, unless `everything` runs, those that are marked `thorough`.

    Unit tests use all cores. Integration tests mostly wait: more processes than cores run, each with its own broker.
    Tests that compare times or memory run alone.
    """
    pytest = ("-m", "pytest")
    by_file = ("--dist", "loadfile", "--no-loadscope-reorder")
    quick = "" if everything else " and not thorough"
    units = ("-n", "auto", "--maxprocesses", "8", *by_file, *(() if everything else ("-m", "not thorough")))
    excused = list(excused)
    ignored = [f"--ignore={path}" for path in (*WITHOUT_SERVICES, *excused)]
    integration = ("-n", processes, *by_file, "-m", f"not alone{quick}", "--durations=25", *ignored, "tests")
    return [
        Stage(name="unit", arguments=(*pytest, *units, *WITHOUT_SERVICES)),
        Stage(name="preparing models", arguments=("tests/prepare_models.py",)),
        Stage(name="integration", arguments=(*pytest, *integration), repeatable=True),
        Stage(
            name="alone", arguments=(*pytest, "-m", f"alone{quick}", *ignored, *files_alone(excused)), repeatable=True
        ),
    ]


def files_alone(excused: Iterable[str]) -> list[str]:
    """The files with tests marked `alone`, or all: reading every file takes longer than the start of their broker."""
    left_out = (*WITHOUT_SERVICES, *excused)
    files = [path for path in sorted(Path("tests").rglob("test_*.py")) if "mark.alone" in path.read_text()]
    return [str(path) for path in files if not any(path.is_relative_to(out) for out in left_out)] or ["tests"]


def repeat_stage(nodeids: Sequence[str]) -> Stage:
    return Stage(name=f"repeating {', '.join(nodeids)}", arguments=("-m", "pytest", *nodeids))


def run_stage(stage: Stage, reports: Path, **environment: str) -> StageResult:
    say(f"stage: {stage.name}")
    report = reports / f"{len(list(reports.iterdir()))}.jsonl"
    report.touch()
    environment = {**os.environ, REPORT_VARIABLE: str(report), **environment}
    # A process group of its own: an interrupt of the terminal reaches it once, from here.
    with subprocess.Popen(stage.command, env=environment, stdin=subprocess.DEVNULL, process_group=0) as process:
        try:
            status = process.wait()
        except KeyboardInterrupt:
            interrupt(process)
            raise
    return StageResult(name=stage.name, status=status, phases=read_phases(report), repeatable=stage.repeatable)


def interrupt(process: subprocess.Popen[bytes]) -> None:
    """Let pytest end its fixtures for a while, then kill every process that it started."""
    with suppress(psutil.NoSuchProcess):
        started = psutil.Process(process.pid).children(recursive=True)
        with suppress(KeyboardInterrupt, subprocess.TimeoutExpired):
            os.killpg(process.pid, signal.SIGINT)
            process.wait(TEARDOWN_LIMIT_S)
        for one in started:
            with suppress(psutil.NoSuchProcess):
                one.kill()
    process.kill()
    process.wait()


def make_interruptible() -> None:
    """SIGTERM interrupts too; and SIGINT even if a shell started this in the background, where it is ignored."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)


def say(*lines: str) -> None:
    print(*(f"[run] {line}" for line in lines), sep="\n", flush=True)


def run_tests(decisions: Sequence[Decision], processes: str, *, everything: bool) -> tuple[RunResult, Times]:
    excused = [path for one in decisions if not one.runs for path in one.contract.tests]
    with tempfile.TemporaryDirectory() as folder, PaceMeter() as meter:
        reports = Path(folder)
        planned = stages(processes, excused, everything=everything)
        result = RunResult(stages=[run_stage(stage, reports) for stage in planned])
        repeats = [
            run_stage(repeat_stage(nodeids), reports, **{REPEAT_VARIABLE: "1"})
            for nodeids in repeat_files(result.first_failures())
        ]
    return replace(result, repeats=repeats), measured(result.phases(), meter.samples)


def print_times(result: RunResult) -> None:
    table = TimeTable()
    for phase in result.phases():
        table.add(phase.nodeid, phase.when, phase.seconds)
    shared = sum(phase.shared_seconds for phase in result.phases())
    say(
        "where the time went, over all processes",
        *table.lines(),
        f"{shared:9.1f} of these in setups that sessions share",
    )


def check_budget(root: Path, times: Times, *, write: bool, green: bool) -> list[str]:
    """Why the run exceeds its budget. `write`: record this run's times as the budget instead."""
    path = root / BUDGET
    if write:
        if green:
            path.write_text(format_budget(times))
        say(f"{BUDGET} is written" if green else f"{BUDGET} is not written: the run failed")
        return []
    recorded = parse_budget(path.read_text()) if path.exists() else None
    if recorded is None or not recorded.folders:
        say(f"no budget is recorded in {BUDGET}")
        return []
    lines = exceeded(times, recorded)
    if os.environ.get(BUDGET_VARIABLE) == "report":
        say(*lines)
        return []
    return lines


def update_lock(root: Path, decisions: Sequence[Decision], result: RunResult, *, write: bool) -> None:
    """Record the contracts whose tests have all run and passed the first time."""
    if any(stage.problem for stage in result.stages):
        return  # some tests may not have run at all
    phases = list(result.phases())
    strict = "PENSTOCK_CI" in os.environ  # there a missing tool fails its tests
    ran = [
        one
        for one in decisions
        if one.runs and wholly_passed((phase for phase in phases if one.contract.has(phase.nodeid)), may_skip=strict)
    ]
    if ran and write:
        say(f"{LOCK} records: {', '.join(record(root, ran)) or 'none'}")
    elif ran:
        say(f"{LOCK} is unchanged; `make test RUN=--lock` would record: {', '.join(one.contract.name for one in ran)}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="kit.run", description=__doc__)
    parser.add_argument("--all", action="store_true", help="run contracts that did not change too, and write the lock")
    parser.add_argument("--lock", action="store_true", help=f"record contracts that ran and passed in {LOCK}")
    parser.add_argument("--budget", action="store_true", help=f"record the times of this run in {BUDGET}")
    parser.add_argument("--processes", default="3", help="processes of the integration stage")
    options = parser.parse_args(argv)
    root = Path.cwd()
    shutil.rmtree(root / FOLDER, ignore_errors=True)
    make_interruptible()
    if options.all:
        os.environ[ALL_VARIABLE] = "1"
    try:
        decisions = decide(root, load_contracts(root), everything=options.all)
        say(*contract_lines(decisions))
        result, times = run_tests(decisions, options.processes, everything=options.all)
    except KeyboardInterrupt:
        say("interrupted")
        return INTERRUPTED
    print_times(result)
    update_lock(root, decisions, result, write=options.all or options.lock)
    over = check_budget(root, times, write=options.budget, green=not result.red())
    say(*contract_lines(decisions), *last_page(result, other=over))
    return int(result.red() or bool(over))


if __name__ == "__main__":
    sys.exit(main())
