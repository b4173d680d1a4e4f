"""Processes of this machine: whole trees of them, and the memory that belongs to each alone."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Set
from pathlib import Path

import psutil

REST = 50
"""A process is measured again after so many times the time that measuring it took: 2 % of a core at most.

The kernel walks every page of it: tens of milliseconds for a gigabyte.
"""
INITIAL_NAMESPACE = "pid:[4026531836]"
"""PROC_PID_INIT_INO of the Linux kernel: the namespace in which drivers number processes."""


def own_bytes(pid: int) -> int | None:
    """Memory that belongs to this process alone; None when it is gone, or another user's.

    Its private pages (USS) without unchanged ones of program and libraries: these are shared as soon as another process
    has touched them too, and the same engine would take 100 MiB more when it is alone. Files with weights that are
    mapped do count. Where there is no proc file system it is what psutil calls USS.
    """
    folder = Path(f"/proc/{pid}")
    try:
        if folder.parent.joinpath("self").exists():
            return _own_bytes(folder)
        return int(psutil.Process(pid).memory_full_info().uss)
    except (OSError, psutil.NoSuchProcess, psutil.AccessDenied):
        return None


def _own_bytes(folder: Path) -> int:
    """Linux, proc(5): each mapping begins with a line of addresses and the file's name; sizes follow, one a line."""
    program = os.fsencode(folder.joinpath("exe").readlink())
    own_kib, is_program = 0, False
    with folder.joinpath("smaps").open("rb") as lines:
        for line in lines:
            if not line[:1].isupper():
                name = line.rstrip()
                is_program = name.endswith((b".so", program)) or b".so." in name
            elif line.startswith(b"Private_") and not (is_program and line.startswith(b"Private_Clean:")):
                own_kib += int(line.split()[1])
    return own_kib * 1024


def trees(roots: Iterable[int]) -> dict[int, frozenset[int]]:
    """By root: its pid and those of all its descendants, from one look at the machine's processes."""
    wanted = set(roots)
    if not wanted:
        return {}
    children: dict[int, list[int]] = {}
    for process in psutil.process_iter():
        try:
            children.setdefault(process.ppid(), []).append(process.pid)
        except psutil.Error:  # it has ended meanwhile
            continue
    return {root: frozenset(_below(root, children)) for root in wanted}


def _below(root: int, children: Mapping[int, list[int]]) -> Set[int]:
    found, left = {root}, [root]
    while left:
        new = [pid for pid in children.get(left.pop(), []) if pid not in found]
        found.update(new)
        left += new
    return found


def numbered_as_drivers_do() -> bool:
    """Whether a driver's process ids mean the same here: not in a container's pid namespace, nor on WSL2."""
    try:
        namespace = str(Path("/proc/self/ns/pid").readlink())
        return namespace == INITIAL_NAMESPACE and "microsoft" not in Path("/proc/version").read_text().lower()
    except OSError:
        return False


class OwnBytes:
    """`own_bytes` of many processes, each remembered for as long as its measuring should not cost more."""

    def __init__(
        self, measure: Callable[[int], int | None] = own_bytes, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._measure, self._clock = measure, clock
        self._known: dict[int, tuple[int, float]] = {}
        """By pid: its bytes, and when it may be measured again."""

    def of(self, pids: Set[int]) -> dict[int, int]:
        known = {pid: one for pid, one in self._known.items() if pid in pids}
        began = self._clock()
        for pid in pids:
            if pid in known and began < known[pid][1]:
                continue
            before = self._clock()
            found = self._measure(pid)
            after = self._clock()
            if found is None:
                known.pop(pid, None)
            else:
                known[pid] = (found, after + REST * (after - before))
        self._known = known
        return {pid: one[0] for pid, one in known.items()}
