"""Waiting and ending of tasks: a cancellation is never lost."""

from __future__ import annotations

import asyncio
import time

import pytest

from penstock.common.tasks import awake_timeout, end_all, set_within


async def test_it_says_whether_the_event_was_set_in_time() -> None:
    event = asyncio.Event()
    assert not await set_within(event, 0.01)
    asyncio.get_running_loop().call_soon(event.set)
    assert await set_within(event, 10)
    assert await set_within(event, 0)


@pytest.mark.parametrize("turns", range(5))
async def test_a_task_that_is_cancelled_while_its_event_is_set_ends(turns: int) -> None:
    """Before Python 3.12 `asyncio.wait_for` returns then, and the cancellation is lost."""
    event = asyncio.Event()

    async def for_ever() -> None:
        while True:
            await set_within(event, 30)
            event.clear()

    task = asyncio.create_task(for_ever())
    await asyncio.sleep(0.01)
    event.set()
    for _ in range(turns):
        await asyncio.sleep(0)
    _, left = await asyncio.wait({asyncio.create_task(end_all([task]))}, timeout=1)
    assert not left, "it goes on"


async def test_time_in_which_the_process_was_stopped_does_not_count() -> None:
    async def answer_after_a_stop() -> str:
        time.sleep(1.2)  # noqa: ASYNC251 - as SIGSTOP
        await asyncio.sleep(0.02)
        return "answer"

    async with awake_timeout(0.8):
        assert await answer_after_a_stop() == "answer"
    with pytest.raises(TimeoutError):
        async with awake_timeout(0.05):
            await asyncio.sleep(60)
