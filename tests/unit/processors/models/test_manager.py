"""The catalog, and the engines of models: what they are asked to do is reported once, and nothing is left behind."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from penstock.processors.core.fleet.ledger import CannotLoad
from penstock.processors.engines.base import Engine, EngineState
from penstock.processors.engines.noop import NoopEngine
from penstock.processors.models.catalog import Catalog, ModelConfig, share_cores
from penstock.processors.models.factory import make_engine
from penstock.processors.models.manager import ModelManager
from penstock.processors.models.sizing import ModelSize
from penstock.schemas.errors import EngineFailed, InvalidRequest, ModelNotFound, PenstockError
from support import wait_until_async


def config(model: str, **fields: Any) -> ModelConfig:
    return ModelConfig(id=model, source=fields.pop("source", "noop"), engine=fields.pop("engine", "noop"), **fields)


class Heavy(NoopEngine):
    """Takes its time to start, and may fail to. It can die."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__("m", {})
        self.error = error
        self.loading = asyncio.Event()
        self.loading.set()

    async def start(self) -> None:
        await self.loading.wait()
        if self.error is not None:
            raise self.error
        await super().start()

    def die(self) -> None:
        self._state = EngineState.DEAD

    def measured_memory(self) -> int | None:
        return 42

    def peak_memory(self) -> int | None:
        return 43


class Bench:
    """A manager of one model, with all that it reports. Each load gets an engine of its own."""

    def __init__(self, **fields: Any) -> None:
        self.error: Exception | None = None
        self.size_error: Exception | None = None
        self.slow = False
        self.engines: list[Heavy] = []
        self.made_for: list[tuple[tuple[str, ...], int]] = []
        self.made_of: list[tuple[str, str]] = []
        """(source of the config, source of the size) of each engine."""
        self.sizing = asyncio.Event()
        self.sizing.set()
        self.sized_times = 0
        self.told: list[tuple[Any, ...]] = []
        self.manager = ModelManager([config("m", **fields)], self, make=self.make, size=self.find_size)

    def make(self, config: ModelConfig, size: ModelSize, devices: tuple[str, ...], granted_bytes: int) -> Heavy:
        engine = Heavy(self.error)
        if self.slow:
            engine.loading.clear()
        self.engines.append(engine)
        self.made_for.append((devices, granted_bytes))
        self.made_of.append((config.source, size.source))
        return engine

    async def find_size(self, config: ModelConfig, on_progress: Any) -> ModelSize:
        self.sized_times += 1
        if self.size_error is not None:
            raise self.size_error
        await self.sizing.wait()
        return ModelSize(source=config.source, need_bytes=100 * len(config.source))

    async def until_told(self, *kinds: str) -> None:
        await wait_until_async(lambda: tuple(one[0] for one in self.told) == kinds)

    # -- the manager's reports

    def sized(self, model: str, size: ModelSize) -> None:
        self.told.append(("sized", model, size.need_bytes))

    def size_failed(self, model: str, error: PenstockError) -> None:
        self.told.append(("size_failed", model, error))

    def up(self, model: str, replica: int, engine: Engine) -> None:
        self.told.append(("up", model, replica))

    def load_failed(self, model: str, replica: int, error: PenstockError) -> None:
        self.told.append(("load_failed", model, replica, error))

    def down(self, model: str, replica: int, code: int) -> None:
        self.told.append(("down", model, replica, code))

    def gone(self, model: str, replica: int) -> None:
        self.told.append(("gone", model, replica))


async def loaded(**fields: Any) -> Bench:
    bench = Bench(**fields)
    bench.manager.load("m", 0, (), 0)
    await bench.until_told("up")
    return bench


def test_models_are_found_by_task_id_and_alias() -> None:
    catalog = Catalog(
        [config("a", aliases=("default", "A-1")), config("b"), config("e", tasks=("embedding",))],
    )
    assert [one.id for one in catalog.serving("text_generation")] == ["a", "b"]
    assert catalog.named("text_generation", "default").id == "a"
    for task, model in (("text_generation", "x"), ("embedding", "a")):
        with pytest.raises(ModelNotFound) as caught:
            catalog.named(task, model)
        assert caught.value.param == "model"
    with pytest.raises(ModelNotFound):
        catalog.serving("image_generation")


def test_two_models_cannot_share_a_name() -> None:
    with pytest.raises(InvalidRequest, match="default"):
        Catalog([config("a", aliases=("default",)), config("default")])


def test_local_engines_share_the_cores() -> None:
    configs = [config("a", engine="text"), config("b", engine="embedding"), config("r", engine="remote")]
    assert [share_cores(configs, 2)[name].options.get("threads") for name in "abr"] == [1, 1, None]
    assert [share_cores(configs, 9)[name].options.get("threads") for name in "abr"] == [4, 4, None]
    told = [config("a", engine="text", options={"threads": 7})]
    assert share_cores(told, 9)["a"].options["threads"] == 7


async def test_a_model_is_sized_and_loaded_where_it_was_granted_memory() -> None:
    bench = Bench()
    manager = bench.manager
    manager.size("m")
    await bench.until_told("sized")
    manager.load("m", 0, ("cuda:1", "cuda:2"), 500)
    manager.load("m", 1, ("cpu",), 400)
    assert manager.engine("m", 0) is None
    await bench.until_told("sized", "up", "up")
    assert bench.made_for == [(("cuda:1", "cuda:2"), 500), (("cpu",), 400)]
    assert [manager.engine("m", number) for number in (0, 1)] == bench.engines
    assert bench.sized_times == 1
    assert list(manager.held().values()) == bench.engines
    bench.told.clear()
    await manager.stop()
    assert [engine.state for engine in bench.engines] == [EngineState.STOPPED] * 2
    assert manager.held() == {}
    manager.load("m", 0, (), 0)
    assert not bench.told, "nothing is told by a manager that stops"


