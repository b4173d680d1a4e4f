"""A bridge as a process: what it needs to start, and that it stops in time without a broker."""

from __future__ import annotations

import asyncio
import os
import signal
import socket

import httpx
import pytest

from penstock.cli.paths import free_port
from penstock.common.configuration import KafkaSection
from penstock.gateway.bridge.app import run_bridge
from penstock.gateway.bridge.settings import BridgeSection, BridgeSettings
from penstock.gateway.queues.settings import QueueSection
from penstock.gateway.side_process import EXIT_FAILED, EXIT_OK, EXIT_USAGE
from support import wait_until_async


def settings(port: int) -> BridgeSettings:
    return BridgeSettings(
        kafka=KafkaSection(bootstrap_servers=f"127.0.0.1:{free_port()}"),
        bridge=BridgeSection(health_port=port),
        queues=[QueueSection(topic="jobs")],
    )


async def test_without_queues_there_is_nothing_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert await run_bridge(BridgeSettings()) == EXIT_USAGE
    assert capsys.readouterr().err == "penstock bridge: there are no [[queues]] to read: see docs/how-to.md\n"


async def test_a_port_that_is_taken_is_named(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert await run_bridge(settings(port)) == EXIT_FAILED
    assert f"127.0.0.1:{port} cannot be bound" in caplog.text


async def test_without_a_broker_it_lives_says_why_it_reads_nothing_and_stops() -> None:
    port = free_port()
    running = asyncio.create_task(run_bridge(settings(port)))
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:

        async def reason() -> str:
            try:
                assert (await http.get("/healthz")).json() == {"status": "ok"}
                answer = await http.get("/readyz")
            except httpx.ConnectError:
                return ""
            assert answer.status_code == 503
            return str(answer.json()["reason"])

        await wait_until_async(lambda: _says(reason(), "reach"), 30, "it says that no broker answers")
        os.kill(os.getpid(), signal.SIGTERM)
        assert await asyncio.wait_for(running, 20) == EXIT_OK


async def _says(reason: object, words: str) -> bool:
    assert asyncio.iscoroutine(reason)
    return words in await reason
