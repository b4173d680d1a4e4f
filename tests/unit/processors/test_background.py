"""A fault in a task that nobody awaits is heard, also in the rooms that start such tasks."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.common.transport import AsyncTransport, Delivery
from penstock.processors.background import BackgroundTasks, on_faults
from penstock.processors.engines.base import EngineState, Limits
from penstock.processors.engines.managed.server_process import ServerProcess
from penstock.processors.engines.process.host import ChildEngine
from penstock.processors.erasing import Erasing
from penstock.processors.kafka import pool_topics
from penstock.processors.kafka.pool_topics import PoolTopics
from penstock.processors.models.catalog import ModelConfig
from penstock.processors.models.manager import ModelManager
from penstock.schemas.records import ControlCommand, Origin
from support import wait_until_async


@pytest.fixture
async def faults() -> list[str]:
    told: list[str] = []
    on_faults(asyncio.get_running_loop(), lambda: told.append("fault"))
    return told


async def test_a_fault_is_told_and_named(faults: list[str], caplog: pytest.LogCaptureFixture) -> None:
    async def fails() -> None:
        raise KeyError("x")

    tasks = BackgroundTasks()
    with caplog.at_level(logging.ERROR):
        task = tasks.start(fails(), "measure m")
        await asyncio.wait([task])
        await wait_until_async(lambda: faults, 5)
    assert faults == ["fault"]
    (record,) = caplog.records
    assert record.getMessage() == "background.task_failed task=measure m"
    assert record.exc_info is not None


async def test_a_callback_of_the_loop_that_raises_is_a_fault(faults: list[str]) -> None:
    def fails(*_: Any) -> None:
        raise KeyError("x")

    loop = asyncio.get_running_loop()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        done: asyncio.Future[None] = loop.create_future()
        done.add_done_callback(fails)
        for count, begin in enumerate(
            (
                lambda: loop.call_soon(fails),
                lambda: loop.call_later(0.001, fails),
                lambda: done.set_result(None),
                lambda: loop.call_soon_threadsafe(fails),
                lambda: loop.add_writer(ours, lambda: (loop.remove_writer(ours), fails())),
            ),
            start=1,
        ):
            begin()
            await wait_until_async(lambda count=count: len(faults) == count, 5)


async def test_a_callback_of_a_delivery_that_raises_is_a_fault_and_the_others_run(faults: list[str]) -> None:
    reports: list[Callable[[Delivery], None]] = []
    sends: Any = SimpleNamespace(send=lambda topic, value, *, on_delivery, **_: reports.append(on_delivery))
    transport, ran = AsyncTransport(sends), list[Delivery]()

    def fails(_: Delivery) -> None:
        raise KeyError("x")

    for callback in (fails, ran.append):
        transport.produce_nowait("t", b"x", callback=callback)
    for report in reports:
        report(Delivery(topic="t", partition=0, offset=0, timestamp_ms=0))
    await wait_until_async(lambda: ran, 5)
    assert faults == ["fault"]


async def test_what_ends_or_is_cancelled_is_no_fault(faults: list[str]) -> None:
    ended = asyncio.Event()
    tasks = BackgroundTasks()

    async def waits() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            ended.set()

    waiting = tasks.start(waits())
    await tasks.start(asyncio.sleep(0))
    await tasks.cancel()
    assert waiting.cancelled()
    assert ended.is_set()
    await asyncio.sleep(0)
    assert faults == []


async def test_what_a_library_leaves_unheard_is_none_of_ours(faults: list[str]) -> None:
    async def fails() -> None:
        raise KeyError("x")

    task: Any = asyncio.create_task(fails())
    await asyncio.wait([task])
    del task
    await asyncio.sleep(0)
    assert faults == []


async def test_an_engine_that_cannot_be_stopped_is_heard(faults: list[str]) -> None:
    """Else its model would be unloading for ever."""

    class Unstoppable:
        state = EngineState.READY

        async def start(self) -> None:
            pass

        async def stop(self) -> None:
            raise RuntimeError("as in a bug")

        on_died: Any = None

    class Reports:
        def __init__(self) -> None:
            self.told: list[str] = []

        def __getattr__(self, name: str) -> Any:
            return lambda *_: self.told.append(name)

    reports = Reports()
    config = ModelConfig(id="m", source="noop", engine="noop", tasks=["text_generation"])
    manager = ModelManager([config], reports, make=lambda *_: Unstoppable())  # type: ignore[arg-type]
    manager.load("m", 0, ("cpu",), 0)
    await wait_until_async(lambda: reports.told, 10)
    manager.unload("m", 0)
    await wait_until_async(lambda: faults, 10, lambda: reports.told)
    assert "gone" not in reports.told


async def test_a_look_for_a_topic_that_fails_is_heard(faults: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Else requests of that pool would wait for ever."""

    def broken(*_: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(pool_topics, "admin", SimpleNamespace(partition_counts=broken))
    topics = PoolTopics(None)  # type: ignore[arg-type]
    topics.look("inference.requests.x", lambda: None, lambda: None)
    await wait_until_async(lambda: faults, 10)


async def test_a_death_that_cannot_be_told_is_heard(faults: list[str]) -> None:
    """Else its replica would stay ready, and its runs would hang."""

    class Process:
        async def exit_code(self) -> int:
            return -9

        async def end(self, patience_s: float) -> int:
            return -9

    def broken(code: int) -> None:
        raise RuntimeError("as in a bug")

    engine = ChildEngine("m", "bare", "noop", {}, limits=Limits(slots=1))
    engine.on_died = broken
    engine._process = Process()  # type: ignore[assignment]
    engine._state = EngineState.READY
    engine._lost()
    await wait_until_async(lambda: faults, 10)
    await engine.stop()


async def test_a_server_s_end_that_cannot_be_told_is_heard(faults: list[str], tmp_path: Path) -> None:
    def broken(code: int) -> None:
        raise RuntimeError("as in a bug")

    server = ServerProcess(tmp_path / "log", broken, grace_s=0.1)
    await server.start(["true"], {"PATH": os.environ["PATH"]})
    await wait_until_async(lambda: faults, 20)
    await server.end()


async def test_an_erasure_that_fails_by_a_fault_is_heard(faults: list[str]) -> None:
    """Else the request's words would stand in the conversation for ever."""
    asked: list[int] = []

    def owns(topic: str, partition: int) -> bool:
        asked.append(partition)
        if len(asked) > 1:
            raise RuntimeError("as in a bug")
        return True

    command = ControlCommand(
        kind="erase",
        request_id="r",
        tenant="default",
        created_at=1,
        conversation_id="c",
        origin=Origin(topic="t", partition=0, offset=0, append_time_ms=1),
    )
    erasing = Erasing(None, None, owns)  # type: ignore[arg-type]
    erasing.erase(command)
    await wait_until_async(lambda: faults, 10)
    await erasing.close()
