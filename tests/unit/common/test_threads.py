"""Threads for one kind of calls: what hangs holds up its own kind, and keeps its place until it ends."""

from __future__ import annotations

import asyncio
import threading

import pytest

from penstock.common.threads import DaemonThreads, in_daemon_thread
from support import wait_until_async


class Hanging:
    """Calls that hang until they are let go of."""

    def __init__(self) -> None:
        self.let_go = threading.Event()
        self.begun = 0

    def call(self, value: int) -> int:
        self.begun += 1
        assert self.let_go.wait(30)
        return value


async def test_so_many_run_at_once_and_more_wait_in_line() -> None:
    threads, hanging = DaemonThreads(3), Hanging()
    calls = [asyncio.ensure_future(threads.run(hanging.call, number)) for number in range(7)]
    await wait_until_async(lambda: hanging.begun == 3, 10)
    assert await asyncio.wait_for(asyncio.to_thread(lambda: "free"), 10) == "free"
    assert hanging.begun == 3
    hanging.let_go.set()
    assert await asyncio.wait_for(asyncio.gather(*calls), 10) == list(range(7))


async def test_one_that_hangs_keeps_its_place_when_nobody_waits_for_it_any_more() -> None:
    threads, hanging = DaemonThreads(1), Hanging()
    gone = asyncio.ensure_future(threads.run(hanging.call, 1))
    await wait_until_async(lambda: hanging.begun == 1, 10)
    gone.cancel()
    other = asyncio.ensure_future(threads.run(lambda: "other"))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(other), 0.1)
    hanging.let_go.set()
    assert await asyncio.wait_for(other, 10) == "other"


async def test_an_error_is_the_callers_and_frees_the_place() -> None:
    threads = DaemonThreads(1)

    def fail() -> None:
        raise OSError(28, "No space left on device")

    for _ in range(3):
        with pytest.raises(OSError, match="No space left"):
            await asyncio.wait_for(threads.run(fail), 10)


async def test_a_thread_is_there_for_the_next_call_and_ends_when_none_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.common.threads.LINGER_S", 0.2)
    threads = DaemonThreads(1)
    used = [await threads.run(threading.current_thread) for _ in range(20)]
    assert len(set(used)) < 20
    await wait_until_async(lambda: not any(thread.is_alive() for thread in used), 10)
    assert await asyncio.wait_for(threads.run(lambda: "again"), 10) == "again"


async def test_calls_are_done_while_threads_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that gives up waiting in the moment in which a call counts on it still does that call."""
    monkeypatch.setattr("penstock.common.threads.LINGER_S", 0.0005)
    threads = DaemonThreads(4)

    async def caller(number: int) -> list[int]:
        done: list[int] = []
        for turn in range(1500):
            done.append(await threads.run(lambda value=number * 1000 + turn: value))
            await asyncio.sleep(0.0005 if turn % 3 else 0)
        return done

    found = await asyncio.wait_for(asyncio.gather(*(caller(number) for number in range(6))), 60)
    assert found == [[number * 1000 + turn for turn in range(1500)] for number in range(6)]


async def test_a_call_of_its_own_ends_its_thread() -> None:
    used = await in_daemon_thread(threading.current_thread)
    await wait_until_async(lambda: not used.is_alive(), 10)
