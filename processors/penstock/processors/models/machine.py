"""The devices of this worker: what the configuration makes of those that are there, and how they are measured."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

from penstock.common.threads import DaemonThreads
from penstock.processors.core.fleet.ledger import DeviceCapacity
from penstock.processors.hardware import shares
from penstock.processors.hardware.cpu import CpuProbe
from penstock.processors.hardware.entries import DeviceSection
from penstock.processors.hardware.nvml import NvmlProbe
from penstock.processors.hardware.probe import DeviceFacts, Probe, Reading, Unread
from penstock.processors.hardware.processes import trees
from penstock.processors.hardware.shares import EngineUse, Key, Shares
from penstock.processors.hardware.simulated import KIND as SIMULATED
from penstock.processors.hardware.simulated import SimulatedProbe

logger = logging.getLogger(__name__)

READ_S = 5.0
"""A driver that does not answer for so long is not waited for: its devices count as not measured."""

Readings = Mapping[str, Reading | Unread]


class UnknownDevice(LookupError):
    """The configuration names a device that is not there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Resident:
    """An engine on a device, as the flow and the manager know it. `pid` is the root of its tree of processes."""

    key: Key
    device: str
    granted_bytes: int
    loading: bool = False
    pid: int | None = None
    reported_bytes: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """What was measured. `observed`: by device, (used, by our engines), as the ledger takes it: use that is not in the
    way of what Penstock may have is left out. `measured`: bytes by engine and device. `unread`: why, by device."""

    observed: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])
    measured: dict[Key, dict[str, int]] = field(default_factory=dict[Key, dict[str, int]])
    unread: dict[str, str] = field(default_factory=dict[str, str])


class Machine:
    """Devices by their names. Raises UnknownDevice when a table of `[[devices]]` names one that is not there."""

    def __init__(
        self,
        entries: Sequence[DeviceSection] = (),
        *,
        cpu_reserve_bytes: int = 0,
        gpu_reserve_bytes: int = 0,
        probes: Sequence[Probe] | None = None,
    ) -> None:
        """The sizes are those of the section `memory`. `probes`: in place of this machine's own."""
        own: Sequence[Probe] = [CpuProbe(), NvmlProbe()] if probes is None else probes
        self._trees = DaemonThreads(1)
        listed = [(probe, probe.devices()) for probe in (*own, SimulatedProbe(entries))]
        self._readers = [_Reader(probe) for probe, devices in listed if devices]
        self.capacities: list[DeviceCapacity] = []
        self._facts: dict[str, DeviceFacts] = {}
        self._spare: dict[str, int] = {}
        """What others may use of a device before they are in our way: what lies beyond its limit and its reserve."""
        self._shares: dict[str, Shares] = {}
        self._unread_since: dict[str, tuple[str, float]] = {}
        defaults = {"cpu": cpu_reserve_bytes, "cuda": gpu_reserve_bytes}
        used: set[int] = set()
        for facts in (one for _, devices in listed for one in devices):
            number, entry = _entry_of(facts, entries)
            used.add(number)
            if entry is None or entry.enabled:
                self._add(facts, entry, defaults.get(facts.kind, 0))
        for number, entry in enumerate(entries):
            if number not in used and entry.enabled and entry.name is not None:
                there = ", ".join(self._facts) or "none"
                raise UnknownDevice(f"devices: there is no {entry.kind} device {entry.name}; there are {there}")

    def _add(self, facts: DeviceFacts, entry: DeviceSection | None, reserve_bytes: int) -> None:
        if facts.device in self._facts:
            raise UnknownDevice(f"devices: {facts.device} is there already: give the simulated one another name")
        reserve = reserve_bytes if entry is None or entry.reserve_bytes is None else entry.reserve_bytes
        grantable = limit = max(0, facts.total_bytes - reserve)
        if entry is not None and entry.limit_bytes is not None:
            limit = min(limit, entry.limit_bytes)
        self._facts[facts.device] = facts
        self._spare[facts.device] = grantable - limit
        self.capacities.append(
            DeviceCapacity(
                device=facts.device,
                kind=facts.kind,
                total_bytes=facts.total_bytes,
                reserve_bytes=facts.total_bytes - limit,
            )
        )

    def facts(self, device: str) -> DeviceFacts | None:
        return self._facts.get(device)

    def used_bytes(self, device: str) -> int:
        """In use by all programs when it was measured last."""
        found = self._shares.get(device)
        return 0 if found is None else found.used_bytes

    def unread(self) -> dict[str, tuple[str, float]]:
        """By device that cannot be measured: why, and for how many seconds."""
        now = time.monotonic()
        return {device: (reason, now - since) for device, (reason, since) in self._unread_since.items()}

    async def observe(self, residents: Sequence[Resident]) -> Observation:
        """Measure all devices. What a device's driver does raises nothing: see `Observation.unread`."""
        roots = {one.pid for one in residents if one.pid is not None}
        below = await self._trees.run(trees, roots) if roots else {}
        pids = frozenset[int]().union(*below.values())
        readings: dict[str, Reading | Unread] = {}
        for read in await asyncio.gather(*(reader.read(pids) for reader in self._readers)):
            readings.update(read)
        found = Observation()
        for device, facts in self._facts.items():
            reading = readings.get(device, Unread("it is not listed any more"))
            self._note(device, reading)
            if isinstance(reading, Unread):
                found.unread[device] = reading.reason
                continue
            engines = [_use(one, below) for one in residents if one.device == device]
            if facts.kind == SIMULATED:
                parted = shares.simulated(reading, engines)
            else:
                parted = shares.split(reading, engines, self._shares.get(device))
            self._shares[device] = parted
            in_the_way = max(0, parted.foreign_bytes - self._spare[device])
            found.observed[device] = (parted.ours_bytes + in_the_way, parted.ours_bytes)
            for key, measured in parted.measured.items():
                found.measured.setdefault(key, {})[device] = measured
        return found

    def _note(self, device: str, reading: Reading | Unread) -> None:
        """Tell when a device cannot be measured any more, and when it can again."""
        if isinstance(reading, Reading):
            if self._unread_since.pop(device, None) is not None:
                logger.warning("device.measured_again device=%s", device)
        elif device not in self._unread_since:
            logger.error("device.unread device=%s reason=%s: nothing is granted on it", device, reading.reason)
            self._unread_since[device] = (reading.reason, time.monotonic())


