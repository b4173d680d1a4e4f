"""The catalog and the life of models: memory first, one load for all who ask, nothing left behind by a failed one."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from penstock.processors.core.ledger import CannotLoad, DeviceCapacity, Ledger, MemoryShort
from penstock.processors.engines.base import EngineState, Limits
from penstock.processors.engines.noop import NoopEngine
from penstock.processors.models.catalog import Catalog, ModelConfig, share_cores
from penstock.processors.models.factory import make_engine
from penstock.processors.models.lifecycle import IllegalTransition, Lifecycle
from penstock.processors.models.manager import ModelManager
from penstock.processors.models.sizing import ModelSize
from penstock.schemas.errors import EngineFailed, InsufficientCapacity, InvalidRequest, ModelNotFound
from penstock.schemas.records import Requirements
from support import wait_until_async


def config(model: str, **fields: Any) -> ModelConfig:
    return ModelConfig(id=model, source=fields.pop("source", "noop"), engine=fields.pop("engine", "noop"), **fields)


class Heavy(NoopEngine):
    """Takes its time to start, and may fail to. It can die, and its process takes its time to end."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__("m", {})
        self.error = error
        self.started = 0
        self.loading = asyncio.Event()
        self.loading.set()
        self.stopped_while_loading = False

    async def start(self) -> None:
        self.started += 1
        await self.loading.wait()
        if self.error is not None:
            raise self.error
        await super().start()

    def die(self) -> None:
        self._state = EngineState.DEAD

    def measured_memory(self) -> int | None:
        return None


class Bench:
    """A manager of one model, with all that it reports. Each load gets an engine of its own."""

    def __init__(self, need_bytes: int, *, total_bytes: int = 1000, foreign_bytes: int = 0, **fields: Any) -> None:
        self.ledger = Ledger([DeviceCapacity(device="cpu", kind="cpu", total_bytes=total_bytes)])
        self.ledger.observe("cpu", foreign_bytes)
        self.need_bytes = need_bytes
        self.foreign_bytes = foreign_bytes
        self.error: Exception | None = None
        self.size_error: Exception | None = None
        self.slow = False
        self.engines: list[Heavy] = []
        self.sized = 0
        self.told: list[tuple[Any, ...]] = []
        self.manager = ModelManager(
            Catalog([config("m", aliases=("alias",), **fields)]),
            self.ledger,
            probe=lambda: {"cpu": self.foreign_bytes},
            make=self.make,
            size=self.size,
            on_up=lambda model, limits: self.told.append(("up", model, limits)),
            on_down=lambda model, code: self.told.append(("down", model, code)),
            on_change=lambda: self.told.append(("state", str(self.manager.state("m")))),
        )

    def make(self, config: ModelConfig, size: ModelSize) -> Heavy:
        engine = Heavy(self.error)
        if self.slow:
            engine.loading.clear()
        self.engines.append(engine)
        return engine

    async def size(self, config: ModelConfig) -> ModelSize:
        self.sized += 1
        if self.size_error is not None:
            raise self.size_error
        return ModelSize(source="noop", need_bytes=self.need_bytes)

    @property
    def reserved(self) -> int:
        return self.ledger.reserved_bytes("cpu")

    def states(self) -> list[str]:
        return [found[1] for found in self.told if found[0] == "state"]

    async def until_started(self, count: int = 1) -> None:
        await wait_until_async(lambda: sum(engine.started for engine in self.engines) >= count)


def test_the_first_of_a_task_is_the_best_and_aliases_are_names() -> None:
    catalog = Catalog(
        [config("a", aliases=("default", "A-1")), config("b"), config("e", tasks=("embedding",))],
    )
    assert catalog.resolve("text_generation", None).id == "a"
    assert catalog.resolve("text_generation", "default").id == "a"
    assert catalog.resolve("embedding", None).id == "e"
    for task, model in (("text_generation", "x"), ("embedding", "a"), ("image_generation", None)):
        with pytest.raises(ModelNotFound) as caught:
            catalog.resolve(task, model)
        assert caught.value.param == "model"


def test_two_models_cannot_share_a_name() -> None:
    with pytest.raises(InvalidRequest, match="default"):
        Catalog([config("a", aliases=("default",)), config("default")])


