"""The results of a run: collected from pytest's reports, and judged."""

from __future__ import annotations

import re
import shlex
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kit.run.budget import PaceMeter, Times

MOST_REPEATS = 2
MOST_FILES_REPEATED = 10
"""With failures in more files the build is broken, and a repeat would tell nothing."""
PLAIN = re.compile(r"[\w./:\[\],=+@%-]+")
PHASES = ("setup", "call", "teardown")

Report = pytest.TestReport | pytest.CollectReport


def message(report: Report) -> str:
    """The first line of the assertion that failed, with its place; else the last line of the failure."""
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is not None:
        return f"{Path(crash.path).name}:{crash.lineno}: {next(iter(crash.message.splitlines()), '')}"
    return (report.longreprtext.strip().splitlines() or ["no message"])[-1]


@dataclass(kw_only=True)
class Results:
    """A plugin of pytest: the reports of one stage."""

    name: str
    pace: PaceMeter
    status: int = 0
    died: list[str] = field(default_factory=list)
    reports: dict[str, list[Report]] = field(default_factory=lambda: defaultdict(list))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        report.pace_ms = self.pace.ms  # pyright: ignore[reportAttributeAccessIssue]
        self.reports[report.nodeid].append(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.reports[report.nodeid].append(report)

    def pytest_testnodedown(self, node: object, error: object) -> None:
        """A process that dies behind its last test fails no test."""
        if error:
            self.died.append(f"{self.name}: a process died: {error}")

    def failures(self) -> dict[str, Report]:
        """The first failed phase of each test."""
        return {nodeid: failed[0] for nodeid, all_ in self.reports.items() if (failed := [r for r in all_ if r.failed])}

    def to_repeat(self) -> dict[str, Report]:
        """A process that died and a file that cannot be read have reports of another phase: nothing excuses them."""
        failures = self.failures().items()
        return {nodeid: report for nodeid, report in failures if getattr(report, "when", "") in PHASES}

    def problem(self) -> list[str]:
        """Why the stage failed, if its failed tests do not explain it."""
        if self.status == pytest.ExitCode.OK or (self.status == pytest.ExitCode.TESTS_FAILED and self.failures()):
            return self.died
        none = " (no test ran)" if self.status == pytest.ExitCode.NO_TESTS_COLLECTED else ""
        return [f"{self.name} ended with exit status {int(self.status)}{none}"]


def passed(reports: Iterable[Report], *, may_skip: bool = False) -> bool:
    """Whether tests have run, and none failed or, unless that is allowed, was skipped."""
    outcomes = {(getattr(report, "when", ""), report.outcome) for report in reports}
    fine = {"passed", "skipped"} if may_skip else {"passed"}
    return ("call", "passed") in outcomes and {outcome for _, outcome in outcomes} <= fine


def nodeids_to_repeat(stages: Sequence[Results]) -> list[str]:
    """None if too many files failed."""
    found = [nodeid for stage in stages for nodeid in stage.to_repeat()]
    return found if len({nodeid.partition("::")[0] for nodeid in found}) <= MOST_FILES_REPEATED else []


class Verdict:
    """What the stages and the repeat of their failed tests come to."""

    def __init__(self, stages: Sequence[Results], repeat: Results | None = None) -> None:
        second = repeat.failures() if repeat else {}
        self.problems = [line for one in (*stages, *([repeat] if repeat else [])) for line in one.problem()]
        self.failed: dict[str, list[Report]] = {}
        self.repeated: dict[str, list[Report]] = {}
        for stage in stages:
            excusable = stage.to_repeat()
            for nodeid, report in stage.failures().items():
                if repeat and nodeid in excusable and passed(repeat.reports[nodeid]):
                    self.repeated[nodeid] = [report]
                else:
                    self.failed[nodeid] = [report, *([second[nodeid]] if nodeid in second else [])]
        # A fixture that several tests share fails all of them with one message.
        causes = {message(one) if one.when == "setup" else name for name, (one,) in self.repeated.items()}
        if len(causes) > MOST_REPEATS:
            self.problems.append(f"{len(causes)} failures passed when repeated: at most {MOST_REPEATS} are allowed")

    @property
    def red(self) -> bool:
        return bool(self.failed or self.problems)

    def page(self) -> Iterator[str]:
        """Each failed test with its messages, logs and the command that runs it again; then all other problems."""
        titles = {"failed": self.failed, "repeated: failed once, then passed by itself": self.repeated}
        for title, failures in titles.items():
            if failures:
                yield f"{title}:"
            for nodeid, reports in failures.items():
                yield f"  {nodeid}"
                for report in reports:
                    yield f"      {message(report)}"
                    if logs := getattr(report, "logs", ""):
                        yield f"      logs:  {logs}/"
                yield f"      again: {command_for(nodeid)}"
        yield from self.problems
        yield "the run FAILED" if self.red else "the run passed"


def command_for(nodeid: str) -> str:
    """The command that runs one test again, for a shell: make expands `$`, and passes ARGS to another shell."""
    if PLAIN.fullmatch(nodeid):
        return f'make test ARGS="{nodeid}"'
    return f"make test ARGS={shlex.quote(shlex.quote(nodeid).replace('$', '$$'))}"


def times_of(stages: Sequence[Results]) -> Times:
    """The times of tests that did not fail."""
    times = Times()
    for stage in stages:
        failed = stage.failures()
        for nodeid, reports in stage.reports.items():
            for report in reports if nodeid not in failed else ():
                times.add(nodeid.partition("::")[0], report.duration, report.pace_ms)
    return times
