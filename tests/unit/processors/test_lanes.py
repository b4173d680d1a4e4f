"""Lanes: sizes, loads and unloads that the flow asks for, engines that come and go, and what the flow hears of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any
from unittest.mock import Mock

import pytest

from lanes_world import LanesWorld
from penstock.common.model_entry import ModelEntry
from penstock.processors.core import effects as ask
from penstock.processors.models.catalog import ModelConfig
from penstock.processors.models.sizing import ModelSize
from penstock.schemas.errors import ModelNotFound
from penstock.schemas.records import ModelInfo, Record
from shell_fakes import ScriptedEngine
from support import wait_until_async

BYTES = 1000


class Shell(LanesWorld):
    """Two models; engines are scripted."""

    def __init__(self) -> None:
        self.published: list[Record] = []
        self.forgotten: list[str] = []
        self.said: list[ask.Status] = []
        self.engines: list[ScriptedEngine] = []
        self.error: Exception | None = None
        self.sizes: dict[str, int] = {}
        super().__init__([ModelEntry(id=name, source=name, engine="text") for name in ("m", "other")])

    def publish(self, topic: str, key: str, record: Record | None) -> None:
        if record is None:
            self.forgotten.append(key)
        else:
            self.published.append(record)

    def make(self, config: ModelConfig, size: ModelSize, devices: tuple[str, ...], granted_bytes: int) -> Any:
        engine = ScriptedEngine(device=devices[0] if devices else "", error=self.error)
        if not config.kind.built_in:
            self.engines.append(engine)
        return engine

    async def find_size(self, config: ModelConfig, on_progress: Any) -> ModelSize:
        return ModelSize(source=config.source, need_bytes=self.sizes.get(config.id, BYTES))

    def answer(self, effect: Any) -> None:
        if isinstance(effect, ask.Status):
            self.said.append(effect)
        super().answer(effect)

    async def until_ready(self, model: str = "m") -> None:
        await wait_until_async(lambda: self.flow.lane(model).ready)

    async def until_loaded(self) -> None:
        """Measures the devices and preloads every model."""
        await self.serving.observe()
        self.lanes.load_all()
        await self.until_ready("m")

    async def until_running(self, request_id: str) -> None:
        self.submit(request_id)
        await wait_until_async(lambda: request_id in self.running)

    async def until_unloaded(self, model: str) -> None:
        """By an operator's order."""
        self.flow.orders.desire(model, loaded=False, pinned=None)
        self.settle()
        await wait_until_async(lambda: not self.flow.lane(model).replicas)

    def states(self, model: str) -> list[str | None]:
        return [one.state for one in self.published if isinstance(one, ModelInfo) and one.model == model]


@pytest.fixture
async def shell() -> AsyncIterator[Shell]:
    shell = Shell()
    yield shell
    await shell.serving.stop()


async def test_nothing_is_loaded_before_the_devices_were_measured(shell: Shell) -> None:
    shell.submit("r")
    await asyncio.sleep(0.05)
    assert not shell.engines
    await shell.serving.observe()
    shell.settle()
    await shell.until_ready()
    assert "r" in shell.running
    assert shell.states("m")[-1] == "ready"


async def test_every_model_is_loaded_before_anybody_asks(shell: Shell) -> None:
    await shell.until_loaded()
    await shell.until_ready("other")
    assert [grant.owner for grant in shell.flow.ledger.grants()] == ["m", "other"]
    booked = shell.flow.lanes["m"].replicas[0].bytes
    assert booked >= BYTES
    (state,) = [one for one in shell.serving.model_states() if one.model == "m"]
    assert (state.state, state.device, state.reserved_bytes, state.memory_bytes) == ("ready", "cpu", booked, 42)
    (device,) = [one for one in shell.serving.device_states() if one.device == "cpu"]
    assert [(holder.model, holder.bytes) for holder in device.holders] == [("m", booked), ("other", booked)]