def test_local_engines_share_the_cores() -> None:
    configs = [config("a", engine="text"), config("b", engine="embedding"), config("r", engine="remote")]
    assert [share_cores(configs, 2)[name].options.get("threads") for name in "abr"] == [1, 1, None]
    assert [share_cores(configs, 9)[name].options.get("threads") for name in "abr"] == [4, 4, None]
    told = [config("a", engine="text", options={"threads": 7})]
    assert share_cores(told, 9)["a"].options["threads"] == 7


async def test_who_asks_together_shares_one_load_with_its_memory_granted() -> None:
    bench = Bench(400)
    manager = bench.manager
    assert manager.engine("m") is None
    assert manager.state("m") is Lifecycle.ABSENT
    loaded = await asyncio.gather(*(manager.load(name) for name in ("m", "alias", "m")))
    assert set(loaded) == {bench.engines[0]}
    assert (len(bench.engines), bench.sized, bench.reserved) == (1, 1, 400)
    assert manager.engine("m") is await manager.load("m") is loaded[0]
    assert manager.state("m") is Lifecycle.READY
    assert bench.told == [("state", "loading"), ("up", "m", Limits(slots=256)), ("state", "ready")]
    bench.told.clear()
    await manager.stop()
    assert loaded[0].state is EngineState.STOPPED
    assert bench.reserved == 0
    assert not bench.told
    with pytest.raises(EngineFailed):
        await manager.load("m")


async def test_the_devices_are_observed_before_the_first_grant() -> None:
    bench = Bench(600, foreign_bytes=500)
    with pytest.raises(MemoryShort):
        await bench.manager.load("m")
    assert not bench.engines
    bench.foreign_bytes = 400
    await bench.manager.load("m")


async def test_what_never_fits_is_told_with_need_and_capacity_and_refused_from_then_on() -> None:
    bench = Bench(2000)
    bench.manager.check_fits("m", None)
    with pytest.raises(InsufficientCapacity) as caught:
        await bench.manager.load("m")
    assert caught.value.details == {"need": 2000, "capacity": 1000, "unit": "bytes"}
    assert not bench.engines
    assert bench.manager.state("m") is Lifecycle.FAILED
    with pytest.raises(InsufficientCapacity):
        bench.manager.check_fits("m", None)


async def test_what_is_short_of_memory_is_neither_failed_nor_sized_again() -> None:
    bench = Bench(600)
    other = bench.ledger.grant("other", {"cpu": 500}, 0.0)
    assert other is not None
    for _ in range(3):
        with pytest.raises(MemoryShort):
            await bench.manager.load("m")
        assert bench.manager.state("m") is Lifecycle.ABSENT
        assert bench.manager.error("m") is None
    assert bench.sized == 1
    assert bench.states() == ["loading", "absent"], "only the first time had to read the size"
    bench.ledger.release(other)
    assert (await bench.manager.load("m")).state is EngineState.READY
    assert bench.sized == 1


@pytest.mark.parametrize("error", [EngineFailed("no"), OSError("disk"), RuntimeError("torch")])
async def test_a_load_that_fails_gives_its_memory_back_and_may_be_tried_again(error: Exception) -> None:
    bench = Bench(400)
    bench.error = error
    with pytest.raises(EngineFailed) as caught:
        await bench.manager.load("m")
    assert bench.manager.state("m") is Lifecycle.FAILED
    assert bench.manager.error("m") is caught.value
    assert bench.reserved == 0
    assert bench.engines[0].state is EngineState.STOPPED
    bench.error = None
    assert await bench.manager.load("m") is bench.engines[1]
    assert bench.sized == 2, "the files may have been mended"
    assert bench.manager.error("m") is None


async def test_a_death_is_seen_at_once_and_told_when_the_process_has_ended() -> None:
    bench = Bench(400)
    manager = bench.manager
    await manager.load("m")
    first = bench.engines[0]
    bench.told.clear()
    first.die()
    assert manager.engine("m") is None
    assert manager.state("m") is Lifecycle.UNLOADING
    assert [found.state for found in manager.states()] == ["unloading"]
    assert bench.reserved == 400, "its process has not ended yet"
    first.on_died(-9)
    assert bench.told == [("down", "m", -9), ("state", "failed")]
    assert bench.reserved == 0
    assert isinstance(manager.error("m"), EngineFailed)
    assert await manager.load("m") is bench.engines[1]
    first.on_died(-9)
    assert manager.state("m") is Lifecycle.READY, "only the engine that it has can die"


