"""An engine is told its devices: by their addresses where they are cards, and as the CPU where they are simulated."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.processors.engines.managed.engine import ManagedEngine
from penstock.processors.engines.process.host import ChildEngine
from penstock.processors.hardware.probe import DeviceFacts
from penstock.processors.models.catalog import ModelConfig
from penstock.processors.models.factory import make_engine
from penstock.processors.models.sizing import ModelSize
from penstock.schemas.errors import EngineFailed

FACTS = {
    "cuda:0": DeviceFacts(device="cuda:0", kind="cuda", total_bytes=80_000, address="GPU-aa"),
    "cuda:1/mig:2": DeviceFacts(device="cuda:1/mig:2", kind="cuda", total_bytes=40_000, address="MIG-b2"),
    "sim0": DeviceFacts(device="sim0", kind="simulated", total_bytes=80_000),
    "sim1": DeviceFacts(device="sim1", kind="simulated", total_bytes=80_000),
    "cpu": DeviceFacts(device="cpu", kind="cpu", total_bytes=80_000),
}
TELL = """
import json, os, sys
told = dict(cards=os.environ["CUDA_VISIBLE_DEVICES"], arguments=sys.argv[2:])
open(sys.argv[1], "w").write(json.dumps(told))
"""


@pytest.mark.parametrize(
    ("devices", "cards", "arguments"),
    [
        (("cuda:1/mig:2",), "MIG-b2", ["cuda:0", "0.5000", "1"]),
        (("cuda:1/mig:2", "cuda:0"), "MIG-b2,GPU-aa", ["cuda:0", "0.5000", "2"]),  # of the smaller one's total
        (("sim0", "sim1"), "", ["cpu", "0.2500", "2"]),
        (("cpu",), "", ["cpu", "0.2500", "1"]),
    ],
)
async def test_a_managed_server_sees_the_devices_of_its_grant_alone(
    devices: tuple[str, ...], cards: str, arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real process, started as a server is; it tells what it sees, and ends."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    told = tmp_path / "told"
    command = [sys.executable, "-c", TELL, str(told), "{device}", "{memory_fraction}", "{devices}"]
    config = ModelConfig(
        id="m", source="x", engine="managed", options={"command": command, "devices": len(devices)}, vram_bytes=20_000
    )
    engine = make_engine(config, ModelSize(source="x"), devices, 20_000, facts=FACTS.get, logs=tmp_path)
    assert isinstance(engine, ManagedEngine)
    assert (engine.info().device, config.devices) == (devices[0], len(devices))
    with pytest.raises(EngineFailed, match="before it was healthy"):
        await engine.start()
    assert json.loads(told.read_text()) == {"cards": cards, "arguments": arguments}
    await engine.stop()


@pytest.mark.parametrize(
    ("device", "seen"),
    [
        ("cuda:1/mig:2", {"device": "cuda:0", "address": "MIG-b2"}),
        ("sim1", {"device": "cpu", "address": ""}),
        ("cpu", {"device": "cpu", "address": ""}),
    ],
)
def test_an_engine_s_process_is_told_where_its_device_is(device: str, seen: dict[str, Any]) -> None:
    config = ModelConfig(id="m", source="x", engine="embedding", options={"device": "cuda"})
    engine = make_engine(config, ModelSize(source="x"), (device,), 500, facts=FACTS.get)
    assert isinstance(engine, ChildEngine)
    options = vars(engine)["_options"]
    assert {name: options[name] for name in ("device", "address", "granted_bytes")} == {**seen, "granted_bytes": 500}