async def test_operators_see_why_a_load_failed_until_one_succeeds(shell: Shell) -> None:
    await shell.serving.observe()
    shell.error = OSError("no file named model.safetensors in /srv/secret and m")
    shell.lanes.preload("m")
    cause = "OSError: no file named model.safetensors in …/secret and m"
    await wait_until_async(lambda: shell.serving.model_states()[0].cause == cause)
    told = [one for one in shell.published if isinstance(one, ModelInfo) and one.model == "m"]
    assert (told[-1].cause, shell.serving.model_states()[1].cause) == (cause, None)
    shell.error = None
    shell.pass_time(1.0)
    await shell.until_ready("m")
    assert shell.serving.model_states()[0].cause is None


async def test_an_engine_that_dies_gives_its_work_and_its_memory_back_and_is_loaded_again(shell: Shell) -> None:
    await shell.serving.observe()
    await shell.until_running("r")
    shell.running.clear()
    shell.engines[0].on_died(-9)
    assert shell.flow.lanes["m"].deaths == 1
    shell.pass_time(1.0)
    await wait_until_async(lambda: "r" in shell.running)
    assert len(shell.engines) == 2
    assert counted(shell, "penstock_model_unloads_total", model="m", reason="died") == 1
    assert counted(shell, "penstock_model_loads_total", model="m") == 2
    assert len(shell.flow.ledger.grants()) == 1


async def test_a_busy_engine_gets_nothing_new_for_as_long_as_it_says(shell: Shell) -> None:
    await shell.until_loaded()
    next(engine for engine in shell.engines if engine.state.value == "ready").on_busy(3.0)
    shell.submit("r")
    shell.submit("o", model="other")
    assert len(shell.running) == 1
    shell.pass_time(3.2)
    assert len(shell.running) == 2


async def test_events_name_the_device_also_when_the_model_was_given_up_before_its_output_was_kept(shell: Shell) -> None:
    await shell.serving.observe()
    assert shell.lanes.engine_facts("m", 0) == (None, None)
    await shell.until_running("r")
    assert shell.lanes.engine_facts("m", 0) == ("cpu", 42)
    shell.finish("r")
    await shell.until_unloaded("m")
    assert shell.lanes.engine("m", 0) is None
    assert shell.lanes.engine_facts("m", 0) == ("cpu", 42)


# -- what is counted


def counted(shell: Shell, name: str, **labels: str) -> float:
    return shell.metrics.registry.get_sample_value(name, labels) or 0.0


async def test_evictions_unloads_and_loads_are_counted_by_reason(shell: Shell) -> None:
    total = shell.flow.ledger.limit_bytes("cpu")
    shell.sizes = {"m": int(0.6 * total), "other": int(0.6 * total)}
    shell.flow.measurements.observed({"cpu": (0, 0)}, shell.now)
    await shell.until_running("r")
    shell.finish("r")
    shell.submit("o", model="other")
    for _ in range(600):
        shell.pass_time(1.0)
        await asyncio.sleep(0)
        if "o" in shell.running:
            break
    assert "o" in shell.running
    (evictions,) = shell.metrics.evictions.collect()
    samples = [one for one in evictions.samples if one.name.endswith("_total")]
    assert [one.value for one in samples] == [shell.flow.lifecycle.evictions] == [1]
    reason = samples[0].labels["reason"]
    assert counted(shell, "penstock_model_unloads_total", model="m", reason=reason) == 1
    assert counted(shell, "penstock_model_load_seconds_count", model="other") == 1
    shell.finish("o")
    await shell.until_unloaded("other")
    assert counted(shell, "penstock_model_unloads_total", model="other", reason="desired") == 1
    assert shell.flow.lifecycle.evictions == 1, "what an operator orders is no eviction"


async def test_memory_that_ran_out_is_counted_and_the_next_load_gets_more(shell: Shell) -> None:
    await shell.serving.observe()
    await shell.until_running("r")
    before = shell.flow.lanes["m"].replicas[0].bytes
    shell.engines[0].on_out_of_memory()
    assert counted(shell, "penstock_engine_out_of_memory_total", model="m") == 1
    shell.engines[0].on_died(-9)
    shell.pass_time(1.0)
    await wait_until_async(lambda: len(shell.engines) == 2)
    assert shell.flow.lanes["m"].replicas[0].bytes >= 1.2 * before


