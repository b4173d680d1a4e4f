"""Lanes: loads that the flow asks for, engines that come and go, and what requests are told of them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from flow_driver import World
from penstock.processors.core import effects as ask
from penstock.processors.core.lane import LaneState
from penstock.processors.core.ledger import CannotLoad, MemoryShort
from penstock.processors.engines.base import Limits
from penstock.processors.lanes import Lanes
from penstock.processors.metrics import Metrics
from penstock.processors.models.serving import Serving
from penstock.processors.settings import ModelSection, WorkerSettings
from penstock.schemas.errors import EngineFailed, InsufficientCapacity, ModelNotFound
from penstock.schemas.topics import TopicNames
from shell_fakes import ScriptedEngine
from support import wait_until_async


class Models:
    """The models' side: a load waits until a test lets it end, by an error if there is one."""

    def __init__(self) -> None:
        self.models = ["m", "other"]
        self.loaded: list[str] = []
        self.may_end = asyncio.Event()
        self.error: Exception | None = None
        self.engines: dict[str, ScriptedEngine] = {}
        self.lanes: Lanes

    async def load(self, model: str) -> ScriptedEngine:
        self.loaded.append(model)
        await self.may_end.wait()
        if self.error is not None:
            raise self.error
        engine = self.engines[model] = ScriptedEngine()
        self.lanes.up(model, Limits(slots=2, tokens=100))
        return engine

    def engine(self, model: str) -> ScriptedEngine | None:
        return self.engines.get(model)

    def resolve(self, task: str, model: str | None) -> Any:
        if model == "unknown":
            raise ModelNotFound("unknown")
        return SimpleNamespace(id=model or "m")

    def check_fits(self, model: str, requirements: Any) -> None:
        raise InsufficientCapacity(f"{model} never fits")


class Shell(World):
    """A flow whose loads are carried out by a real `Lanes`."""

    def __init__(self) -> None:
        super().__init__("m", "other")
        self.served = Models()
        self.metrics = Metrics()
        self.lanes = self.served.lanes = Lanes(self.metrics, clock=lambda: self.now)
        self.changes = 0
        self.lanes.connect(self.served, self.flow, self.changed)  # type: ignore[arg-type]

    def changed(self) -> None:
        self.changes += 1
        self.settle()

    def answer(self, effect: Any) -> None:
        if isinstance(effect, ask.Load):
            self.lanes.load(effect.lane)
        super().answer(effect)

    def state(self, lane: str = "m") -> LaneState:
        return self.flow.lane(lane).state

    async def until(self, state: LaneState, lane: str = "m") -> None:
        await wait_until_async(lambda: self.state(lane) is state)


@pytest.fixture
async def shell() -> AsyncIterator[Shell]:
    shell = Shell()
    yield shell
    await shell.lanes.close()


async def test_every_model_is_loaded_before_anybody_asks(shell: Shell) -> None:
    shell.lanes.load_all()
    await wait_until_async(lambda: shell.served.loaded == ["m", "other"])
    assert shell.state() is LaneState.LOADING
    shell.served.may_end.set()
    await shell.until(LaneState.UP)
    lane = shell.flow.lanes["m"]
    assert (lane.slots, lane.tokens, lane.inline) == (2, 100, False)


async def test_a_request_brings_its_model_once(shell: Shell) -> None:
    shell.submit("a")
    shell.submit("b")
    await wait_until_async(lambda: shell.served.loaded)
    shell.served.may_end.set()
    await wait_until_async(lambda: sorted(shell.running) == ["a", "b"])
    assert shell.served.loaded == ["m"]


async def test_a_load_and_an_unloading_are_counted_once() -> None:
    world, metrics = World("m"), Metrics()
    lanes = Lanes(metrics, clock=lambda: world.now)
    serving = Serving(
        WorkerSettings(models=[ModelSection(id="m", source="noop", engine="noop")]),
        publish=lambda topic, key, record: None,
        names=TopicNames(),
        on_up=lanes.up,
        on_down=lanes.down,
        on_change=lambda: None,
        clock_ms=lambda: 0,
    )
    lanes.connect(serving, world.flow, world.settle)
    lanes.load("m")
    await wait_until_async(lambda: metrics.loads.labels("m")._value.get())
    await wait_until_async(lambda: not lanes._tasks)  # pyright: ignore[reportPrivateUsage]
    await serving.unload("m")
    assert metrics.loads.labels("m")._value.get() == 1
    assert metrics.unloads.labels("m")._value.get() == 1
    await serving.stop()


