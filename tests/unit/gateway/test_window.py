"""Lines in flight: how many, and how large they are together."""

from __future__ import annotations

import asyncio

from penstock.gateway.routes.window import Budget, Window


async def takes(window: Window, size: int) -> bool:
    """Whether there is room at once."""
    taking = asyncio.ensure_future(window.take(size))
    await asyncio.sleep(0)
    taking.cancel()
    await asyncio.wait([taking])
    return not taking.cancelled()


async def test_lines_and_their_bytes_are_bounded() -> None:
    window = Window(lambda: 3, most_bytes=10)
    assert [await takes(window, size) for size in (20, 1)] == [True, False], "a single one always has room"
    assert not window.take_nowait(1)
    window.give(20)
    assert [await takes(window, size) for size in (1, 1, 9, 1, 1)] == [True, True, False, True, False]


async def test_windows_share_a_budget_and_each_has_room_for_one_line() -> None:
    budget = Budget(10)
    first, second = Window(lambda: 9, budget), Window(lambda: 9, budget)
    assert [await takes(first, 5), await takes(first, 5), await takes(second, 5)] == [True] * 3
    assert [await takes(first, 1), await takes(second, 1)] == [False] * 2
    first.close()
    assert await takes(second, 5)