async def test_the_most_that_an_engine_held_is_held_against_what_was_booked(shell: Shell) -> None:
    await shell.serving.observe()
    await shell.until_running("r")
    assert shell.flow.lanes["m"].replicas[0].peak_bytes == 43
    shell.engines[0].on_died(-9)
    assert counted(shell, "penstock_memory_estimate_ratio_count") == 1
    assert counted(shell, "penstock_memory_estimate_ratio_bucket", le="0.25") == 1


# -- what operators want


async def test_models_come_and_go(shell: Shell) -> None:
    await shell.serving.observe()
    first = shell.serving.resolve("text_generation", None)
    assert (first.model, first.reason) == ("m", "none is loaded; first in the configuration")
    assert shell.serving.resolve("text_generation", "other") == ("other", None)
    new = ModelConfig.of(ModelEntry(id="new", source="new", engine="text", tasks=["text_generation"]))
    shell.lanes.configure([*shell.serving.catalog, new], set())
    await shell.until_ready("new")
    shell.lanes.configure([new], set())
    assert shell.forgotten == ["m", "other"] or shell.forgotten == ["other", "m"]
    assert [state.model for state in shell.serving.model_states()] == ["new"]
    with pytest.raises(ModelNotFound):
        shell.serving.resolve("text_generation", "m")
    choice = shell.serving.resolve("text_generation", None)
    assert choice == ("new", "it is the only model for the task")


async def test_what_its_entry_says_of_its_memory_is_told_before_it_is_loaded(shell: Shell) -> None:
    fields: Any = {"engine": "text", "preload": False}
    models = [ModelEntry(id="told", source="x", vram_bytes=7, **fields), ModelEntry(id="unknown", source="x", **fields)]
    await shell.serving.observe()
    shell.lanes.configure([ModelConfig.of(one) for one in models], set())
    infos = {one.model: (one.state, one.weights_bytes) for one in shell.published if isinstance(one, ModelInfo)}
    assert (infos["told"], infos["unknown"]) == (("absent", 7), ("absent", None))


async def test_what_is_wanted_unloaded_is_not_preloaded(shell: Shell) -> None:
    shell.lanes.desire("m", False, None, 3)
    await shell.serving.observe()
    shell.lanes.load_all()
    await shell.until_ready("other")
    assert shell.states("m")[-1] == "absent"
    shell.lanes.preload("m")
    assert not shell.flow.lane("m").wanted, "an order to unload stands above the entry"
    shell.lanes.desire("m", True, True, 0)
    await shell.until_ready("m")
    assert next(state for state in shell.serving.model_states() if state.model == "m").pinned


async def test_nothing_of_a_paused_model_or_class_starts(shell: Shell) -> None:
    await shell.until_loaded()
    shell.lanes.pause("model", "m", True)
    shell.submit("a", model="m")
    shell.lanes.pause("class", "medium", True)
    shell.submit("b", model="other")
    assert not shell.running
    shell.lanes.pause("model", "m", False)
    assert not shell.running
    shell.lanes.pause("class", "medium", False)
    await wait_until_async(lambda: {"a", "b"} <= set(shell.running))


async def test_who_waits_for_a_download_hears_how_far_it_is(shell: Shell) -> None:
    shell.submit("r", model="m")
    shell.lanes.progressed("m", 0.424)
    shell.lanes.progressed("m", 0.43)
    shell.settle()
    told = [one for one in shell.said if one.detail]
    assert [(one.status, one.detail) for one in told] == [("loading_model", "loading_model 42%")]


async def test_what_an_engine_says_of_itself_and_breaks_the_flow_is_a_fault(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, faults: list[str]
) -> None:
    await shell.until_loaded()
    broken = Mock(side_effect=ZeroDivisionError("as in a bug"))
    engine = shell.engines[0]
    for name in ("busy", "limits", "down"):
        monkeypatch.setattr(shell.flow.replicas, name, broken)
    monkeypatch.setattr(shell.flow.measurements, "out_of_memory", broken)
    engine.on_busy(1.0)
    engine.on_limits(engine.limits())
    engine.on_out_of_memory()
    engine.on_died(-9)
    assert faults == ["fault"] * 4
