"""What tests of restored topics share: commands with a system's configuration, and streams that have begun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import httpx

from penstock.common import admin
from system import Process, System


def penstock(system: System, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`penstock` with the configuration of this system."""
    env = {**os.environ, "PENSTOCK_CONFIG": str(system.config())}
    return subprocess.run(
        [sys.executable, "-m", "penstock.cli.main", *arguments], env=env, capture_output=True, text=True
    )


def reconcile(system: System, *options: str) -> dict[str, Any]:
    """What the command says that it has done."""
    done = penstock(system, "topics", "reconcile", "--json", *options)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def restore_findings(system: System) -> list[str]:
    """What `penstock doctor` says of topics that were restored."""
    checks = json.loads(penstock(system, "doctor", "--json").stdout)
    return [one["detail"] for one in checks if one["name"] == "restored"]


def text_so_far(gateway: Process, request_id: str) -> str:
    """The text of a stream when three pieces of it are there."""
    pieces: list[str] = []
    with httpx.stream("GET", f"{gateway.url}/v1/requests/{request_id}/events", timeout=30) as stream:
        for line in stream.iter_lines():
            if line.startswith("data:") and (event := json.loads(line[5:]))["type"] == "chunk":
                pieces.append(event["text"])
                if len(pieces) == 3:
                    break
    return "".join(pieces)


def shift_offsets(system: System) -> None:
    """Let the logs begin behind offset 0, as retention does: in a mirror they begin at 0 again."""
    gateway = system.process("g")
    topic = system.names.request("text_generation", 5)
    for _ in range(200):
        assert gateway.request(gateway.submit(model="noop"), wait=30)["status"] == "completed"
        if all(system.ends([topic]).values()):  # each partition has a record
            break
    system.wait_drained()
    ends = system.ends([*system.names.request_topics(), system.names.result, system.names.status])
    admin.delete_records(system.kafka, {tp: end for tp, end in ends.items() if end})
