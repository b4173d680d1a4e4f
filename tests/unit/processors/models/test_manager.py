"""The catalog and the life of models: memory first, one load for all who ask, nothing left behind by a failed one."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from penstock.processors.core.admission import CannotLoad, DeviceCapacity, Ledger, MemoryShort
from penstock.processors.engines.base import EngineState
from penstock.processors.engines.noop import NoopEngine
from penstock.processors.models.manager import (
    Catalog,
    IllegalTransition,
    Lifecycle,
    ModelConfig,
    ModelManager,
    make_engine,
    share_cores,
)
from penstock.schemas.errors import EngineFailed, InsufficientCapacity, InvalidRequest, ModelNotFound
from penstock.schemas.records import Requirements


def config(model: str, **fields: Any) -> ModelConfig:
    return ModelConfig(id=model, source=fields.pop("source", "noop"), engine=fields.pop("engine", "noop"), **fields)


class Heavy(NoopEngine):
    """Needs memory, takes its time to start, and may fail to."""

    def __init__(self, need_bytes: int, error: Exception | None = None) -> None:
        super().__init__("m", {})
        self.need_bytes, self.error = need_bytes, error
        self.started = 0

    def memory_need(self) -> int:
        return self.need_bytes

    async def start(self) -> None:
        self.started += 1
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        await super().start()


def manager_of(engine: NoopEngine, total_bytes: int = 1000, **config_fields: Any) -> tuple[ModelManager, Ledger]:
    ledger = Ledger([DeviceCapacity(device="cpu", kind="cpu", total_bytes=total_bytes)])
    return ModelManager(Catalog([config("m", **config_fields)]), ledger, make=lambda _: engine), ledger


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
    engine = Heavy(400)
    manager, ledger = manager_of(engine)
    assert manager.engine("m") is None
    found = await asyncio.gather(*(manager.ensure_loaded("m") for _ in range(5)))
    assert set(found) == {engine}
    assert engine.started == 1
    assert ledger.reserved_bytes("cpu") == 400
    assert manager.engine("m") is engine
    assert manager.state("m") is Lifecycle.READY
    await manager.stop()
    assert engine.state is EngineState.STOPPED
    assert ledger.reserved_bytes("cpu") == 0


async def test_what_never_fits_is_told_with_need_and_capacity() -> None:
    manager, ledger = manager_of(Heavy(4000))
    with pytest.raises(InsufficientCapacity) as caught:
        await manager.ensure_loaded("m")
    assert caught.value.details == {"need": 4000, "capacity": 1000, "unit": "bytes"}
    assert ledger.reserved_bytes("cpu") == 0


async def test_what_does_not_fit_now_may_be_asked_again() -> None:
    engine = Heavy(400)
    manager, ledger = manager_of(engine)
    other = ledger.grant("other", 800, "cpu", 0.0)
    assert other is not None
    with pytest.raises(EngineFailed):
        await manager.ensure_loaded("m")
    assert engine.started == 0
    ledger.release(other)
    assert await manager.ensure_loaded("m") is engine


@pytest.mark.parametrize("error", [EngineFailed("no"), OSError("disk"), RuntimeError("torch")])
async def test_a_load_that_fails_gives_its_memory_back_and_may_be_tried_again(error: Exception) -> None:
    engine = Heavy(400, error)
    manager, ledger = manager_of(engine)
    with pytest.raises(EngineFailed):
        await manager.ensure_loaded("m")
    assert manager.state("m") is Lifecycle.FAILED
    assert ledger.reserved_bytes("cpu") == 0
    assert engine.state is EngineState.STOPPED
    engine.error = None
    assert await manager.ensure_loaded("m") is engine


async def test_a_cancelled_load_leaves_nothing_reserved() -> None:
    engine = Heavy(400)
    manager, ledger = manager_of(engine)
    task = asyncio.create_task(manager.ensure_loaded("m"))
    async with asyncio.timeout(5):
        while not engine.started:
            await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert ledger.reserved_bytes("cpu") == 0
    assert await manager.ensure_loaded("m") is engine


async def test_requirements_that_no_device_meets() -> None:
    manager, _ = manager_of(Heavy(1))
    manager.check_fits("m", None)
    manager.check_fits("m", Requirements(cpu_memory_bytes=900))
    for requirements in (Requirements(cpu_memory_bytes=1100), Requirements(vram_bytes=1)):
        with pytest.raises(InsufficientCapacity):
            manager.check_fits("m", requirements)


def test_an_illegal_transition_raises() -> None:
    manager, _ = manager_of(Heavy(1))
    with pytest.raises(IllegalTransition, match="configured cannot become ready"):
        manager._loaded["m"].go(Lifecycle.READY)


def test_an_unknown_engine_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="steam"):
        make_engine(config("m", engine="steam"))


async def test_memory_that_is_short_now_is_waited_for() -> None:
    manager, ledger = manager_of(Heavy(600))
    other = ledger.grant("another", 500, "cpu", 0.0)
    assert other is not None
    with pytest.raises(MemoryShort):
        await manager.ensure_loaded("m")
    ledger.release(other)
    assert (await manager.ensure_loaded("m")).state is EngineState.READY


@pytest.mark.parametrize(
    ("error", "kind"),
    [(InvalidRequest("/home/me/model is broken"), CannotLoad), (OSError("/home/me/model"), EngineFailed)],
)
async def test_callers_hear_nothing_of_this_machines_folders(error: Exception, kind: type[EngineFailed]) -> None:
    manager, _ = manager_of(Heavy(10, error))
    with pytest.raises(kind) as caught:
        await manager.ensure_loaded("m")
    assert "/home" not in str(caught.value)
    assert isinstance(caught.value, CannotLoad) == (kind is CannotLoad)


async def test_what_can_never_fit_is_refused_at_once_the_next_time() -> None:
    manager, _ = manager_of(Heavy(5_000))
    manager.check_fits("m", None)
    with pytest.raises(InsufficientCapacity):
        await manager.ensure_loaded("m")
    with pytest.raises(InsufficientCapacity):
        manager.check_fits("m", None)


async def test_memory_beyond_a_grant_is_not_explained_by_it() -> None:
    class Greedy(Heavy):
        def measured_memory(self) -> int | None:
            return 900

    manager, _ = manager_of(Greedy(100))
    await manager.ensure_loaded("m")
    assert manager.granted_memory() == {"cpu": 100}
