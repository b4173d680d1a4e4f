"""The feeder when partitions go to another bridge: their work ends here, and leaves its place in the window."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import httpx
import pytest

from penstock.cli.paths import free_port
from penstock.common import admin
from penstock.common.configuration import KafkaSection
from penstock.common.group_consumer import Listener, Read
from penstock.common.settings import KafkaSettings
from penstock.gateway.bridge import feeder as feeder_module
from penstock.gateway.bridge.app import run_bridge
from penstock.gateway.bridge.feeder import QueueFeeder
from penstock.gateway.bridge.settings import BridgeSection, BridgeSettings
from penstock.gateway.queues.settings import QueueMergeSection, QueueSection
from penstock.gateway.side_process import EXIT_FAILED, EXIT_OK, EXIT_USAGE, Status
from penstock.schemas.topics import TP
from support import wait_until_async

FIRST, SECOND = ("jobs", 0), ("jobs", 1)


class World:
    """A feeder whose window has room for one message, with fakes for errands, consumer and what the bridge knows."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun: list[TP] = []
        self.cancelled: list[TP] = []
        self.counted: list[str] = []
        self.commits: dict[TP, int] = {}
        self.flushed = self.looks = 0
        self.end = asyncio.Event()
        monkeypatch.setattr(admin, "partition_counts", lambda *_: Mock(**{"get.return_value": 1}))
        monkeypatch.setattr(feeder_module, "GroupConsumer", self._join)
        mine: Any = self
        self.feeder = QueueFeeder(
            [QueueSection(topic="jobs")],
            "strict",
            QueueMergeSection(window=1),
            KafkaSettings(),
            mine,
            mine,
            counted=lambda _, outcome: self.counted.append(outcome),
            on_failure=lambda reason: None,
        )

    def _join(self, kafka: Any, topics: Any, group_id: str | None, listener: Listener, *, base: str) -> Any:
        self.listener: Any = listener
        return SimpleNamespace(waits_for=None, start=lambda: None, commit=self.commits.update, hold=lambda topics: None)

    # -- as errands, which last until they are cancelled or `end` is set

    async def run(self, queue: QueueSection, read: Read, tries: int) -> str:
        self.begun.append(read.tp)
        try:
            await self.end.wait()
        except asyncio.CancelledError:
            self.cancelled.append(read.tp)
            raise
        return "completed"

    async def flush(self) -> None:
        self.flushed += 1

    # -- as what the bridge knows

    async def start(self) -> None: ...
    def check(self) -> None: ...

    def look_again(self) -> None:
        self.looks += 1

    # -- what happens to it

    def reads(self, tp: TP) -> None:
        self.listener.on_batch([Read(tp, 0, None, b"x", 1)])

    async def begins(self, *tps: TP) -> None:
        await wait_until_async(lambda: self.begun == [*tps], 5, lambda: str(self.begun))


@pytest.fixture
async def world(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    made = World(monkeypatch)
    made.feeder.start()
    await wait_until_async(lambda: made.feeder.work.waits_for is None, 10)
    made.listener.on_assigned([FIRST, SECOND])
    yield made
    await made.feeder.cancel()


@pytest.mark.parametrize("turns", range(6))
async def test_a_revoked_message_leaves_its_place_in_the_window_however_far_it_is(world: World, turns: int) -> None:
    world.reads(FIRST)
    for _ in range(turns):
        await asyncio.sleep(0)
    await world.listener.on_revoked([FIRST])
    assert (world.cancelled, world.looks, world.flushed) == (world.begun, 1, 1)
    world.reads(SECOND)
    await world.begins(*world.cancelled, SECOND)
    assert world.commits.get(FIRST, 0) == 0


async def test_a_message_is_committed_and_counted_when_it_is_settled(world: World) -> None:
    world.reads(FIRST)
    world.end.set()
    await wait_until_async(lambda: world.commits.get(FIRST) == 1, 5)
    assert world.counted == ["completed"]


@pytest.mark.parametrize("turns", range(5))
async def test_a_stop_ends_all_and_commits_nothing_also_when_a_message_arrives(world: World, turns: int) -> None:
    world.reads(FIRST)
    for _ in range(turns):
        await asyncio.sleep(0)
    _, left = await asyncio.wait({asyncio.create_task(world.feeder.cancel())}, timeout=5)
    assert not left, "it continues"
    assert (world.commits.get(FIRST, 0), world.counted) == (0, [])


async def test_a_bridge_that_starts_is_no_fault_and_one_without_its_topic_is(monkeypatch: pytest.MonkeyPatch) -> None:
    feeder, status = World(monkeypatch).feeder, Status()
    monkeypatch.setattr(admin, "partition_counts", lambda *_: dict[str, int]())
    assert status.by(feeder.work.waits_for) == "starting"
    feeder.start()
    await wait_until_async(lambda: status.by(feeder.work.waits_for) == "unavailable", 5)
    await feeder.cancel()


# -- a bridge as a process


def settings(port: int) -> BridgeSettings:
    return BridgeSettings(
        kafka=KafkaSection(bootstrap_servers=f"127.0.0.1:{free_port()}"),
        bridge=BridgeSection(health_port=port),
        queues=[QueueSection(topic="jobs")],
    )


async def test_without_queues_there_is_nothing_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert await run_bridge(BridgeSettings()) == EXIT_USAGE
    assert (
        capsys.readouterr().err == "penstock bridge: there are no [[queues]] to read: see docs/how-to/integrations.md\n"
    )


async def test_a_port_that_is_taken_is_named(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert await run_bridge(settings(port)) == EXIT_FAILED
    assert f"127.0.0.1:{port} cannot be bound" in caplog.text


async def test_without_a_broker_it_lives_says_why_it_reads_nothing_and_stops() -> None:
    port = free_port()
    running = asyncio.create_task(run_bridge(settings(port)))
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:

        async def says_why() -> bool:
            try:
                assert (await http.get("/healthz")).json() == {"status": "ok"}
                answer = await http.get("/readyz")
            except httpx.ConnectError:
                return False
            assert answer.status_code == 503
            return "reach" in answer.json()["reason"]

        await wait_until_async(says_why, 30, "it says that no broker answers")
        os.kill(os.getpid(), signal.SIGTERM)
        assert await asyncio.wait_for(running, 20) == EXIT_OK
