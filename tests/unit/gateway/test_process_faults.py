"""What a callback of the event loop raises is logged and ends its process, in order and with the exit code 1.

The bridge, webhooks and the summarizer run by the same `side_process.run`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from pathlib import Path

import httpx
import pytest

from penstock.cli.paths import free_port
from penstock.common.configuration import KafkaSection
from penstock.gateway.app import run_gateway
from penstock.gateway.bridge.app import run_bridge
from penstock.gateway.bridge.settings import BridgeSettings
from penstock.gateway.settings import GatewaySettings
from support import wait_until_async


def gateway(kafka: KafkaSection, port: int, folder: Path) -> Coroutine[None, None, int]:
    section = {"port": port, "view_path": folder / "view.sqlite", "drain_s": 0}
    return run_gateway(GatewaySettings.model_validate({"kafka": kafka, "gateway": section}))


def bridge(kafka: KafkaSection, port: int, folder: Path) -> Coroutine[None, None, int]:
    section = {"health_port": port, "artifacts_dir": str(folder)}
    return run_bridge(BridgeSettings.model_validate({"kafka": kafka, "bridge": section, "queues": [{"topic": "jobs"}]}))


@pytest.mark.parametrize("process", [gateway, bridge])
async def test_a_callback_that_raises_ends_the_process(
    process: Callable[[KafkaSection, int, Path], Coroutine[None, None, int]],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    port, kafka = free_port(), KafkaSection(bootstrap_servers=f"127.0.0.1:{free_port()}")
    running = asyncio.create_task(process(kafka, port, tmp_path))
    async with httpx.AsyncClient() as http:

        async def lives() -> bool:
            try:
                return (await http.get(f"http://127.0.0.1:{port}/healthz")).status_code == 200
            except httpx.TransportError:
                return False

        await wait_until_async(lives, 60)

    def fails() -> None:
        raise KeyError("as in a bug")

    with caplog.at_level(logging.ERROR):
        asyncio.get_running_loop().call_soon(fails)
        async with asyncio.timeout(60):
            assert await running == 1
    (record,) = [one for one in caplog.records if one.exc_info and one.exc_info[0] is KeyError]
    assert "fails" in record.getMessage()
