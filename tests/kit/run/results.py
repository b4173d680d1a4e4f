"""The results of a run: read from the reports that pytest processes write, and judged."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import pytest

REPORT_VARIABLE = "PENSTOCK_TEST_REPORT"
"""The file to which a pytest process appends one line for each phase of a test."""
MOST_REPEATS = 2
MOST_FILES_REPEATED = 10
"""With failures in more files the build is broken, and a repeat would tell nothing."""
REPEATABLE_PHASES = ("setup", "call", "???")
"""xdist reports `???` for the test that ran when its process crashed."""


@dataclass(frozen=True, kw_only=True)
class Phase:
    """One phase of one test: setup, call, teardown or collect; `???` is a crash of the process."""

    nodeid: str
    when: str
    outcome: str
    seconds: float = 0.0
    started: float = 0.0
    """Unix time."""
    shared_seconds: float = 0.0
    """The part of `seconds` that started what other tests use too."""
    message: str = ""
    fixture: str = ""
    """The fixture shared by several tests whose setup failed."""

    @property
    def file(self) -> str:
        return self.nodeid.partition("::")[0]

    @property
    def cause(self) -> str:
        """Failures with the same cause count once."""
        return self.fixture or self.nodeid


def phase_of(report: pytest.TestReport | pytest.CollectReport) -> Phase:
    return Phase(
        nodeid=report.nodeid,
        when=getattr(report, "when", None) or "collect",
        outcome=report.outcome,
        seconds=getattr(report, "duration", 0.0),
        started=getattr(report, "start", 0.0),
        shared_seconds=getattr(report, "shared_seconds", 0.0),
        message=_message(report) if report.failed else "",
        fixture=getattr(report, "shared_fixture", ""),
    )


def _message(report: pytest.TestReport | pytest.CollectReport) -> str:
    """The first line of the assertion that failed, with its place; else the last line of the failure."""
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is not None:
        return f"{Path(crash.path).name}:{crash.lineno}: {next(iter(crash.message.splitlines()), '')}"
    lines = [line for line in str(report.longrepr).splitlines() if line.strip()]
    return lines[-1].strip() if lines else ""


def write_phase(path: Path, phase: Phase) -> None:
    with path.open("a") as file:
        file.write(json.dumps(asdict(phase)) + "\n")


def read_phases(path: Path) -> list[Phase]:
    """The reports of one pytest process; none if it ended before its first test."""
    return [Phase(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


@dataclass(frozen=True, kw_only=True)
class StageResult:
    """What one pytest process (with its children) returned and reported."""

    name: str
    status: int
    phases: Sequence[Phase]
    repeatable: bool = False
    """Whether a test that failed here runs a second time, by itself."""

    @property
    def failures(self) -> list[Phase]:
        """The first failed phase of each test."""
        failed: dict[str, Phase] = {}
        for phase in self.phases:
            if phase.outcome == "failed":
                failed.setdefault(phase.nodeid, phase)
        return list(failed.values())

    def to_repeat(self) -> list[Phase]:
        return [one for one in self.failures if one.when in REPEATABLE_PHASES] if self.repeatable else []

    def lasting(self) -> list[Phase]:
        """Failures that no repeat can excuse."""
        repeated = self.to_repeat()
        return [one for one in self.failures if one not in repeated]

    @property
    def problem(self) -> str | None:
        """Why the stage failed, if its failed tests do not explain it."""
        if self.status == 0 or (self.status == 1 and self.failures):
            return None
        return f"{self.name} ended with exit status {self.status}" + (" (no test ran)" if self.status == 5 else "")


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """All stages, and the repeats of failed tests: one process for each file."""

    stages: Sequence[StageResult]
    repeats: Sequence[StageResult] = ()

    @cached_property
    def _repeated(self) -> Mapping[str, Phase | None]:
        """Each test that ran a second time and completed, with its second failure."""
        found: dict[str, Phase | None] = {}
        for repeat in self.repeats:
            passed = {phase.nodeid for phase in repeat.phases if phase.when == "call" and phase.outcome == "passed"}
            failed = {phase.nodeid: phase for phase in repeat.failures}
            found |= dict.fromkeys(passed) | failed
        return found

    def first_failures(self) -> list[Phase]:
        """Those that a repeat can excuse."""
        return [failure for stage in self.stages for failure in stage.to_repeat()]

    def repeated(self) -> list[Phase]:
        """The first failure of each test that passed the second time."""
        return [one for one in self.first_failures() if self._repeated.get(one.nodeid, one) is None]

    def failed_twice(self) -> list[tuple[Phase, Phase]]:
        return [(one, second) for one in self.first_failures() if (second := self._repeated.get(one.nodeid))]

    def failed_once(self) -> list[Phase]:
        """Failures without a second result: not repeatable, or the repeat gave none."""
        lasting = [failure for stage in self.stages for failure in stage.lasting()]
        return lasting + [one for one in self.first_failures() if one.nodeid not in self._repeated]

    def problems(self) -> list[str]:
        """Every other reason why the run fails."""
        found = [stage.problem for stage in (*self.stages, *self.repeats) if stage.problem]
        causes = {one.cause for one in self.repeated()}
        if len(causes) > MOST_REPEATS:
            found.append(f"{len(causes)} failures passed when repeated: at most {MOST_REPEATS} are allowed")
        return found

    def red(self) -> bool:
        return bool(self.failed_twice() or self.failed_once() or self.problems())

    def phases(self) -> Iterator[Phase]:
        """Those of the stages; repeats are left out."""
        for stage in self.stages:
            yield from stage.phases


def repeat_files(failures: Iterable[Phase]) -> list[list[str]]:
    """The tests to repeat, by file; none if too many files failed."""
    files: dict[str, list[str]] = defaultdict(list)
    for failure in failures:
        files[failure.file].append(failure.nodeid)
    return list(files.values()) if len(files) <= MOST_FILES_REPEATED else []


def wholly_passed(phases: Iterable[Phase], *, may_skip: bool = False) -> bool:
    """Whether tests ran, and each passed in all its phases: none failed, was skipped or failed as expected.

    `may_skip`: some may be skipped, as long ones are; not for what is missing, which fails where this is said.
    """
    phases = list(phases)
    fine = {"passed", "skipped"} if may_skip else {"passed"}
    return any(one.when == "call" for one in phases) and all(one.outcome in fine for one in phases)
