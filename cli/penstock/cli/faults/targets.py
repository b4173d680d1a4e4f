"""Processes that a row strikes, as `/proc` shows them: there it is seen whether one is gone or stopped."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

GONE, STOPPED = "gone", "T"
SEEN_S = 15.0


@dataclass(frozen=True, slots=True)
class Target:
    """One process by its id."""

    pid: int

    @property
    def state(self) -> str:
        """The letter of `/proc/PID/stat`; GONE also for a zombie that its parent has not noticed yet."""
        try:
            letter = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return GONE
        return GONE if letter in "ZX" else letter

    def has_come_to(self, state: str, within_s: float = SEEN_S) -> bool:
        give_up = time.monotonic() + within_s
        while self.state != state:
            if time.monotonic() > give_up:
                return False
            time.sleep(0.01)
        return True

    def signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def children(self) -> list[Target]:
        found: list[Target] = []
        for path in Path(f"/proc/{self.pid}/task").glob("*/children"):
            with suppress(OSError):
                found += [Target(int(pid)) for pid in path.read_text().split()]
        return found

    def engines(self) -> list[Target]:
        """Of a worker: what its fork server has made."""
        return [engine for child in self.children() for engine in child.children()]
