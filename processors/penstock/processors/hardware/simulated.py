"""Devices that are not there: a fleet of any size, with foreign use that changes, for tests and to try placements."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path

from penstock.processors.hardware.entries import DeviceSection
from penstock.processors.hardware.probe import DeviceFacts, Reading, Unread

KIND = "simulated"


class SimulatedProbe:
    """What others use follows the steps of an entry, or a file that is read each time. Engines run on the CPU."""

    def __init__(self, entries: Sequence[DeviceSection], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._entries = [entry for entry in entries if entry.kind == KIND and entry.enabled]
        self._clock = clock
        self._began = clock()

    def devices(self) -> list[DeviceFacts]:
        return [
            DeviceFacts(device=entry.name or "", kind=KIND, total_bytes=entry.total_bytes or 0, title="simulated")
            for entry in self._entries
        ]

    def read(self, pids: Set[int]) -> Mapping[str, Reading | Unread]:
        passed_s = self._clock() - self._began
        return {entry.name or "": _read(entry, passed_s) for entry in self._entries}


def _read(entry: DeviceSection, passed_s: float) -> Reading | Unread:
    if entry.foreign_file is not None:
        return _from_file(entry.foreign_file)
    return Reading(used_bytes=next((step.bytes for step in reversed(entry.foreign) if step.after_s <= passed_s), 0))


def _from_file(path: Path) -> Reading | Unread:
    try:
        text = path.read_text().strip()
    except OSError as error:
        return Unread(f"{path} cannot be read: {error.strerror}")
    if not (text.isascii() and text.isdigit()):
        return Unread(f"{path} holds no number of bytes")
    return Reading(used_bytes=int(text))
