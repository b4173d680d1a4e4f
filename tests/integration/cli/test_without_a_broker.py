"""Commands whose broker is dead say so in words of ours: no line of librdkafka reaches a terminal or a log."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
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
@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("topics create", 3), ("topics check", 3), ("topics list", 3), ("dlq list", 3), ("doctor", 1),
        ("up --bootstrap-servers SERVERS", 3),
    ],
)  # fmt: skip
def test_a_command_ends_in_words_of_ours(command: str, code: int, servers: str) -> None:
    arguments = command.replace("SERVERS", servers).split()
    if arguments[0] == "dlq":
        arguments += ["--bootstrap-servers", servers]
    done = subprocess.run(penstock(*arguments), capture_output=True, text=True, timeout=120)
    said = done.stdout + done.stderr
    assert (done.returncode, LIBRDKAFKA.findall(said)) == (code, []), said
    assert servers.split(",")[0] in said


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_a_part_that_waits_for_its_broker_logs_in_words_of_ours(part: str, servers: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(penstock(part), stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        address = servers.split(",")[0]
        wait_until(lambda: address in log.read_text(), 60, lambda: log.read_text())
        assert LIBRDKAFKA.findall(log.read_text()) == [], log.read_text()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(20)
