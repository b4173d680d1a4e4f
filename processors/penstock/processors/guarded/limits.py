"""What a guarded process limits itself to, by the kernel's means."""

from __future__ import annotations

import resource
import signal

_OPEN_FILES = 32


def limit_this_process(memory_bytes: int) -> None:
    """No more address space than this, no files written, no core of what was somebody's input.

    Ctrl-C goes to the whole group of processes, and is left to the worker, which ends this one.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name, value in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, _OPEN_FILES),
    ):
        resource.setrlimit(name, (value, value))


def limit_cpu(cpu_s: int) -> None:
    """Let this process take so many seconds more of a processor, rounded up; beyond, the kernel ends it (SIGXCPU)."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    soft = int(usage.ru_utime + usage.ru_stime) + cpu_s + 1
    resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.RLIM_INFINITY))
