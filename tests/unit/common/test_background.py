"""What a task that nobody awaits or a callback of the loop raises is logged, and told to who ends the process."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.common.background import BackgroundTasks, on_faults
from penstock.common.transport import AsyncTransport, Delivery
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


async def test_a_task_of_one_request_that_raises_is_logged_and_ends_nothing_else(
    faults: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    async def fails() -> None:
        raise KeyError("x")

    await asyncio.wait([BackgroundTasks(ends_process=False).start(fails(), "cancel r")])
    await wait_until_async(lambda: "task=cancel r" in caplog.text)
    assert faults == []


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
