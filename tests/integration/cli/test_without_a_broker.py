"""Commands whose broker is dead say so in words of ours: no line of librdkafka reaches a terminal or a log."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from penstock.cli.paths import free_port
from support import wait_until

LIBRDKAFKA = re.compile(r"^%\d\|.*", re.MULTILINE)
PARTS = ("gateway", "worker", "bridge", "webhooks", "summarizer")
CONFIG = """
[kafka]
bootstrap_servers = "{servers}"
[gateway]
port = {gateway}
[worker]
health_port = {worker}
[bridge]
health_port = {bridge}
[webhooks]
health_port = {webhooks}
secret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLasw"
[summarizer]
health_port = {summarizer}
[[models]]
id = "m"
source = "noop"
engine = "noop"
[[queues]]
topic = "jobs"
result_topic = "answers"
"""


@pytest.fixture
def servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Two brokers that are named and do not answer."""
    found = ",".join(f"127.0.0.1:{free_port()}" for _ in range(2))
    config = tmp_path / "penstock.toml"
    config.write_text(CONFIG.format(servers=found, **{part: free_port() for part in PARTS}))
    monkeypatch.setenv("PENSTOCK_CONFIG", str(config))
    monkeypatch.setenv("PENSTOCK_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("PENSTOCK_WORKER__DATA_DIR", str(tmp_path / "worker"))
    monkeypatch.setenv("PENSTOCK_GATEWAY__VIEW_PATH", str(tmp_path / "view.sqlite"))
    return found


def penstock(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "penstock.cli.main", *arguments]


@pytest.mark.slow
def test_commands_end_in_words_of_ours(servers: str) -> None:
    up, dlq = f"up --bootstrap-servers {servers}", f"dlq list --bootstrap-servers {servers}"
    codes = {"topics create": 3, "topics check": 3, "topics list": 3, dlq: 3, "doctor": 1, up: 3}
    running = {one: subprocess.Popen(penstock(*one.split()), stdout=-1, stderr=-1, text=True) for one in codes}
    for command, process in running.items():
        said = "".join(process.communicate(timeout=120))
        assert (process.returncode, LIBRDKAFKA.findall(said)) == (codes[command], []), f"{command}: {said}"
        assert servers.split(",")[0] in said, f"{command}: {said}"


@pytest.mark.slow
def test_parts_that_wait_for_their_broker_log_in_words_of_ours(servers: str, tmp_path: Path) -> None:
    logs = {part: tmp_path / f"{part}.log" for part in PARTS}
    with ExitStack() as stack:
        for part, log in logs.items():
            out = stack.enter_context(log.open("wb"))
            process = subprocess.Popen(penstock(part), stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
            stack.callback(end, process)
        for part, log in logs.items():
            wait_until(partial(has, log, servers.split(",")[0]), 60, lambda: f"{part}: {log.read_text()}")  # noqa: B023
            assert LIBRDKAFKA.findall(log.read_text()) == [], f"{part}: {log.read_text()}"


def has(log: Path, words: str) -> bool:
    return words in log.read_text()


def end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(20)
