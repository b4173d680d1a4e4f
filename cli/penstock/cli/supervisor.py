"""Keeps a few child processes alive: started in order, restarted with backoff, stopped in the reverse order.

`Backoff` decides (pure, time passed in); `Supervisor` is the thin loop around processes.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from penstock.cli import children
from penstock.cli.failures import CliFailure, ExitCode
from penstock.cli.paths import Progress
from penstock.cli.readiness import Readiness, not_running

POLL_S = 0.1
LOGS_S = 10.0
"""Between looks at the size of logs."""
USAGE_EXIT = 2
START_TRIES = 3
"""A part that ends more often than this ends the start of the whole."""


@dataclass(kw_only=True, slots=True)
class Backoff:
    """Exponential delays between restarts; a part that lived for `steady_s` begins anew."""

    first_s: float = 0.5
    limit_s: float = 30.0
    steady_s: float = 60.0
    failures: int = 0

    def ended(self, lived_s: float) -> float:
        """Note an end after `lived_s` of life; returns the seconds to wait before the next start."""
        if lived_s >= self.steady_s:
            self.failures = 0
        self.failures += 1
        return min(self.limit_s, self.first_s * 2.0 ** (self.failures - 1))


@dataclass(kw_only=True, slots=True)
class Part:
    """One supervised process."""

    name: str
    launch: Callable[[], subprocess.Popen[bytes]]
    log: Path
    look: Callable[[int], Readiness]
    """Returns the readiness of the process with this pid."""
    grace_s: float
    """How long it may take to stop after SIGTERM before it is killed."""
    process: subprocess.Popen[bytes] | None = None
    started_at: float = 0.0
    due_at: float | None = None
    """When to start it again; None while it runs."""
    restarts: int = 0
    cause: str | None = None
    """Why it last ended, or could not be started."""
    log_start: int = 0
    """Where its log begins to be that of this process."""
    backoff: Backoff = field(default_factory=Backoff)

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def readiness(self) -> Readiness:
        return not_running(self.cause) if self.process is None or not self.running else self.look(self.process.pid)

    def last_words(self) -> str:
        return children.last_words(self.log, self.log_start)


def command_part(
    name: str,
    argv: Sequence[str],
    *,
    log: Path,
    look: Callable[[int], Readiness],
    grace_s: float,
    env: Callable[[], Mapping[str, str]],
) -> Part:
    """A part that is a plain command; `env` is asked for at each start."""
    return Part(name=name, launch=lambda: children.spawn(argv, log=log, env=env()), log=log, look=look, grace_s=grace_s)


class Supervisor:
    """Starts parts, watches them, stops them in the reverse order of their start."""

    def __init__(self, progress: Progress, changed: Callable[[], None] = lambda: None) -> None:
        self.parts: list[Part] = []
        # A plain flag: a signal handler may set it, where an Event could deadlock on its own lock.
        self.stopping = False
        self._progress = progress
        self._changed = changed
        self._logs_due = 0.0
        self._untold = False
        """Whether something has changed that `changed` could not be told of, for want of a disk."""

    def start(self, part: Part) -> None:
        """Start a part and take it into care. Raises what its launch raises."""
        self.parts.append(part)
        self._launch(part)

    def tell(self) -> None:
        """Something has changed. A full disk, where that is written down, is no reason to end anything."""
        try:
            self._changed()
        except OSError as error:
            if not self._untold:
                self._progress(f"what runs cannot be written down ({error.strerror}): trying again")
            self._untold = True
        else:
            self._untold = False

    def wait_ready(self, part: Part, deadline_s: float) -> None:
        """Return when the part is ready, restarting it (and all others) meanwhile as needed.

        Raises CliFailure when it is not ready in time, and as `tend_start`.
        """
        give_up = time.monotonic() + deadline_s
        next_try = 0.0
        while not self.stopping:
            self.tend_start()
            if part.running and time.monotonic() >= next_try:
                if part.readiness().serves:
                    return
                next_try = time.monotonic() + 0.2
            if time.monotonic() > give_up:
                said = part.readiness().text()
                raise CliFailure(
                    f"the {part.name} was not ready within {deadline_s:.0f} s: {said} (log: {part.log})",
                    exit_code=ExitCode.TIMED_OUT,
                )
            time.sleep(POLL_S)

    def run(self) -> None:
        """Keep all parts alive until `stopping` is set."""
        while not self.stopping:
            self.tend()
            time.sleep(POLL_S)

    def tend_start(self) -> None:
        """`tend`, while the whole starts. Raises CliFailure for a part that refuses its settings or keeps ending."""
        self.tend()
        for part in self.parts:
            if part.running:
                continue
            if part.process is not None and part.process.returncode == USAGE_EXIT:
                raise CliFailure(part.last_words(), exit_code=ExitCode.USAGE)
            if part.backoff.failures > START_TRIES:
                raise CliFailure(f"the {part.name} keeps ending while it starts: {part.cause} (log: {part.log})")

    def tend(self) -> None:
        """Look at each part once: note ends, start again what is due."""
        now = time.monotonic()
        if self._untold:
            self.tell()
        if now >= self._logs_due:
            self._logs_due = now + LOGS_S
            for part in self.parts:
                with suppress(OSError):  # a full disk
                    children.shorten_log(part.log)
        for part in self.parts:
            if part.running:
                continue
            if part.due_at is None:
                self._ended(part, now)
            elif now >= part.due_at:
                self._start_again(part, now)

    def _ended(self, part: Part, now: float) -> None:
        assert part.process is not None
        children.kill_group(part.process)
        delay_s = part.backoff.ended(now - part.started_at)
        part.due_at = now + delay_s
        code = part.process.returncode
        # Who was killed had no time for last words.
        part.cause = f"signal {-code}" if code < 0 else f"exit code {code}: {part.last_words()}"
        self._progress(f"the {part.name} ended ({part.cause}); starting it again in {delay_s:g} s (log: {part.log})")
        self.tell()

    def _start_again(self, part: Part, now: float) -> None:
        part.restarts += 1
        try:
            self._launch(part)
        except (CliFailure, OSError) as failure:
            # Its port may be held for a moment more, or its disk be full: that is no reason to end the others.
            delay_s = part.backoff.ended(0.0)
            part.due_at, part.cause = now + delay_s, str(failure)
            self._progress(f"the {part.name} cannot start: {failure}; trying again in {delay_s:g} s")
            self.tell()
            return
        self._progress(f"the {part.name} is started again (restart {part.restarts})")

    def _launch(self, part: Part) -> None:
        part.log_start = children.size(part.log)
        part.process = part.launch()
        part.started_at = time.monotonic()
        part.due_at = None
        self.tell()

    def stop(self) -> None:
        """Stop all parts, the last started first, each within its grace; nothing of them is left afterwards."""
        for part in reversed(self.parts):
            if part.process is None:
                continue
            was_running = part.running
            if was_running:
                self._progress(f"stopping the {part.name}")
            code = children.stop(part.process, grace_s=part.grace_s)
            if was_running and code < 0 and code != -15:
                self._progress(f"the {part.name} did not stop within {part.grace_s:.0f} s and was killed")
            part.process = None
            self.tell()

    def kill(self) -> None:
        """End all parts at once."""
        for part in reversed(self.parts):
            if part.process is not None:
                children.kill_group(part.process)
                part.process = None
