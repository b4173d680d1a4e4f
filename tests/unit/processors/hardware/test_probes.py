"""Probes of main memory and of simulated devices, and trees of processes."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from penstock.processors.engines.managed import server_process
from penstock.processors.hardware import cpu, processes
from penstock.processors.hardware.cpu import CpuProbe
from penstock.processors.hardware.entries import DeviceSection, ForeignStep
from penstock.processors.hardware.probe import Reading, Unread
from penstock.processors.hardware.processes import OwnBytes, own_bytes
from penstock.processors.hardware.simulated import SimulatedProbe

V2 = ("memory.max", "memory.current", "memory.stat", "inactive_file")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat", "total_inactive_file")


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that stands for /sys/fs/cgroup; our group is /a/b of version 2 and of the memory controller."""
    monkeypatch.setattr(cpu, "_MOUNT", tmp_path)
    ours = tmp_path / "ours"
    ours.write_text("5:cpu,cpuacct:/x\n4:memory:/a/b\n0::/a/b\n")
    monkeypatch.setattr(cpu, "_OURS", ours)
    return tmp_path


def limit(folder: Path, names: tuple[str, ...], limit_bytes: int | str, used_bytes: int, cache_bytes: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit_bytes}\n")
    (folder / names[1]).write_text(f"{used_bytes}\n")
    (folder / names[2]).write_text(f"anon 1\n{names[3]} {cache_bytes}\n")


def test_the_machine_without_a_limit(groups: Path) -> None:
    limit(groups, V2, "max", 123)
    assert cpu.total_bytes() == psutil.virtual_memory().total
    assert 0 < cpu.used_bytes() < cpu.total_bytes()


@pytest.mark.parametrize("where", ["", "a", "a/b"])
@pytest.mark.parametrize(("base", "names"), [("", V2), ("memory", V1)])
def test_the_limit_of_a_group_at_any_level(groups: Path, base: str, names: tuple[str, ...], where: str) -> None:
    limit(groups / base / where, names, 50_000_000, 30_000_000, 10_000_000)
    assert (cpu.total_bytes(), cpu.used_bytes()) == (50_000_000, 20_000_000)


def test_of_several_groups_the_one_that_has_least_left_counts(groups: Path) -> None:
    limit(groups / "a", V2, 60_000_000, 55_000_000)
    limit(groups / "a" / "b", V2, 50_000_000, 10_000_000)
    assert (cpu.total_bytes(), cpu.used_bytes()) == (50_000_000, 45_000_000), "5 MB are left in all"


def test_main_memory_tells_what_belongs_to_our_processes_alone() -> None:
    probe = CpuProbe()
    (facts,) = probe.devices()
    assert (facts.device, facts.kind, facts.address) == ("cpu", "cpu", None)
    reading = probe.read(frozenset([os.getpid(), 2**22 + 1]))["cpu"]
    assert set(reading.by_pid) == {os.getpid()}
    assert 1 << 20 < reading.by_pid[os.getpid()] < psutil.Process().memory_info().rss
    assert own_bytes(2**22 + 1) is None


def growth(file: Path, measure: Callable[[], int | None]) -> int:
    """What a process has more, by this measure, once it has read a mapping of 8 MiB."""
    file.write_bytes(os.urandom(8 << 20))
    os.sync()  # pages that are not on the disk yet count as changed
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        before = measure() or 0
        assert sum(mapped[0 : 8 << 20 : mmap.PAGESIZE]) > 0
        return (measure() or 0) - before


@pytest.mark.parametrize(("name", "counts"), [("lib.so", False), ("lib.so.6", False), ("lib.sorted.gguf", True)])
def test_pages_of_libraries_belong_to_nobody_and_mapped_weights_do(tmp_path: Path, name: str, counts: bool) -> None:
    grown = growth(tmp_path / name, lambda: own_bytes(os.getpid()))
    assert grown > 7 << 20 if counts else grown < 1 << 20


def test_pages_of_a_servers_libraries_belong_to_nobody(tmp_path: Path) -> None:
    assert growth(tmp_path / "libserver.so", lambda: server_process.own_bytes([psutil.Process()])) < 1 << 20


def test_measuring_a_process_costs_no_more_than_a_small_part_of_a_core() -> None:
    now, asked = 0.0, list[int]()

    def measure(pid: int) -> int | None:
        nonlocal now
        now += 0.1
        asked.append(pid)
        return None if pid == 3 else pid * 1000

    own = OwnBytes(measure, lambda: now)
    assert own.of({1, 3}) == {1: 1000}
    for _ in range(40):
        now += 0.1
        assert own.of({1}) == {1: 1000}
    assert asked.count(1) == 1
    now += 2.0
    own.of({1})
    assert asked.count(1) == 2
    own.of(frozenset())
    assert own.of({1}) == {1: 1000}
    assert asked.count(1) == 3, "what was gone is not remembered: its number may be another's"


def test_process_numbers_are_a_drivers_only_in_the_first_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    here = str(Path("/proc/self/ns/pid").readlink())
    monkeypatch.setattr(processes, "INITIAL_NAMESPACE", here)
    assert processes.numbered_as_drivers_do() == ("microsoft" not in Path("/proc/version").read_text().lower())
    monkeypatch.setattr(processes, "INITIAL_NAMESPACE", "pid:[1]")
    assert not processes.numbered_as_drivers_do()


def test_a_simulated_device_has_foreign_use_that_changes(tmp_path: Path) -> None:
    now = 100.0
    file = tmp_path / "foreign"
    steps = [ForeignStep(after_s=5, bytes=300), ForeignStep(after_s=9, bytes=0)]
    probe = SimulatedProbe(
        [
            DeviceSection(kind="simulated", name="a", total_bytes=1000, foreign=steps),
            DeviceSection(kind="simulated", name="b", total_bytes=500, foreign_file=file),
            DeviceSection(kind="simulated", name="c", total_bytes=500, enabled=False),
            DeviceSection(kind="cpu"),
        ],
        clock=lambda: now,
    )
    assert [(one.device, one.kind, one.total_bytes) for one in probe.devices()] == [
        ("a", "simulated", 1000),
        ("b", "simulated", 500),
    ]
    for at, used in ((100.0, 0), (105.0, 300), (108.9, 300), (109.0, 0)):
        now = at
        assert probe.read(frozenset())["a"] == Reading(used_bytes=used)
    found = probe.read(frozenset())["b"]
    assert isinstance(found, Unread)
    assert "No such file" in found.reason
    for text, expected in ((" 70\n", Reading(used_bytes=70)), ("much", Unread(f"{file} holds no number of bytes"))):
        file.write_text(text)
        assert probe.read(frozenset())["b"] == expected
