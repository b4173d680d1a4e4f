"""The most that a figure was meanwhile, sampled in a process of its own: a busy test process would miss peaks."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.sharedctypes import SynchronizedArray
from multiprocessing.synchronize import Event

import psutil

from penstock.processors.hardware.processes import own_bytes
from support import engine_processes
from system import eventually


@dataclass(frozen=True)
class Samples:
    _shared: SynchronizedArray[int]

    @property
    def most(self) -> int:
        return self._shared[0]

    @property
    def taken(self) -> int:
        return self._shared[1]


def held_bytes(pid: int) -> int:
    """What a process holds of its own."""
    return own_bytes(pid) or 0


def held_by_engines(worker: int) -> int:
    """What the own pages of all of a worker's engines are together, by the kernel."""
    total = 0
    for engine in engine_processes(worker):
        with suppress(psutil.Error):
            total += engine.memory_full_info().uss
    return total


def _sample(of: Callable[[int], int], pid: int, stop: Event, shared: SynchronizedArray[int], every_s: float) -> None:
    while not stop.is_set():
        figure = of(pid)
        with shared.get_lock():
            shared[0], shared[1] = max(shared[0], figure), shared[1] + 1
        stop.wait(every_s)


@contextmanager
def sampled(of: Callable[[int], int], pid: int, every_s: float) -> Iterator[Samples]:
    """`of(pid)`, a function of this module (the new process finds no other), at each `every_s`."""
    context = multiprocessing.get_context("spawn")
    stop, shared = context.Event(), context.Array("q", 2)
    samples = Samples(shared)
    sampler = context.Process(target=_sample, args=(of, pid, stop, shared, every_s))
    sampler.start()
    try:
        eventually(lambda: samples.taken > 0, 30, lambda: f"nothing is sampled: exit code {sampler.exitcode}")
        yield samples
    finally:
        stop.set()
        sampler.join(20)
