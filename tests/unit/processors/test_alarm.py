"""A sleep that may be ended early."""

from __future__ import annotations

import asyncio

from penstock.processors.alarm import Alarm


async def test_who_sleeps_wakes_by_time_or_by_the_alarm() -> None:
    alarm = Alarm()
    alarm.ring()  # nobody sleeps: it is not remembered
    await asyncio.wait_for(alarm.sleep(0.001), 10)
    for rings in (1, 2):
        sleeping = asyncio.create_task(alarm.sleep(3_600))
        await asyncio.sleep(0)
        for _ in range(rings):
            alarm.ring()
        await asyncio.wait_for(sleeping, 10)


async def test_a_sleep_that_is_cancelled_leaves_nothing_behind() -> None:
    alarm = Alarm()
    task = asyncio.create_task(alarm.sleep(0.01))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    alarm.ring()
    await asyncio.wait_for(alarm.sleep(0.02), 10)
