"""Cards and slices by NVML, against a fake driver with the real package's errors; and the real package without one."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import pynvml
import pytest

from nvml_fake import GIB, FakeCard, FakeDriver, FakeSlice
from penstock.processors.hardware import nvml
from penstock.processors.hardware.nvml import NvmlProbe
from penstock.processors.hardware.probe import Reading, Unread
from penstock.processors.hardware.visible import Card, Slice, visible

MIG = FakeCard(
    "GPU-bb",
    slices=[FakeSlice("MIG-b0", 40 * GIB, 0), FakeSlice("MIG-b2", 20 * GIB, 2)],
)

Install = Callable[..., FakeDriver]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Install a fake driver with these cards, on a machine where processes are numbered as drivers do."""
    monkeypatch.setattr(nvml, "numbered_as_drivers_do", lambda: True)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return lambda *cards: FakeDriver(*cards).install(monkeypatch)


def read(probe: NvmlProbe, device: str = "cuda:0") -> Reading:
    found = probe.read(frozenset())[device]
    assert isinstance(found, Reading), found
    return found


@pytest.mark.parametrize(
    ("shown", "devices"),
    [
        (None, ["cuda:0=GPU-aa1", "cuda:1/mig:0=MIG-b0", "cuda:1/mig:2=MIG-b2", "cuda:2=GPU-aa2"]),
        ("", []),
        ("2,0", ["cuda:0=GPU-aa2", "cuda:1=GPU-aa1"]),
        (" 2 , 0", ["cuda:0=GPU-aa2", "cuda:1=GPU-aa1"]),
        ("GPU-aa2, 0", ["cuda:0=GPU-aa2", "cuda:1=GPU-aa1"]),
        ("0,9,2", ["cuda:0=GPU-aa1"]),  # it ends at what names nothing
        ("GPU-aa", []),  # two begin so
        ("-1,0", []),
        ("NoDevFiles", []),
        ("0,0", []),  # CUDA shows nothing then
        ("1", ["cuda:0/mig:0=MIG-b0", "cuda:0/mig:2=MIG-b2"]),
        ("MIG-b2", ["cuda:0/mig:2=MIG-b2"]),
        ("MIG-b2,MIG-b0,0", ["cuda:0/mig:2=MIG-b2", "cuda:0/mig:0=MIG-b0", "cuda:1=GPU-aa1"]),
        ("MIG-GPU-bb/5/0", ["cuda:0/mig:2=MIG-b2"]),  # the older way to name it
        ("MIG-b", []),
        ("MIG-zz,0", []),
    ],
)
def test_what_cuda_visible_devices_leaves(shown: str | None, devices: list[str]) -> None:
    cards = [
        Card(uuid="GPU-aa1", total_bytes=1),
        Card(
            uuid="GPU-bb",
            total_bytes=1,
            slices=(
                Slice(number=0, names=("MIG-b0", "MIG-GPU-bb/3/0"), total_bytes=1),
                Slice(number=2, names=("MIG-b2", "MIG-GPU-bb/5/0"), total_bytes=1),
            ),
        ),
        Card(uuid="GPU-aa2", total_bytes=1),
    ]
    assert [f"{one.device}={one.address}" for one in visible(shown, cards)] == devices


def test_cards_and_slices_with_their_memory_and_processes(driver: Install) -> None:
    card = FakeCard("GPU-aa", used_bytes=9 * GIB, processes={10: 3 * GIB, 11: 5 * GIB})
    slices = [FakeSlice("MIG-b1", 20 * GIB, 1, 2 * GIB, {12: 2 * GIB})]
    driver(card, FakeCard("GPU-bb", slices=slices))
    probe = NvmlProbe()
    found = [(one.device, one.kind, one.total_bytes, one.address) for one in probe.devices()]
    assert found == [("cuda:0", "cuda", 80 * GIB, "GPU-aa"), ("cuda:1/mig:1", "cuda", 20 * GIB, "MIG-b1")]
    assert read(probe) == Reading(used_bytes=9 * GIB, by_pid={10: 3 * GIB, 11: 5 * GIB})
    assert read(probe, "cuda:1/mig:1") == Reading(used_bytes=2 * GIB, by_pid={12: 2 * GIB})


def test_only_visible_cards_are_devices(driver: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    driver(FakeCard("GPU-aa"), FakeCard("GPU-bb", used_bytes=8))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-b")
    probe = NvmlProbe()
    assert [(one.device, one.address) for one in probe.devices()] == [("cuda:0", "GPU-bb")]
    assert read(probe).used_bytes == 8


@pytest.mark.parametrize(
    ("used", "ours"),
    [(None, True), ((1 << 64) - 1, True), (5, False)],
    ids=["unknown", "NVML_VALUE_NOT_AVAILABLE, as wrappers give it", "ids of another namespace"],
)
def test_where_no_memory_is_known_by_process_totals_are_left(
    driver: Install, monkeypatch: pytest.MonkeyPatch, used: int | None, ours: bool
) -> None:
    driver(FakeCard("GPU-aa", used_bytes=5, processes={10: used}))
    monkeypatch.setattr(nvml, "numbered_as_drivers_do", lambda: ours)
    probe = NvmlProbe()
    probe.devices()
    assert read(probe) == Reading(used_bytes=5, by_pid=None)


def test_a_card_that_is_lost_leaves_the_others_and_is_found_again(driver: Install) -> None:
    first, second = FakeCard("GPU-aa", used_bytes=1), FakeCard("GPU-bb", used_bytes=2)
    fake = driver(first, second)
    probe = NvmlProbe()
    probe.devices()
    first.error = pynvml.NVML_ERROR_GPU_IS_LOST
    readings = probe.read(frozenset())
    assert isinstance(readings["cuda:0"], Unread)
    assert readings["cuda:1"] == Reading(used_bytes=2, by_pid={})
    assert fake.open == 0, "the next reading begins anew"
    first.error = None
    assert read(probe) == Reading(used_bytes=1, by_pid={})
    assert (fake.open, fake.opened) == (1, 2)
    read(probe)
    assert fake.opened == 2, "a session stays open while all is well"


def test_a_driver_that_goes_away_raises_nothing(driver: Install) -> None:
    fake = driver(FakeCard("GPU-aa"))
    probe = NvmlProbe()
    probe.devices()
    fake.open, fake.error = 0, pynvml.NVML_ERROR_DRIVER_NOT_LOADED  # it was unloaded below us
    for _ in range(2):
        assert isinstance(probe.read(frozenset())["cuda:0"], Unread)
    fake.error = None
    assert isinstance(probe.read(frozenset())["cuda:0"], Reading)


@pytest.mark.parametrize("error", [pynvml.NVML_ERROR_DRIVER_NOT_LOADED, pynvml.NVML_ERROR_LIBRARY_NOT_FOUND])
def test_no_driver_is_no_device(driver: Install, error: int) -> None:
    driver().error = error
    probe = NvmlProbe()
    assert probe.devices() == []
    assert probe.read(frozenset()) == {}


def test_the_real_package_on_a_machine_without_a_driver() -> None:
    assert importlib.util.find_spec("pynvml") is not None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        pass
    else:
        pynvml.nvmlShutdown()
        pytest.skip("there is a card here")
    probe = NvmlProbe()
    assert probe.devices() == []
    assert probe.read(frozenset([1])) == {}
