"""The catalog, and the engines of models: what they are asked to do is reported once, and nothing is left behind."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest.mock import Mock, call

import pytest

from kit.refusals import refused
from penstock.processors.core.fleet.ledger import CannotLoad
from penstock.processors.engines.base import EngineState
from penstock.processors.models.catalog import Catalog, ModelConfig, share_cores
from penstock.processors.models.factory import make_engine
from penstock.processors.models.manager import ModelManager
from penstock.processors.models.sizing import ModelSize
from penstock.schemas.errors import EngineFailed, InvalidRequest, ModelNotFound
from shell_fakes import ScriptedEngine
from support import wait_until_async


def config(model: str, **fields: Any) -> ModelConfig:
    return ModelConfig(id=model, source=fields.pop("source", "noop"), engine=fields.pop("engine", "noop"), **fields)


class Slow(ScriptedEngine):
    """Starts when it may."""

    def __init__(self, error: Exception | None, loading: asyncio.Event) -> None:
        super().__init__(error=error)
        self.loading = loading

    async def start(self) -> None:
        await self.loading.wait()
        await super().start()


class Bench:
    """A manager of one model, with all that it reports. Each load gets an engine of its own."""

    def __init__(self, **fields: Any) -> None:
        self.error: Exception | None = None
        self.size_error: Exception | None = None
        self.engines: list[Slow] = []
        self.made_for: list[tuple[tuple[str, ...], int]] = []
        self.made_of: list[tuple[str, str]] = []
        """(source of the config, source of the size) of each engine."""
        self.loading, self.sizing = asyncio.Event(), asyncio.Event()
        self.loading.set()
        self.sizing.set()
        self.sized_times = 0
        self.reports = Mock()
        self.manager = ModelManager([config("m", **fields)], self.reports, make=self.make, size=self.find_size)

    def make(self, config: ModelConfig, size: ModelSize, devices: tuple[str, ...], granted_bytes: int) -> Any:
        self.engines.append(Slow(self.error, self.loading))
        self.made_for.append((devices, granted_bytes))
        self.made_of.append((config.source, size.source))
        return self.engines[-1]

    async def find_size(self, config: ModelConfig, on_progress: Any) -> ModelSize:
        self.sized_times += 1
        if self.size_error is not None:
            raise self.size_error
        await self.sizing.wait()
        return ModelSize(source=config.source, need_bytes=100 * len(config.source))

    def told(self) -> list[str]:
        return [name for name, _, _ in self.reports.mock_calls]

    async def until_told(self, *kinds: str) -> None:
        await wait_until_async(lambda: self.told() == [*kinds])


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
        with refused(ModelNotFound, param="model"):
            catalog.named(task, model)
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
    bench.reports.reset_mock()
    await manager.stop()
    assert [engine.state for engine in bench.engines] == [EngineState.STOPPED] * 2
    assert manager.held() == {}
    manager.load("m", 0, (), 0)
    assert not bench.told(), "nothing is told by a manager that stops"


@pytest.mark.parametrize("error", [EngineFailed("no"), OSError("disk"), RuntimeError("torch")])
async def test_a_load_that_fails_leaves_nothing_and_may_be_tried_again(error: Exception) -> None:
    bench = Bench()
    bench.error = error
    bench.manager.load("m", 0, (), 0)
    await bench.until_told("load_failed")
    assert isinstance(bench.reports.load_failed.call_args.args[2], EngineFailed)
    assert bench.engines[0].state is EngineState.STOPPED
    bench.error = None
    bench.manager.load("m", 0, (), 0)
    await bench.until_told("load_failed", "up")
    assert bench.manager.engine("m", 0) is bench.engines[1]
    assert bench.sized_times == 2, "the files may have been mended"


async def test_a_death_is_seen_at_once_and_told_when_the_process_has_ended() -> None:
    bench = await loaded()
    first = bench.engines[0]
    first.state = EngineState.DEAD
    assert bench.manager.engine("m", 0) is None
    assert bench.told() == ["up"], "its process has not ended yet"
    first.on_died(-9)
    assert bench.reports.mock_calls[1:] == [call.down("m", 0, -9)]
    bench.manager.load("m", 0, (), 0)
    await bench.until_told("up", "down", "up")
    first.on_died(-9)
    assert len(bench.told()) == 3, "only the engine that it has can die"


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
    bench.loading.clear()
    bench.manager.load("m", 0, (), 0)
    await wait_until_async(lambda: bench.engines)
    assert bench.manager.held() == {("m", 0): bench.engines[0]}, "one that loads holds memory too"
    if way == "unload":
        bench.manager.unload("m", 0)
        await bench.until_told("gone")
    else:
        await asyncio.wait_for(bench.manager.stop(), 5)
        assert not bench.told()
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
    await bench.until_told("up", "up")
    bench.manager.size("m")
    await bench.until_told("up", "up", "sized")
    bench.manager.configure([])
    bench.manager.configure([config("m", source="newest")])
    assert bench.manager.need_bytes("m") is None, "the size was that of a model that was removed"
    bench.manager.load("m", 2, (), 0)
    await bench.until_told("up", "up", "sized", "up")
    assert bench.made_of == [("old.", "old."), ("newer", "newer"), ("newest", "newest")]


@pytest.mark.parametrize("by", ["size", "load"])
async def test_a_model_that_changes_while_it_is_sized_is_sized_anew(by: str) -> None:
    bench = Bench(source="old.")
    bench.sizing.clear()
    bench.manager.size("m") if by == "size" else bench.manager.load("m", 0, (), 0)
    await wait_until_async(lambda: bench.sized_times == 1)
    bench.manager.configure([config("m", source="newer")])
    bench.sizing.set()
    if by == "size":
        await bench.until_told("sized")
        assert bench.reports.sized.call_args.args[1].need_bytes == 500
        bench.manager.load("m", 0, (), 0)
    await wait_until_async(lambda: bench.told()[-1:] == ["up"])
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
    (_, told), _ = bench.reports.size_failed.call_args
    assert "/home" not in str(told)
    assert "/home" not in (told.cause or ""), "nor do operators, outside the model's own source"
    assert "…/model" in (told.cause or "")
    assert isinstance(told, CannotLoad) == (kind is CannotLoad)
