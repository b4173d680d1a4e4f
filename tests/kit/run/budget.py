"""Where the time of a run goes, by folder and file, and the time that each folder is allowed.

`tests/budget.toml` records the seconds of each folder in one run, added up over all processes, and the pace of the
machine meanwhile: the milliseconds of a fixed piece of work that the runner repeats during the whole run. A folder
exceeds its budget if its seconds pass the recorded ones by a third, *after* the recorded ones were multiplied by the
factor by which the machine was slower while this folder ran. The factor is never below 1: tests that wait do not become
faster on a faster machine. Waves of stolen processor time, other load and slower machines raise the pace of the same
minutes in which they slow tests down, so they cannot make a folder fail. The price is that growth may stay unseen in a
run on a busy machine; a quiet run sees it. Growth below 1/200 of the recorded run is never an error. Two kinds of
seconds do not count: those of failed tests, which mostly wait for their deadlines, and those that start what a whole
session shares, because chance decides which test pays for it.
"""

from __future__ import annotations

import tomllib
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from kit.run.results import Phase

BUDGET = "tests/budget.toml"
PHASES = ("setup", "call", "teardown")
FOLDERS = 3
"""Folders are told apart by this many parts of their path: tests/integration/worker."""
LEAST_S = 1.0
LONG_FILE_S = 60.0
ALLOWED_GROWTH = 4 / 3
LEAST_SHARE = 1 / 200
"""Of the recorded run: growth below it, and folders below it without a budget, are no error."""
NAMED_FILES = 5
NEIGHBOURS = 3
"""Samples of the pace before, and as many after a moment, whose median is the pace at that moment."""
HEADER = """\
# The seconds of each folder's tests, added up over all processes, and the machine's pace meanwhile; and the seconds of
# its files, to name those that grew. `make test-all RUN=--budget` writes this file. The rule: tests/kit/run/budget.py.
"""


class TimeTable:
    """Seconds, added up over all processes of the run."""

    def __init__(self) -> None:
        self._spent: dict[str, dict[str, float]] = defaultdict(lambda: dict.fromkeys(PHASES, 0.0))
        self._tests: dict[str, int] = defaultdict(int)
        self._files: dict[str, float] = defaultdict(float)

    def add(self, nodeid: str, phase: str, seconds: float) -> None:
        if phase not in PHASES:
            return
        file = nodeid.partition("::")[0]
        self._files[file] += seconds
        folder = folder_of(file)
        self._spent[folder][phase] += seconds
        self._tests[folder] += phase == "call"

    def lines(self) -> list[str]:
        """The folders that took a second and more, the longest first; none when no test ran so long."""
        rows = [(folder, self._tests[folder], spent) for folder, spent in self._spent.items() if _all(spent) >= LEAST_S]
        rows.sort(key=lambda row: -_all(row[2]))
        lines = [f"{'seconds':>9} {'setup':>8} {'call':>8} {'teardown':>8} {'tests':>6}  folder"] if rows else []
        for folder, tests, spent in rows:
            phases = " ".join(f"{spent[phase]:8.1f}" for phase in PHASES)
            lines.append(f"{_all(spent):9.1f} {phases} {tests:6}  {folder}")
        longest = sorted(self._files.items(), key=lambda one: -one[1])
        lines += [f"{seconds:9.1f} {file}" for file, seconds in longest if seconds >= LONG_FILE_S]
        return lines


def _all(spent: Mapping[str, float]) -> float:
    return sum(spent.values())


def folder_of(file: str) -> str:
    parts = file.split("/")
    return "/".join(parts[: min(FOLDERS, len(parts) - 1)])


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One execution of the fixed piece of work: when (Unix time), and how long it took."""

    at: float
    work_ms: float


@dataclass(frozen=True, kw_only=True)
class Spent:
    """`pace_ms` is the mean pace of the machine, each test weighted by its seconds."""

    seconds: float
    pace_ms: float


@dataclass(frozen=True, kw_only=True)
class Times:
    """One run's times, by folder and by file."""

    folders: Mapping[str, Spent]
    files: Mapping[str, float]

    @property
    def seconds(self) -> float:
        return sum(spent.seconds for spent in self.folders.values())


