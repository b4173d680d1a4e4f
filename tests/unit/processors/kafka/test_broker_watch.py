"""The broker watch: nobody waits, nobody asks; one sign wakes all."""

from __future__ import annotations

import asyncio
import threading
from unittest.mock import Mock

from penstock.processors.kafka.broker_watch import BrokerWatch
from support import wait_until_async


async def test_nobody_is_asked_while_nobody_waits() -> None:
    probe = Mock()
    watch = BrokerWatch(probe)
    watch.answered()
    await asyncio.sleep(0.3)
    assert not probe.called


async def test_all_who_wait_are_woken_by_the_first_answer() -> None:
    probe = Mock(return_value=False)
    watch = BrokerWatch(probe)
    waiting = [asyncio.create_task(watch.wait(30)) for _ in range(50)]
    await wait_until_async(lambda: watch.away)
    assert not any(task.done() for task in waiting)
    probe.return_value = True
    assert all(await asyncio.wait_for(asyncio.gather(*waiting), 5))
    assert not watch.away
    asked = probe.call_count
    await asyncio.sleep(0.3)
    assert probe.call_count <= asked + 1, "nobody waits any more"


async def test_any_client_wakes_from_any_thread() -> None:
    watch = BrokerWatch(lambda _: False)
    waiting = asyncio.create_task(watch.wait(30))
    await wait_until_async(lambda: watch.away)
    threading.Thread(target=watch.answered).start()
    assert await asyncio.wait_for(waiting, 5)


async def test_who_waited_long_enough_is_told_so() -> None:
    watch = BrokerWatch(lambda _: False)
    assert not await watch.wait(0.05)


async def test_closing_lets_all_go() -> None:
    release = threading.Event()
    watch = BrokerWatch(lambda _: release.wait(5))
    waiting = asyncio.create_task(watch.wait(30))
    await asyncio.sleep(0.15)
    watch.close()
    release.set()
    await asyncio.wait_for(waiting, 5)
    assert not await watch.wait(30)


async def test_a_probe_that_fails_oddly_does_not_end_the_watching() -> None:
    probe = Mock(side_effect=[ValueError("odd"), True])
    assert await asyncio.wait_for(BrokerWatch(probe).wait(30), 5)
