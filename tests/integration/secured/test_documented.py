"""The commands and files of "A secured Kafka" in docs/deploy.md, as they stand there."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from doc_blocks import blocks
from penstock.cli import children
from penstock.cli.embedded_kafka import EmbeddedKafka, java
from penstock.cli.kafka_jars import kafka_jars
from penstock.cli.paths import free_port, silent
from support import wait_until
from system import BROKERS

PAGE = Path(__file__).parents[3] / "docs" / "deploy.md"
PENSTOCK = [sys.executable, "-m", "penstock.cli.main"]


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """The section's blocks by language, on ports that are free, in a folder with their files and the broker."""
    monkeypatch.chdir(tmp_path)
    found: dict[str, list[str]] = {}
    for block in blocks(PAGE):
        if block.section == "A secured Kafka":
            found.setdefault(block.language, []).append(block.text)
    ports = {port: str(free_port()) for port in ("9091", "9092", "9093", "9094")}

    def moved(text: str) -> str:
        return re.sub(r"909[1-4]", lambda port: ports[port[0]], text)

    assert {name: len(texts) for name, texts in found.items()} == {"sh": 2, "properties": 1, "console": 1, "toml": 1}
    run(found["sh"][0])
    (tmp_path / "penstock.toml").write_text(moved(found["toml"][0]))
    properties = dict(line.split("=", 1) for line in moved(found["properties"][0]).splitlines() if line)
    broker = EmbeddedKafka(tmp_path / "kafka", int(ports["9092"]), properties=properties)
    with broker:
        BROKERS.append(broker)
        try:
            yield {"user": moved(found["console"][0]), "start": found["sh"][1]}
        finally:
            BROKERS.remove(broker)


def run(script: str) -> str:
    done = subprocess.run(["bash", "-ec", script], capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, (script, done.stdout, done.stderr)
    return done.stdout


def test_from_nothing_to_a_running_system(written: dict[str, str], tmp_path: Path) -> None:
    tool = f"{java()} -cp {':'.join(map(str, kafka_jars(silent)))} kafka.admin.ConfigCommand"
    run(written["user"].replace("kafka-configs.sh", tool))
    commands = [line.removeprefix("penstock ") for line in written["start"].splitlines()]
    assert commands == ["doctor", "topics create", "gateway"]
    checked = subprocess.run([*PENSTOCK, "doctor"], capture_output=True, text=True, timeout=180, check=False)
    assert "ok    kafka " in checked.stdout, checked
    run(" ".join([*PENSTOCK, "topics create --partitions 1"]))
    port, log = free_port(), tmp_path / "gateway.log"
    gateway = children.spawn(["env", f"PENSTOCK_GATEWAY__PORT={port}", *PENSTOCK, "gateway"], log=log)

    def connected() -> bool:
        assert gateway.poll() is None, log.read_text()
        try:
            return httpx.get(f"http://127.0.0.1:{port}/v1/requests", timeout=5).status_code == 200
        except httpx.HTTPError:
            return False

    try:
        wait_until(connected, 120, lambda: log.read_text())
        settings = (tmp_path / "penstock.toml").read_text().replace("change-me", "wrong")
        (tmp_path / "penstock.toml").write_text(settings)
        refused = subprocess.run([*PENSTOCK, "doctor"], capture_output=True, text=True, timeout=180, check=False)
        assert refused.returncode == 1
        assert 'check kafka.security."sasl.password"' in refused.stdout
    finally:
        assert children.stop(gateway, grace_s=60) == 0, log.read_text()
