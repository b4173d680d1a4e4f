"""A process whose stop hangs ends within its bound all the same, and its log says on what."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.cli.paths import free_port
from support import create_topics, wait_until
from system import System

# The process, with the part `owner.method` of its stop in a version that never ends, and a short bound.
HANGS = """
import asyncio, sys
import {module} as module
import penstock.{room} as app

async def hang(*_, **__):
    await asyncio.Event().wait()

module.{part} = hang
app.STOP_S = 0.5
sys.argv = ["penstock", "{command}"]
from penstock.cli.main import main
main()
"""
PARTS = {
    "worker": ("processors.app", "penstock.processors.app:WorkerApp._leave"),
    "gateway": ("gateway.app", "uvicorn:Server.shutdown"),
    "bridge": ("gateway.side_process", "penstock.gateway.bridge.feeder:QueueFeeder.cancel"),
    "webhooks": ("gateway.side_process", "penstock.gateway.webhooks.dispatcher:Dispatcher.cancel"),
    "summarizer": ("gateway.side_process", "penstock.gateway.summarizer.requests:Requests.close"),
}


def answers(port: int, path: str) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/{path}", timeout=2).status_code == 200
    except httpx.HTTPError:
        return False


def configured(kafka: Any, prefix: str, folder: Path) -> System:
    create_topics(kafka.bootstrap_servers, prefix)
    return System(
        kafka.bootstrap_servers,
        prefix,
        folder,
        worker_options={"drain_s": 0, "data_dir": str(folder / "worker")},
        gateway_options={"drain_s": 0, "view_path": str(folder / "view.sqlite")},
        queues=[{"topic": "jobs"}],
        webhook_options={"secret": "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLasw"},
    )


@pytest.mark.parametrize("command", PARTS)
def test_it_says_what_hangs_and_ends(kafka: Any, kafka_prefix: str, tmp_path: Path, command: str) -> None:
    room, part = PARTS[command]
    module, _, name = part.partition(":")
    port, log = free_port(), tmp_path / "log"
    port_of = f"PENSTOCK_{command.upper()}__{'PORT' if command == 'gateway' else 'HEALTH_PORT'}"
    env = {"PENSTOCK_CONFIG": str(configured(kafka, kafka_prefix, tmp_path).config()), port_of: str(port)}
    program = HANGS.format(module=module, part=name, room=room, command=command)
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-c", program], env={**os.environ, **env}, stdout=out, stderr=subprocess.STDOUT
        )
    try:
        path = "readyz" if command == "worker" else "healthz"  # a worker answers before its start is over
        wait_until(lambda: answers(port, path), 60, log.read_text)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 1, log.read_text()
    finally:
        process.kill()
        process.wait(10)
    lines = log.read_text().splitlines()
    assert any(f"{command}.stop_hangs seconds=0" in line for line in lines), lines
    assert any(".stop_hangs task=" in line and "hang (<string>:" in line for line in lines), lines