async def test_a_load_waits_for_the_process_before_it() -> None:
    bench = Bench(600)
    await bench.manager.load("m")
    bench.engines[0].die()
    again = asyncio.create_task(bench.manager.load("m"))
    for _ in range(3):
        await asyncio.sleep(0)
    assert len(bench.engines) == 1
    bench.engines[0].on_died(-9)
    assert (await again).state is EngineState.READY
    assert bench.reserved == 600
    assert [found[:2] for found in bench.told if found[0] != "state"] == [("up", "m"), ("down", "m"), ("up", "m")]
    # Stopped while it waits so, it waits no longer.
    bench.engines[1].die()
    again = asyncio.create_task(bench.manager.load("m"))
    await asyncio.sleep(0)
    await bench.manager.stop()
    with pytest.raises(EngineFailed, match="given up"):
        await again
    assert bench.engines[1].state is EngineState.STOPPED
    assert bench.reserved == 0


async def test_unloading() -> None:
    bench = Bench(400)
    manager = bench.manager
    await manager.unload("m")
    await manager.load("m")
    bench.told.clear()
    manager.drain("m")
    assert manager.state("m") is Lifecycle.DRAINING
    assert manager.engine("m") is bench.engines[0], "what runs on it goes on"
    assert await manager.load("m") is bench.engines[0]
    assert manager.state("m") is Lifecycle.READY
    manager.drain("m")
    await asyncio.gather(manager.unload("m"), manager.unload("m"))
    assert manager.state("m") is Lifecycle.ABSENT
    assert bench.reserved == 0
    assert [found[:2] for found in bench.told if found[0] != "state"] == [("up", "m"), ("down", "m")]
    assert bench.states()[:4] == ["draining", "ready", "draining", "unloading"]


@pytest.mark.parametrize("way", ["unload", "stop"])
async def test_loading_is_given_up_at_once(way: str) -> None:
    bench = Bench(400)
    bench.slow = True
    task = asyncio.create_task(bench.manager.load("m"))
    await bench.until_started()
    async with asyncio.timeout(5):
        await asyncio.gather(*(getattr(bench.manager, way)(*(["m"] if way == "unload" else [])) for _ in range(2)))
    with pytest.raises(EngineFailed, match="given up"):
        await task
    assert bench.manager.state("m") is Lifecycle.ABSENT
    assert bench.engines[0].state is EngineState.STOPPED
    assert bench.reserved == 0


async def test_a_caller_who_gives_up_does_not_end_the_load_of_others() -> None:
    bench = Bench(400)
    bench.slow = True
    one, other = (asyncio.create_task(bench.manager.load("m")) for _ in range(2))
    await bench.until_started()
    one.cancel()
    await asyncio.gather(one, return_exceptions=True)
    assert one.cancelled()
    bench.engines[0].loading.set()
    assert await other is bench.engines[0]


async def test_requirements_that_no_device_meets() -> None:
    manager = Bench(1).manager
    manager.check_fits("m", None)
    manager.check_fits("m", Requirements(cpu_memory_bytes=900))
    for requirements in (Requirements(cpu_memory_bytes=1100), Requirements(vram_bytes=1)):
        with pytest.raises(InsufficientCapacity):
            manager.check_fits("m", requirements)


def test_an_illegal_transition_raises() -> None:
    manager = Bench(1).manager
    with pytest.raises(IllegalTransition, match="absent cannot become ready"):
        manager._models["m"].go(Lifecycle.READY)


def test_an_unknown_engine_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="steam"):
        make_engine(config("m", engine="steam"), ModelSize(source="x"))


@pytest.mark.parametrize(
    ("error", "kind"),
    [(InvalidRequest("/home/me/model is broken"), CannotLoad), (OSError("/home/me/model"), EngineFailed)],
)
async def test_callers_hear_nothing_of_this_machines_folders(error: Exception, kind: type[EngineFailed]) -> None:
    bench = Bench(10)
    bench.size_error = error
    with pytest.raises(kind) as caught:
        await bench.manager.load("m")
    assert "/home" not in str(caught.value)
    assert isinstance(caught.value, CannotLoad) == (kind is CannotLoad)
    assert bench.manager.state("m") is Lifecycle.FAILED


async def test_memory_beyond_a_grant_is_not_explained_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(100)
    await bench.manager.load("m")
    monkeypatch.setattr(bench.engines[0], "measured_memory", lambda: 900)
    bench.foreign_bytes = 900
    await bench.manager.observe()
    assert bench.ledger.free_bytes("cpu") == 1000 - 100 - 800
