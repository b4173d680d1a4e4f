"""A worker's devices: what the configuration makes of those that are there, and what comes of measuring them."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from typing import Any

import pynvml
import pytest

from nvml_fake import GIB, FakeCard, FakeDriver
from penstock.processors.hardware import nvml
from penstock.processors.hardware.entries import DeviceSection
from penstock.processors.hardware.nvml import NvmlProbe
from penstock.processors.hardware.probe import DeviceFacts, Reading, Unread
from penstock.processors.models import machine as machines
from penstock.processors.models.machine import Machine, Resident, UnknownDevice
from support import wait_until_async


class Fixed:
    """A probe of devices whose readings a test sets."""

    def __init__(self, *facts: DeviceFacts) -> None:
        self.facts = list(facts)
        self.readings: dict[str, Reading | Unread] = {one.device: Reading(used_bytes=0) for one in facts}
        self.waits: threading.Event | None = None
        self.error: Exception | None = None
        self.asked = 0

    def devices(self) -> list[DeviceFacts]:
        return self.facts

    def read(self, pids: Set[int]) -> Mapping[str, Reading | Unread]:
        self.asked += 1
        if self.waits is not None:
            self.waits.wait(30)
        if self.error is not None:
            raise self.error
        return dict(self.readings)


def facts(device: str, kind: str, total: int = 100, address: str | None = None) -> DeviceFacts:
    return DeviceFacts(device=device, kind=kind, total_bytes=total, address=address)


CPU, CARD = facts("cpu", "cpu", 1000), facts("cuda:0", "cuda", 100, "GPU-aa")


def entries(*tables: dict[str, Any]) -> list[DeviceSection]:
    return [DeviceSection.model_validate(one) for one in tables]


def limits(machine: Machine) -> dict[str, int]:
    return {one.device: one.limit_bytes for one in machine.capacities}


def test_reserves_and_limits_come_from_the_table_that_names_a_device_then_from_its_kind() -> None:
    second = facts("cuda:1", "cuda", 100, "GPU-bb")
    found = Machine(
        entries(
            {"kind": "cpu", "limit_bytes": 350},
            {"kind": "cuda", "reserve_bytes": 20},
            {"kind": "cuda", "name": "GPU-b", "limit_bytes": 30},
            {"kind": "simulated", "name": "sim0", "total_bytes": 70, "reserve_bytes": 5},
        ),
        cpu_reserve_bytes=50,
        gpu_reserve_bytes=10,
        probes=[Fixed(CPU), Fixed(CARD, second)],
    )
    assert limits(found) == {"cpu": 350, "cuda:0": 80, "cuda:1": 30, "sim0": 65}
    assert {one.device: one.kind for one in found.capacities}["sim0"] == "simulated"


def test_a_device_that_is_not_enabled_is_not_there_and_its_name_is_free() -> None:
    tables = entries(
        {"kind": "cpu", "enabled": False},
        {"kind": "cuda", "name": "cuda:0", "enabled": False},
        {"kind": "simulated", "name": "cuda:0", "total_bytes": 500},
    )
    assert limits(Machine(tables, probes=[Fixed(CPU), Fixed(CARD)])) == {"cuda:0": 500}
    with pytest.raises(UnknownDevice, match="cuda:0 is there already"):
        Machine(tables[2:], probes=[Fixed(CARD)])


def test_a_table_of_a_device_that_is_not_there_is_an_error_that_names_those_that_are() -> None:
    with pytest.raises(UnknownDevice, match="there is no cuda device cuda:3; there are cpu, cuda:0"):
        Machine(entries({"kind": "cuda", "name": "cuda:3"}), probes=[Fixed(CPU), Fixed(CARD)])
    Machine(entries({"kind": "cuda", "name": "cuda:3", "enabled": False}, {"kind": "cuda"}), probes=[Fixed(CPU)])


async def test_what_others_use_counts_only_where_it_is_in_the_way_of_the_limit() -> None:
    probe = Fixed(CPU)
    machine = Machine(entries({"kind": "cpu", "limit_bytes": 300}), cpu_reserve_bytes=100, probes=[probe])
    for used, in_the_way in ((500, 0), (600, 0), (700, 100)):
        probe.readings["cpu"] = Reading(used_bytes=used)
        assert (await machine.observe([])).observed == {"cpu": (in_the_way, 0)}
        assert machine.used_bytes("cpu") == used


async def test_a_driver_that_does_not_answer_holds_up_nothing_and_is_asked_again_once_it_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cpu, card = Fixed(CPU), Fixed(CARD)
    machine = Machine(probes=[cpu, card])
    await machine.observe([])
    monkeypatch.setattr(machines, "READ_S", 0.05)
    card.waits = threading.Event()
    for _ in range(3):
        found = await machine.observe([])
        assert set(found.observed) == {"cpu"}
        assert "has not answered" in found.unread["cuda:0"]
    assert card.asked == 2, "one thread waits, not three"
    card.waits.set()
    found = await machine.observe([])
    assert set(found.observed) == {"cpu", "cuda:0"}
    assert machine.unread() == {}


async def test_a_fault_in_a_probe_is_a_device_that_is_not_measured(caplog: pytest.LogCaptureFixture) -> None:
    card = Fixed(CARD)
    machine = Machine(probes=[card])
    await machine.observe([])
    card.error = RuntimeError("a fault of ours")
    assert (await machine.observe([])).unread == {"cuda:0": "RuntimeError in its probe"}
    assert "device.unread device=cuda:0" in caplog.text
    card.error = None
    assert not (await machine.observe([])).unread
    assert "device.measured_again device=cuda:0" in caplog.text


@pytest.fixture
def loading() -> Iterator[subprocess.Popen[bytes]]:
    """The process of an engine that loads: a shell that has a child."""
    process = subprocess.Popen(["sh", "-c", f"{sys.executable} -c 'import time; time.sleep(600)' & wait"])
    yield process
    for pid in machines.trees([process.pid])[process.pid]:
        os.kill(pid, 9)
    process.wait()


async def test_an_engine_that_loads_is_not_foreign_nor_is_what_it_has_started(
    loading: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a card by NVML's list of processes, and in main memory by USS."""
    monkeypatch.setattr(nvml, "numbered_as_drivers_do", lambda: True)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    card = FakeCard("GPU-aa", used_bytes=12 * GIB)
    FakeDriver(card).install(monkeypatch)
    machine = Machine(probes=[machines.CpuProbe(), NvmlProbe()])
    await wait_until_async(lambda: len(machines.trees([loading.pid])[loading.pid]) == 2, 20, "its child")
    (child,) = machines.trees([loading.pid])[loading.pid] - {loading.pid}
    card.processes = {child: 9 * GIB, 4_000_000: 3 * GIB}
    key = ("m", 0)
    residents = [
        Resident(key=key, device=device, granted_bytes=20 * GIB, loading=True, pid=loading.pid)
        for device in ("cuda:0", "cpu")
    ]
    found = await machine.observe(residents)
    assert found.observed["cuda:0"] == (12 * GIB, 9 * GIB)
    assert found.measured[key]["cuda:0"] == 9 * GIB
    assert 1 << 20 < found.measured[key]["cpu"] == found.observed["cpu"][1]
    assert found.observed["cpu"][0] > found.observed["cpu"][1]
    card.error = pynvml.NVML_ERROR_RESET_REQUIRED
    found = await machine.observe(residents)
    assert set(found.observed) == {"cpu"}
    assert machine.used_bytes("cuda:0") == 12 * GIB, "the last observation is kept"
    assert found.unread["cuda:0"] == str(pynvml.NVMLError(pynvml.NVML_ERROR_RESET_REQUIRED))


async def test_a_simulated_device_is_used_by_its_grants_and_by_its_file(tmp_path: Path) -> None:
    file = tmp_path / "foreign"
    file.write_text("30")
    table = {"kind": "simulated", "name": "sim0", "total_bytes": 100, "foreign_file": str(file)}
    machine = Machine(entries(table), probes=[])
    resident = Resident(key=("m", 0), device="sim0", granted_bytes=60, reported_bytes=0)
    found = await machine.observe([resident])
    assert (found.observed, found.measured) == ({"sim0": (90, 60)}, {})
    file.unlink()
    found = await machine.observe([resident])
    assert found.observed == {}
    assert list(found.unread) == list(machine.unread()) == ["sim0"]
