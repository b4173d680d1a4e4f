"""Models whose entries name no device: on the card with the most free memory, else in main memory."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lanes_world import LanesWorld
from nvml_fake import GIB, FakeCard, FakeDriver
from penstock.common.model_entry import parse_entry
from penstock.processors.core.fleet.ledger import DeviceCapacity
from penstock.processors.models import auto_device, serving
from penstock.processors.models.auto_device import AutoDevice, torch_has_cuda
from penstock.processors.models.catalog import ModelConfig
from penstock.processors.models.sizing import ModelSize
from shell_fakes import ScriptedEngine
from support import wait_until_async

CARD = DeviceCapacity(device="cuda:0", kind="cuda", total_bytes=10 * GIB)
MAIN = DeviceCapacity(device="cpu", kind="cpu", total_bytes=100 * GIB)


def config(engine: str = "text", **fields: Any) -> ModelConfig:
    return ModelConfig.of(parse_entry({"id": "m", "source": "/m", "engine": engine, **fields}))


def placed(one: ModelConfig, *capacities: DeviceCapacity, has_cuda: bool = True) -> str | None:
    found = AutoDevice(capacities, has_cuda=has_cuda).place(one)
    assert found.options.get("device") == found.device
    return found.device


SIMULATED = DeviceCapacity(device="sim0", kind="simulated", total_bytes=10 * GIB)
WITH_TORCH = ("text", "embedding", "vision", "diffusers", "upscaling")


@pytest.mark.parametrize(
    ("entry", "capacities", "device"),
    [
        *(({"engine": one, "device": told}, [MAIN, CARD], "cuda") for one in WITH_TORCH for told in (None, "auto")),
        *(({"engine": one}, [MAIN], None) for one in WITH_TORCH),
        *(({"engine": one}, [MAIN, CARD], None) for one in ("imaging", "managed", "remote", "noop")),
        ({"device": "cpu"}, [MAIN, CARD], "cpu"),
        ({"device": "cuda:0"}, [MAIN], "cuda:0"),
        ({"vram_bytes": 10 * GIB}, [MAIN, CARD], "cuda"),
        ({"vram_bytes": 10 * GIB + 1}, [MAIN, CARD], None),
        ({}, [MAIN, SIMULATED], None),
    ],
)
def test_what_computes_with_torch_gets_a_card(
    entry: dict[str, Any], capacities: list[DeviceCapacity], device: str | None
) -> None:
    assert placed(config(**entry), *capacities) == device
    assert placed(config(**entry), *capacities, has_cuda=False) == (None if device == "cuda" else device)


def test_another_entry_of_a_model_that_was_too_large_is_tried_anew() -> None:
    auto = AutoDevice([MAIN, CARD], has_cuda=True)
    assert not auto.is_too_large(config(), 10 * GIB)
    assert auto.is_too_large(config(), 10 * GIB + 1)
    assert auto.place(config()).device is None
    assert not auto.is_too_large(config(), 11 * GIB), "it is in main memory already"
    assert auto.place(config(quantization="int8")).device == "cuda"


@pytest.mark.parametrize(
    ("version", "has"),
    [
        ("__version__ = '2.12.0+cu130'\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n", True),
        ("__version__ = '2.12.0+cpu'\ncuda: Optional[str] = None\nhip: Optional[str] = None\n", False),
        (None, False),
    ],
)
def test_whether_torch_computes_on_cards_is_read_from_its_files(
    version: str | None, has: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if version is not None:
        (tmp_path / "version.py").write_text(version)
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(auto_device.importlib.util, "find_spec", lambda name: spec)
    assert torch_has_cuda() == has


# -- the worker's parts


class Shell(LanesWorld):
    """On the cards of a fake driver."""

    def __init__(self, **entry: Any) -> None:
        self.loaded_on: list[tuple[str, ...]] = []
        self.sized_as: list[str | None] = []
        self.size = {"cuda": GIB, None: 2 * GIB}
        model = parse_entry({"id": "m", "source": "/m", "engine": "text", **entry})
        super().__init__([model], devices=[{"kind": "cpu", "limit_bytes": 7 * GIB}])

    def make(self, config: ModelConfig, size: ModelSize, devices: tuple[str, ...], granted_bytes: int) -> Any:
        self.loaded_on.append(devices)
        return ScriptedEngine(device=devices[0])

    async def find_size(self, config: ModelConfig, on_progress: Any) -> ModelSize:
        self.sized_as.append(config.device)
        return ModelSize(source=config.source, need_bytes=self.size[config.device])

    async def run(self) -> None:
        await self.serving.observe()
        self.submit("r")
        await wait_until_async(lambda: "r" in self.running or bool(self.ended))
        assert not self.ended


@pytest.fixture
async def shells(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[list[Shell]]:
    monkeypatch.setattr(serving, "torch_has_cuda", lambda: True)
    made: list[Shell] = []
    yield made
    for shell in made:
        await shell.serving.stop()


def on_cards(shells: list[Shell], monkeypatch: pytest.MonkeyPatch, *cards: FakeCard, **entry: Any) -> Shell:
    FakeDriver(*cards).install(monkeypatch)
    shells.append(Shell(**entry))
    return shells[-1]


@pytest.mark.parametrize("processes", [{4711: 9 * GIB}, {4711: None}], ids=["told by process", "as under WSL2"])
async def test_the_card_with_the_most_free_memory_is_taken(
    shells: list[Shell], monkeypatch: pytest.MonkeyPatch, processes: dict[int, int | None]
) -> None:
    busy = FakeCard("GPU-aa", 24 * GIB, 9 * GIB, processes)
    shell = on_cards(shells, monkeypatch, busy, FakeCard("GPU-bb", 20 * GIB))
    await shell.run()
    assert shell.loaded_on == [("cuda:1",)]
    assert shell.serving.devices("m") == ["cuda:1"]


async def test_what_no_card_can_hold_runs_in_main_memory(shells: list[Shell], monkeypatch: pytest.MonkeyPatch) -> None:
    """It is sized for main memory, where its numbers are larger. Nobody who waits for it fails meanwhile."""
    shell = on_cards(shells, monkeypatch, FakeCard("GPU-aa", 4 * GIB))
    shell.size["cuda"] = 5 * GIB
    await shell.run()
    assert (shell.loaded_on, shell.sized_as) == ([("cpu",)], ["cuda", None])
