"""The disk under a gateway is full: calls are answered or refused with the reason, and nothing of them is lost."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.cli.faults.disks import SmallDisk, why_no_disk
from support import wait_until
from system import NOOP, Process, System, running

COUNT = 30
DISK_BYTES = 1 << 26


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    if reason := why_no_disk():
        pytest.skip(reason)
    found = SmallDisk(tmp_path / "small", size_bytes=DISK_BYTES)
    yield found
    found.make_room()
    found.remove()


def chat(gateway: Process, number: int) -> httpx.Response:
    body = {"model": "noop", "messages": [{"role": "user", "content": f"{number} " * 2_000}]}
    return httpx.post(f"{gateway.url}/v1/chat/completions", json=body, timeout=60)


def post(gateway: Process, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(gateway.url + path, json=body, timeout=60)


def reasons(gateway: Process) -> str:
    return httpx.get(f"{gateway.url}/readyz", timeout=10).text


@pytest.mark.slow
def test_calls_end_and_are_known_later(kafka: Any, kafka_prefix: str, tmp_path: Path, disk: SmallDisk) -> None:
    system = System(kafka.bootstrap_servers, kafka_prefix, tmp_path / "system")
    place = {"PENSTOCK_GATEWAY__VIEW_PATH": str(disk.path / "view.sqlite")}
    with running(system):
        system.worker().wait_ready()
        gateway = system.gateway(env=place).wait_ready()
        assert chat(gateway, 0).status_code == 200
        disk.fill()
        assert disk.is_full()
        answers = [chat(gateway, number) for number in range(1, COUNT)]
        wait_until(lambda: "full" in reasons(gateway), 30, lambda: f"{reasons(gateway)}\n{gateway.tail()}")
        told = {(answer.status_code, answer.text) for answer in answers if answer.status_code != 200}
        assert all(status == 503 and "full" in text for status, text in told), told
        disk.make_room()
        wait_until(lambda: "full" not in reasons(gateway), 60, lambda: f"{reasons(gateway)}\n{gateway.tail()}")
        assert chat(gateway, COUNT).status_code == 200
        gateway.kill9()
        again = system.gateway("g2", env=place).wait_ready()
        completed = sum(answer.status_code == 200 for answer in answers) + 2
        seen = httpx.get(f"{again.url}/v1/requests", params={"limit": 100, "status": "completed"}).json()["data"]
        assert len(seen) >= completed
        assert {event.status for event in system.outcomes().values()} == {"completed"}
        assert again.stop() == 0, again.tail()


@pytest.mark.slow
def test_commands_about_waiting_requests_hold_or_are_refused(
    kafka: Any, kafka_prefix: str, tmp_path: Path, disk: SmallDisk
) -> None:
    """What was answered with 202 holds at the worker that starts later; what was refused can be said again."""
    one_by_one = {**NOOP, "options": {"tokens": 4, "delay_ms": 20, "slots": 1}}
    system = System(kafka.bootstrap_servers, kafka_prefix, tmp_path / "system", models=[one_by_one])
    with running(system):
        gateway = system.gateway(env={"PENSTOCK_GATEWAY__VIEW_PATH": str(disk.path / "view.sqlite")}).wait_ready()
        body = {"task": "text_generation", "model": "noop", "priority": 9, "payload": {"prompt": "go"}}
        waiting = [post(gateway, "/v1/requests", body).json()["request_id"] for _ in range(COUNT)]
        lifted, high = waiting[-3:], {"priority": "high"}
        commands = [
            (f"/v1/requests/{lifted[0]}/reprioritize", high),
            ("/v1/requests/reprioritize", {"ids": lifted[1:], **high}),
            (f"/v1/requests/{waiting[0]}/cancel", {}),
            ("/v1/requests/cancel", {"ids": [waiting[1]]}),
        ]
        disk.fill()
        more = [post(gateway, "/v1/requests", {**body, "payload": {"prompt": "go " * 2_000}}) for _ in range(COUNT)]
        wait_until(lambda: "full" in reasons(gateway), 30, lambda: f"{reasons(gateway)}\n{gateway.tail()}")
        waiting += [one.json()["request_id"] for one in more if one.status_code == 202]
        answers = [post(gateway, path, fields) for path, fields in commands]
        refused = [one for one in answers if one.status_code != 202]
        assert all(one.status_code == 503 and "full" in one.text for one in refused), [one.text for one in refused]
        disk.make_room()
        wait_until(lambda: "full" not in reasons(gateway), 60, lambda: f"{reasons(gateway)}\n{gateway.tail()}")
        for (path, fields), before in zip(commands, answers, strict=True):
            if before.status_code != 202:
                assert post(gateway, path, fields).status_code == 202
        system.worker().wait_ready()
        wait_until(lambda: len(system.outcomes()) == len(waiting), 60, lambda: system.outcomes())
        outcomes = system.outcomes()
        assert [outcomes[one].status for one in waiting] == ["cancelled"] * 2 + ["completed"] * (len(waiting) - 2)
        ended = sorted(waiting[2:], key=lambda one: outcomes[one].created_at)
        # What the worker read first may have started before it knew of the others.
        assert set(lifted) <= set(ended[:8]), [waiting.index(one) for one in ended]