def measured(phases: Iterable[Phase], samples: Sequence[Sample]) -> Times:
    """The times of tests that passed or were skipped, and the pace while they ran."""
    phases = list(phases)
    failed = {phase.nodeid for phase in phases if phase.outcome == "failed"}
    pace = _Pace(samples)
    folders: dict[str, list[tuple[float, float]]] = defaultdict(list)
    files: dict[str, float] = defaultdict(float)
    for phase in phases:
        if phase.nodeid not in failed and phase.when in PHASES:
            own = max(0.0, phase.seconds - phase.shared_seconds)
            folders[folder_of(phase.file)].append((own, pace.at(phase.started + phase.seconds / 2)))
            files[phase.file] += own
    return Times(folders={folder: _spent(rows) for folder, rows in folders.items()}, files=files)


def _spent(rows: Sequence[tuple[float, float]]) -> Spent:
    """Of pairs of seconds and pace."""
    seconds = sum(one for one, _ in rows)
    weighted = sum(one * pace for one, pace in rows)
    return Spent(seconds=seconds, pace_ms=weighted / seconds if seconds else fmean(pace for _, pace in rows))


class _Pace:
    def __init__(self, samples: Sequence[Sample]) -> None:
        self._samples = sorted(samples, key=lambda sample: sample.at)
        self._times = [sample.at for sample in self._samples]

    def at(self, moment: float) -> float:
        """The median of the samples around a moment: one that was interrupted does not count."""
        index = bisect_left(self._times, moment)
        around = self._samples[max(0, index - NEIGHBOURS) : index + NEIGHBOURS]
        return median(sample.work_ms for sample in around)


def exceeded(now: Times, recorded: Times) -> list[str]:
    """One line for each folder that takes too long, followed by lines for the files that grew most."""
    floor = recorded.seconds * LEAST_SHARE
    lines: list[str] = []
    for folder, spent in sorted(now.folders.items()):
        budget = recorded.folders.get(folder)
        if budget is None:
            if spent.seconds > floor:
                lines.append(f"{folder} took {spent.seconds:.0f} s and has no budget")
            continue
        slower = max(1.0, spent.pace_ms / budget.pace_ms)
        expected = budget.seconds * slower
        if spent.seconds > expected * ALLOWED_GROWTH and spent.seconds - expected > floor:
            slow = f" x {slower:.2f} (slower machine)" if slower > 1 else ""
            lines.append(f"{folder} took {spent.seconds:.0f} s; its budget is {budget.seconds:.0f} s{slow}")
            lines += _grown_files(folder, now, recorded, slower)
    return lines


def _grown_files(folder: str, now: Times, recorded: Times, slower: float) -> list[str]:
    grown = [
        (seconds - recorded.files.get(file, 0.0) * slower, seconds, file)
        for file, seconds in now.files.items()
        if folder_of(file) == folder
    ]
    return [
        f"    {recorded.files.get(file, 0.0) * slower:.1f} s -> {seconds:.1f} s  {file}"
        for growth, seconds, file in sorted(grown, reverse=True)[:NAMED_FILES]
        if growth > 0
    ]


def parse_budget(text: str) -> Times:
    tables: Mapping[str, Mapping[str, Any]] = tomllib.loads(text)
    return Times(
        folders={folder: Spent(**spent) for folder, spent in tables["folders"].items()}, files=tables.get("files", {})
    )


def format_budget(times: Times) -> str:
    """Files below a second are left out."""
    lines = [HEADER, "[folders]"]
    for folder, spent in sorted(times.folders.items()):
        lines.append(f'"{folder}" = {{seconds = {spent.seconds:.1f}, pace_ms = {spent.pace_ms:.1f}}}')
    lines += ["", "[files]"]
    lines += [f'"{file}" = {seconds:.1f}' for file, seconds in sorted(times.files.items()) if seconds >= LEAST_S]
    return "\n".join(lines) + "\n"
