"""The faults of the soak: workers that are killed, stopped and held still, and outages of their store."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Literal, get_args

from store_outages import OUTAGES, BreakableStore, Outage
from system import Process, System

Fault = Literal["kill", "term", "still"]
FAULTS: tuple[Fault, ...] = (*get_args(Fault), "kill")
"""Kills twice as often as the others."""
LENGTHS_S = (15.0, 40.0, 130.0)
"""Of outages: each kind once with the first length, then with the second one, and so on.

In 130 s a client of S3 has given up its own tries."""
GAP_S = 8.0, 25.0
UNNOTICED_S = 60.0
"""So much longer an outage lasts that has struck nothing yet: workers start slowly on a busy machine."""
STOP_S = 60.0
"""So long a worker may take to stop in order, as in the compose file."""
_SHOWN = 5
"""Lines of a log."""


@dataclass
class Fleet:
    """Workers that are started again at once, under their own names and with their data folders."""

    whole: System
    store: BreakableStore
    workers: dict[str, Process] = field(default_factory=dict[str, Process])
    exits: Counter[str] = field(default_factory=Counter[str])
    """By their cause and exit code."""
    unexpected: list[str] = field(default_factory=list[str])
    """Ends that the soak did not cause, and stops that did not end with 0."""
    _may_end: threading.Lock = field(default_factory=threading.Lock)
    _log_bytes: dict[str, int] = field(default_factory=dict[str, int])
    """Of each worker's log, when its present life began."""

    def start(self, name: str) -> Process:
        log = self.whole.folder / f"{name}.log"
        self._log_bytes[name] = log.stat().st_size if log.exists() else 0
        self.workers[name] = self.whole.worker(name, env=self.store.env)
        return self.workers[name]

    def wait_up(self, name: str, deadline_s: float = 90.0) -> None:
        """Until this worker takes part, or has ended by itself. A slow start is no fault: it may take all this time."""
        give_up = time.monotonic() + deadline_s
        while time.monotonic() < give_up:
            self.look()
            with suppress(AssertionError):  # it has just ended
                if self.workers[name].ready():
                    return
            time.sleep(0.2)

    def disturb(self, name: str, fault: Fault, still_s: float) -> None:
        self.look()
        worker = self.workers[name]
        if fault == "still":
            os.kill(worker.popen.pid, signal.SIGSTOP)
            time.sleep(still_s)
            os.kill(worker.popen.pid, signal.SIGCONT)
            return
        with self._may_end:
            self._end(worker, fault)
        self.start(name)

    def look(self) -> None:
        """Note those that ended by themselves, and start them again."""
        for name, worker in self.workers.items():
            if not worker.alive():
                self._note(worker, "by itself", None)
                self.start(name)

    def stop(self) -> None:
        """Stop all in order."""
        self.look()
        for worker in self.workers.values():
            self._end(worker, "term")

    @contextmanager
    def none_ends(self) -> Iterator[None]:
        """No worker is killed or stopped within the block."""
        with self._may_end:
            yield

    def _end(self, worker: Process, fault: Fault) -> None:
        if fault == "kill":
            worker.kill9()
            self._note(worker, fault, -signal.SIGKILL)
            return
        silent = worker.log.stat().st_size == self._log_bytes[worker.name]
        worker.popen.send_signal(signal.SIGTERM)
        try:
            worker.popen.wait(STOP_S)
        except subprocess.TimeoutExpired:
            dump = subprocess.run(["py-spy", "dump", "-p", str(worker.popen.pid)], capture_output=True, text=True)
            self.unexpected.append(f"{worker.name} did not end on SIGTERM within {STOP_S:.0f} s:\n{dump.stdout}")
            worker.kill9()
        else:  # before its first line it has no handler yet
            self._note(worker, fault, -signal.SIGTERM if silent and worker.popen.returncode else 0)

    def _note(self, worker: Process, cause: str, wanted: int | None) -> None:
        code = worker.popen.returncode
        self.exits[f"{cause}: {code}"] += 1
        if code != wanted:
            self.unexpected.append(f"{worker.name} ended ({cause}) with {code}:\n{worker.tail(_SHOWN)}")
            print(self.unexpected[-1], file=sys.stderr, flush=True)


class Outages(threading.Thread):
    """One outage of the store after the other, with gaps, until the time is over. `end` heals and joins."""

    def __init__(self, fleet: Fleet, seconds: float, chance: random.Random) -> None:
        super().__init__(daemon=True)
        self.struck: dict[Outage, list[int]] = {outage: [] for outage in OUTAGES}
        """By kind, of each outage: how many calls of the store it struck."""
        self._fleet, self._store, self._chance = fleet, fleet.store, chance
        self._give_up = time.monotonic() + seconds
        self._over = threading.Event()
        self._error: BaseException | None = None
        self.start()

    def end(self) -> None:
        """Raises what ended the thread before its time."""
        self._over.set()
        self.join(60)
        if self._error is not None:
            raise self._error

    def without_effect(self) -> list[str]:
        """Kinds of outages that struck nothing: they prove nothing."""
        return [outage for outage, struck in self.struck.items() if not struck or 0 in struck]

    def run(self) -> None:
        try:
            for outage, length_s in self._planned():
                if self._over.wait(self._chance.uniform(*GAP_S)) or time.monotonic() + length_s > self._give_up:
                    return
                self._break_store(outage, length_s)
        except BaseException as error:
            self._error = error

    def _planned(self) -> Iterator[tuple[Outage, float]]:
        while True:
            for length_s in LENGTHS_S:
                for outage in self._chance.sample(OUTAGES, len(OUTAGES)):
                    yield outage, length_s

    def _break_store(self, outage: Outage, length_s: float) -> None:
        if outage == "hangs" and self._store.blocks_exit:
            with self._fleet.none_ends():
                self._break_and_heal(outage, length_s)
        else:
            self._break_and_heal(outage, length_s)

    def _break_and_heal(self, outage: Outage, length_s: float) -> None:
        before = self._count(outage)
        self._store.begin(outage)
        try:
            print(f"the store {outage} for {length_s:.0f} s", file=sys.stderr, flush=True)
            longest_s = time.monotonic() + length_s + UNNOTICED_S
            self._over.wait(length_s)
            while not self._count(outage) - before and time.monotonic() < longest_s:
                self._over.wait(0.2)
            self.struck[outage].append(self._count(outage) - before)
        finally:
            self._store.heal()

    def _count(self, outage: Outage) -> int:
        return self._store.struck(outage, list(self._fleet.workers.values()))