@pytest.mark.parametrize("error", [EngineFailed("no"), OSError("disk"), RuntimeError("torch")])
async def test_a_load_that_fails_leaves_nothing_and_may_be_tried_again(error: Exception) -> None:
    bench = Bench()
    bench.error = error
    bench.manager.load("m", 0, (), 0)
    await bench.until_told("load_failed")
    assert isinstance(bench.told[0][3], EngineFailed)
    assert bench.engines[0].state is EngineState.STOPPED
    bench.error = None
    bench.manager.load("m", 0, (), 0)
    await bench.until_told("load_failed", "up")
    assert bench.manager.engine("m", 0) is bench.engines[1]
    assert bench.sized_times == 2, "the files may have been mended"


async def test_a_death_is_seen_at_once_and_told_when_the_process_has_ended() -> None:
    bench = await loaded()
    first = bench.engines[0]
    first.die()
    assert bench.manager.engine("m", 0) is None
    assert len(bench.told) == 1, "its process has not ended yet"
    first.on_died(-9)
    assert bench.told[1:] == [("down", "m", 0, -9)]
    bench.manager.load("m", 0, (), 0)
    await bench.until_told("up", "down", "up")
    first.on_died(-9)
    assert len(bench.told) == 3, "only the engine that it has can die"


async def test_unloading_is_told_when_the_process_has_ended() -> None:
    bench = await loaded()
    bench.manager.unload("m", 0)
    bench.manager.unload("m", 0)
    await bench.until_told("up", "gone")
    assert bench.engines[0].state is EngineState.STOPPED
    bench.manager.unload("m", 0)
    await bench.until_told("up", "gone", "gone")


@pytest.mark.parametrize("way", ["unload", "stop"])
async def test_loading_is_given_up_at_once(way: str) -> None:
    bench = Bench()
    bench.slow = True
    bench.manager.load("m", 0, (), 0)
    await wait_until_async(lambda: bench.engines)
    assert bench.manager.held() == {("m", 0): bench.engines[0]}, "one that loads holds memory too"
    if way == "unload":
        bench.manager.unload("m", 0)
        await bench.until_told("gone")
    else:
        await asyncio.wait_for(bench.manager.stop(), 5)
        assert not bench.told
    assert bench.engines[0].state is EngineState.STOPPED
    assert bench.manager.engine("m", 0) is None


async def test_models_change_at_run_time() -> None:
    bench = await loaded()
    bench.manager.configure([config("other")])
    assert bench.manager.engine("m", 0) is bench.engines[0], "it stays until it is told to end"
    bench.manager.load("m", 1, (), 0)
    await bench.until_told("up", "load_failed")
    bench.manager.load("other", 0, (), 0)
    await bench.until_told("up", "load_failed", "up")


async def test_a_load_after_a_change_uses_the_new_entry() -> None:
    bench = await loaded(source="old.")
    bench.manager.configure([config("m", source="newer")])
    bench.manager.load("m", 1, (), 0)
    bench.manager.size("m")
    await bench.until_told("up", "up", "sized")
    bench.manager.configure([])
    bench.manager.configure([config("m", source="newest")])
    assert bench.manager.need_bytes("m") is None, "the size was that of a model that was removed"
    bench.manager.load("m", 2, (), 0)
    await bench.until_told("up", "up", "sized", "up")
    assert bench.made_of == [("old.", "old."), ("newer", "newer"), ("newest", "newest")]


async def test_a_model_that_changes_while_it_is_sized_is_sized_anew() -> None:
    bench = Bench(source="old.")
    bench.sizing.clear()
    bench.manager.size("m")
    await wait_until_async(lambda: bench.sized_times == 1)
    bench.manager.configure([config("m", source="newer")])
    bench.sizing.set()
    await bench.until_told("sized")
    assert bench.told == [("sized", "m", 500)]
    bench.manager.load("m", 0, (), 0)
    await bench.until_told("sized", "up")
    assert bench.made_of == [("newer", "newer")]


async def test_a_model_that_changes_while_its_load_sizes_it_is_made_of_the_new_entry() -> None:
    bench = Bench(source="old.")
    bench.sizing.clear()
    bench.manager.load("m", 0, (), 0)
    await wait_until_async(lambda: bench.sized_times == 1)
    bench.manager.configure([config("m", source="newer")])
    bench.sizing.set()
    await bench.until_told("up")
    assert bench.made_of == [("newer", "newer")]


async def test_a_change_that_makes_no_other_engine_keeps_the_size() -> None:
    bench = Bench(source="old.")
    bench.manager.size("m")
    await bench.until_told("sized")
    bench.manager.configure([config("m", source="old.", priority=0, aliases=("fast",))])
    assert bench.manager.need_bytes("m") == 400


def test_an_unknown_engine_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="steam"):
        make_engine(config("m", engine="steam"), ModelSize(source="x"))


@pytest.mark.parametrize(
    ("error", "kind"),
    [(InvalidRequest("/home/me/model is broken"), CannotLoad), (OSError("/home/me/model"), EngineFailed)],
)
async def test_callers_hear_nothing_of_this_machines_folders(error: Exception, kind: type[EngineFailed]) -> None:
    bench = Bench()
    bench.size_error = error
    bench.manager.size("m")
    await bench.until_told("size_failed")
    assert "/home" not in str(bench.told[0][2])
    assert "/home" not in (bench.told[0][2].cause or ""), "nor do operators, outside the model's own source"
    assert "…/model" in (bench.told[0][2].cause or "")
    assert isinstance(bench.told[0][2], CannotLoad) == (kind is CannotLoad)
