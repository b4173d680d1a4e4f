"""Where the time of a run goes, by folder and file, and the time that each folder is allowed.

`tests/budget.toml` records the seconds of each folder in one run, added up over all processes, and the pace of the
machine meanwhile: the milliseconds of a fixed piece of work that the runner repeats during the whole run. A folder
exceeds its budget if its seconds pass the recorded ones by a third, *after* the recorded ones were multiplied by the
factor by which the machine was slower while this folder ran. The factor is never below 1: tests that wait do not become
faster on a faster machine. Waves of stolen processor time, other load and slower machines raise the pace of the same
minutes in which they slow tests down, so they cannot make a folder fail. The price is that growth may stay unseen in a
run on a busy machine; a quiet run sees it. Growth below 1/200 of the recorded run is never an error: chance decides
which test pays for what a session shares. Failed tests do not count: they mostly wait for their deadlines.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import threading
import time
import tomllib
from collections import defaultdict, deque
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

BUDGET = "tests/budget.toml"
FOLDERS = 3
"""Folders are told apart by this many parts of their path: tests/integration/worker."""
LEAST_S = 1.0
ALLOWED_GROWTH = 4 / 3
LEAST_SHARE = 1 / 200
"""Of the recorded run: growth below it, and folders below it without a budget, are no error."""
NAMED_FILES = 5
EVERY_S = 5.0
SAMPLES = 5
"""The pace is the median of so many recent samples: one that was interrupted does not count."""
HASHED = bytes(4_000_000)
DOCUMENT = json.dumps([{"id": number, "text": f"word {number}", "done": False} for number in range(5_000)])
HEADER = """\
# The seconds of each folder's tests, added up over all processes, and the machine's pace meanwhile; and the seconds of
# its files, to name those that grew. `make test-all RUN=--budget` writes this file. The rule: tests/kit/run/budget.py.
"""


def work_ms() -> float:
    """The time of what tests do too: hash, decode and encode, start a process."""
    began = time.perf_counter()
    hashlib.sha256(HASHED).digest()
    json.dumps(json.loads(DOCUMENT))
    subprocess.run([sys.executable, "-S", "-c", ""], check=False)
    return 1000 * (time.perf_counter() - began)


class PaceMeter:
    """Measures the pace of the machine every few seconds, on a thread of its own, until it is closed."""

    def __init__(self) -> None:
        self._samples = deque([work_ms()], maxlen=SAMPLES)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._measure, name="pace", daemon=True)
        self._thread.start()

    @property
    def ms(self) -> float:
        return median(list(self._samples))

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _measure(self) -> None:
        while not self._closed.wait(EVERY_S):
            with suppress(OSError):  # no process could be started: no sample
                self._samples.append(work_ms())


@dataclass(kw_only=True)
class Spent:
    """`pace_ms` is the mean pace of the machine, each test weighted by its seconds."""

    seconds: float = 0.0
    pace_ms: float = 0.0

    def add(self, seconds: float, pace_ms: float) -> None:
        total = self.seconds + seconds
        if total:
            self.pace_ms = (self.seconds * self.pace_ms + seconds * pace_ms) / total
        self.seconds = total


@dataclass(frozen=True, kw_only=True)
class Times:
    """One run's times, by folder and by file."""

    folders: dict[str, Spent] = field(default_factory=lambda: defaultdict(Spent))
    files: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    @property
    def seconds(self) -> float:
        return sum(spent.seconds for spent in self.folders.values())

    def add(self, file: str, seconds: float, pace_ms: float) -> None:
        self.folders[folder_of(file)].add(seconds, pace_ms)
        self.files[file] += seconds


def folder_of(file: str) -> str:
    return "/".join(Path(file).parent.parts[:FOLDERS])


def table(now: Times, recorded: Times) -> list[str]:
    """The folders that took a second and more, the longest first."""
    rows = sorted(now.folders.items(), key=lambda row: -row[1].seconds)
    return [
        "  seconds   budget  folder",
        *(
            f"{spent.seconds:9.1f} {recorded.folders.get(folder, Spent()).seconds:8.1f}  {folder}"
            for folder, spent in rows
            if spent.seconds >= LEAST_S
        ),
    ]


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
    files = [(recorded.files.get(file, 0.0) * slower, seconds, file) for file, seconds in now.files.items()]
    grown = [
        (before, seconds, file) for before, seconds, file in files if folder_of(file) == folder and seconds > before
    ]
    grown.sort(key=lambda one: one[0] - one[1])
    return [f"    {before:.1f} s -> {seconds:.1f} s  {file}" for before, seconds, file in grown[:NAMED_FILES]]


def read_budget(path: Path) -> Times:
    """The recorded times; empty if none are recorded."""
    tables = tomllib.loads(path.read_text()) if path.exists() else {"folders": {}, "files": {}}
    return Times(folders={name: Spent(**spent) for name, spent in tables["folders"].items()}, files=tables["files"])


def write_budget(path: Path, times: Times) -> None:
    """Files below a second are left out."""
    lines = [HEADER, "[folders]"]
    for folder, spent in sorted(times.folders.items()):
        lines.append(f'"{folder}" = {{seconds = {spent.seconds:.1f}, pace_ms = {spent.pace_ms:.1f}}}')
    lines += ["", "[files]"]
    lines += [f'"{file}" = {seconds:.1f}' for file, seconds in sorted(times.files.items()) if seconds >= LEAST_S]
    path.write_text("\n".join(lines) + "\n")
