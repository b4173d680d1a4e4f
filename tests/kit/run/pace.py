"""Measures the pace of the machine: how long a fixed piece of work takes, again and again during a run."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import threading
import time

from kit.run.budget import Sample

EVERY_S = 5.0
HASHED = bytes(4_000_000)
DOCUMENT = json.dumps([{"id": number, "text": f"word {number}", "done": False} for number in range(5_000)])


def work() -> None:
    """What tests do too: hash, decode and encode, start a process."""
    hashlib.sha256(HASHED).digest()
    json.dumps(json.loads(DOCUMENT))
    subprocess.run([sys.executable, "-S", "-c", ""], check=True)


def sample() -> Sample:
    at, began = time.time(), time.perf_counter()
    work()
    return Sample(at=at, work_ms=1000 * (time.perf_counter() - began))


class PaceMeter:
    """Takes samples on a thread of its own, at the start, every few seconds and at the end."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._measure, name="pace", daemon=True)

    def __enter__(self) -> PaceMeter:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        self._thread.join()

    def _measure(self) -> None:
        while not self._ended.wait(EVERY_S if self.samples else 0):
            self.samples.append(sample())
        self.samples.append(sample())