def _entry_of(facts: DeviceFacts, entries: Sequence[DeviceSection]) -> tuple[int, DeviceSection | None]:
    """The table that applies to a device: the one that names it, else that of its kind; -1 for none."""
    general: tuple[int, DeviceSection | None] = (-1, None)
    for number, entry in enumerate(entries):
        if entry.kind != facts.kind:
            continue
        if entry.name is None:
            general = number, entry
        elif entry.name == facts.device or (facts.address is not None and facts.address.startswith(entry.name)):
            return number, entry
    return general


def _use(one: Resident, below: Mapping[int, frozenset[int]]) -> EngineUse:
    return EngineUse(
        key=one.key,
        granted_bytes=one.granted_bytes,
        loading=one.loading,
        pids=frozenset() if one.pid is None else below.get(one.pid, frozenset()),
        reported_bytes=one.reported_bytes,
    )


class _Reader:
    """Reads a probe in a thread that nobody has to wait for: a driver may not answer for ever."""

    def __init__(self, probe: Probe) -> None:
        self.probe = probe
        self._threads = DaemonThreads(1)
        self._reading: asyncio.Task[Readings] | None = None
        self._names: set[str] = set()

    async def read(self, pids: Set[int]) -> Readings:
        if self._reading is None:
            self._reading = asyncio.get_running_loop().create_task(self._threads.run(self.probe.read, pids))
        await asyncio.wait([self._reading], timeout=READ_S)
        if not self._reading.done():
            return dict.fromkeys(self._names, Unread(f"its driver has not answered for {READ_S:g} s"))
        reading, self._reading = self._reading, None
        try:
            readings = reading.result()
        except Exception as error:  # a fault of ours, which must not end the worker
            logger.exception("device.probe_failed probe=%s", type(self.probe).__name__)
            return dict.fromkeys(self._names, Unread(f"{type(error).__name__} in its probe"))
        self._names |= set(readings)
        return readings
