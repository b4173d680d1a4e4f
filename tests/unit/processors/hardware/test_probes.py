"""Probes of memory, against files and modules that stand for a machine."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from penstock.processors.hardware import cpu, nvml


def test_the_machine_without_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_CGROUP", tmp_path)
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("123\n")
    assert cpu.total_bytes() > 1 << 20
    assert 0 < cpu.used_bytes() < cpu.total_bytes()


@pytest.mark.parametrize(
    ("limit", "used", "stat", "cache"),
    [
        ("memory.max", "memory.current", "memory.stat", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
    ],
)
def test_a_container_s_limit(
    limit: str, used: str, stat: str, cache: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "_CGROUP", tmp_path)
    (tmp_path / limit).parent.mkdir(exist_ok=True)
    (tmp_path / limit).write_text("50000000\n")
    (tmp_path / used).write_text("30000000\n")
    (tmp_path / stat).write_text(f"anon 1\n{cache} 10000000\n")
    assert (cpu.total_bytes(), cpu.used_bytes()) == (50_000_000, 20_000_000)
    found = cpu.capacity(None, 5_000_000)
    assert (found.total_bytes, found.limit_bytes) == (50_000_000, 45_000_000)
    assert cpu.capacity(1000, 5_000_000).limit_bytes == 0


def test_own_memory() -> None:
    assert (cpu.own_bytes(os.getpid()) or 0) > 1 << 20
    assert cpu.own_bytes(2**22 + 1) is None


@pytest.mark.parametrize(
    ("shown", "numbers"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("2,0", [2, 0]),
        ("GPU-b, 0", [1, 0]),
        ("0,9,1", [0]),
        ("GPU-", []),
        ("-1", []),
    ],
)
def test_visible_cards(shown: str | None, numbers: list[int]) -> None:
    assert nvml.visible(shown, ["GPU-aa", "GPU-bb", "GPU-cc"]) == numbers


def fake_nvml(fail: bool = False) -> ModuleType:
    """The calls that the probe makes, for two cards of 100 and 200 bytes."""

    class NVMLError(Exception):
        pass

    def memory(handle: int) -> Any:
        if fail:
            raise NVMLError("the card fell off the bus")
        return SimpleNamespace(total=100 * (handle + 1), used=handle + 7)

    module = ModuleType("pynvml")
    module.__dict__.update(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda number: number,
        nvmlDeviceGetUUID=lambda handle: f"GPU-{handle}".encode(),
        nvmlDeviceGetMemoryInfo=memory,
    )
    return module


def test_cards_are_named_as_torch_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    (card,) = nvml.capacities(50)
    assert (card.device, card.kind, card.total_bytes, card.limit_bytes) == ("cuda:0", "cuda", 200, 150)
    assert nvml.used_bytes() == {"cuda:0": 8}


def test_a_probe_that_fails_finds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(fail=True))
    assert nvml.capacities(0) == []
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert nvml.used_bytes() == {}