@pytest.mark.parametrize(
    ("error", "short"), [(EngineFailed("died as it began"), False), (MemoryShort("not now"), True)]
)
async def test_a_load_that_fails_is_told_and_tried_again(
    shell: Shell, caplog: pytest.LogCaptureFixture, error: Exception, short: bool
) -> None:
    shell.served.error = error
    shell.served.may_end.set()
    shell.submit("r")
    await shell.until(LaneState.ABSENT)
    await wait_until_async(lambda: shell.loads == ["m"])
    assert shell.flow.lanes["m"].short is short
    warned = [record.args for record in caplog.records if record.levelno == logging.WARNING]
    assert warned == ([] if short else [("m", error)]), "a wait for memory is tried again each second, quietly"
    shell.served.error = None
    shell.pass_time(2.0)
    await wait_until_async(lambda: "r" in shell.running)
    assert shell.served.loaded == ["m", "m"]


@pytest.mark.parametrize(
    ("error", "level"), [(CannotLoad("a file is missing"), logging.WARNING), (OSError("a fault"), logging.ERROR)]
)
async def test_who_waits_for_what_never_loads_is_told(
    shell: Shell, caplog: pytest.LogCaptureFixture, error: Exception, level: int
) -> None:
    shell.served.error = error
    shell.served.may_end.set()
    shell.submit("r")
    await wait_until_async(lambda: shell.ended == [("r", "failed")])
    assert [record.levelno for record in caplog.records] == [level]


async def test_an_engine_that_dies_gives_its_work_back_and_is_loaded_again(shell: Shell) -> None:
    shell.served.may_end.set()
    shell.submit("r")
    await wait_until_async(lambda: "r" in shell.running)
    shell.running.clear()
    changes = shell.changes
    shell.lanes.down("m", -9)
    assert shell.changes > changes
    assert shell.flow.lanes["m"].deaths == 1
    shell.pass_time(1.0)
    await wait_until_async(lambda: "r" in shell.running)
    assert shell.served.loaded == ["m", "m"]
    assert shell.metrics.unloads.labels("m")._value.get() == 1


async def test_a_model_that_is_unloaded_is_nobodys_fault(shell: Shell) -> None:
    shell.served.may_end.set()
    shell.lanes.load("other")
    await shell.until(LaneState.UP, "other")
    shell.lanes.down("other", None)
    lane = shell.flow.lanes["other"]
    assert (lane.state, lane.deaths, lane.wanted) == (LaneState.ABSENT, 0, False)
    shell.pass_time(5.0)
    assert shell.served.loaded == ["other"], "nobody waits for it"


async def test_a_busy_engine_gets_nothing_new_for_as_long_as_it_says(shell: Shell) -> None:
    shell.served.may_end.set()
    shell.lanes.load("m")
    await shell.until(LaneState.UP)
    shell.served.engines["m"].on_busy(3.0)
    shell.submit("r")
    assert not shell.running
    shell.pass_time(2.9)
    assert not shell.running
    shell.pass_time(0.2)
    assert "r" in shell.running


async def test_an_inline_engine_is_known_as_one(shell: Shell) -> None:
    shell.served.engines["m"] = ScriptedEngine(inline=True)
    shell.lanes.up("m", Limits(slots=1))
    assert shell.flow.lanes["m"].inline


async def test_the_catalog_is_the_models(shell: Shell) -> None:
    assert shell.lanes.resolve("text_generation", None) == "m"
    assert shell.lanes.resolve("text_generation", "other") == "other"
    with pytest.raises(ModelNotFound):
        shell.lanes.resolve("text_generation", "unknown")
    with pytest.raises(InsufficientCapacity):
        shell.lanes.check_fits("m", None)


async def test_events_name_the_device_and_its_memory_while_there_is_an_engine(shell: Shell) -> None:
    work = shell.submit("r")
    assert work is not None
    assert shell.lanes.engine_facts(work) == (None, None)
    shell.served.engines["m"] = ScriptedEngine()
    assert shell.lanes.engine_facts(work) == ("cpu:7", 42)
    assert shell.lanes.engine("m") is shell.served.engines["m"]
    assert shell.lanes.engine("other") is None


async def test_closing_gives_up_what_loads(shell: Shell) -> None:
    shell.lanes.load("m")
    await wait_until_async(lambda: shell.served.loaded)
    await asyncio.wait_for(shell.lanes.close(), 5)
    assert shell.served.engines == {}
