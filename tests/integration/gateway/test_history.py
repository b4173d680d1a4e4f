"""`GET /v1/admin/history` on real gateways: all answer the same, also one that was killed meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from support import wait_until
from system import Process, System
from worker_requests import engine

GB = 10**9


def history(gateway: Process, **asked: int) -> dict[str, Any]:
    return httpx.get(f"{gateway.url}/v1/admin/history", params=asked).raise_for_status().json()


def lasting(gateway: Process) -> dict[str, Any]:
    """Without the time of the answer."""
    return {name: figures for name, figures in history(gateway).items() if name != "until"}


def total(figures: list[int | None]) -> int:
    return sum(figure or 0 for figure in figures)


def agree(*gateways: Process) -> dict[str, Any]:
    """The answer of all, once it is the same and has the memory that workers report from time to time."""
    answers: list[dict[str, Any]] = []

    def same() -> bool:
        answers[:] = [lasting(one) for one in gateways]
        return all(one == answers[0] for one in answers) and bool(answers[0]["devices"])

    wait_until(same, 20, lambda: f"all answer the same: {answers}")
    return answers[0]


def test_gateways_answer_the_same_also_one_that_was_killed(make_system: Callable[..., System]) -> None:
    card = {"kind": "simulated", "name": "sim0", "total_bytes": GB}
    model = {**engine(tokens=10, delay_ms=50), "device": "simulated", "vram_bytes": GB // 2}
    system = make_system(models=[model], devices=[card], worker_options={"state_interval_s": 0.5})
    system.start_all(["g1", "g2", "w1"])
    g1, g2 = system.process("g1"), system.process("g2")
    first = [g1.submit(priority=number % 10) for number in range(20)]
    for request_id in first:
        assert g1.request(request_id, wait=30)["status"] == "completed"
    late = g1.submit(execution_timeout_ms=50, max_attempts=1)
    wait_until(lambda: g1.request(late)["done"], 30, "it has ended")
    found = agree(g1, g2)
    assert total(found["accepted"]) == 21
    assert {status: total(counts) for status, counts in found["ended"].items()} == {"completed": 20, "dead_lettered": 1}
    assert total(found["completion_tokens"]) == 200
    assert max(ms or 0 for ms in found["run_ms"]["p50"]) >= 450
    (device,) = (one for one in found["devices"] if one["device"] == "sim0")
    assert (device["limit_bytes"][-1], device["reserved_bytes"][-1]) == (GB, GB // 2)
    g1.kill9()
    meanwhile = [g2.submit() for _ in range(5)]
    for request_id in meanwhile:
        assert g2.request(request_id, wait=30)["status"] == "completed"
    again = system.gateway("g1").wait_ready()
    assert total(agree(again, g2)["accepted"]) == 26


@pytest.mark.parametrize(
    ("asked", "wanted"),
    [
        ({"range_s": 90}, "range_s must be a multiple of 60"),
        ({"range_s": 172_860}, "range_s must be at most 172800"),
        ({"step_s": 0}, "step_s must be at least 60"),
    ],
)
def test_a_range_is_bounded_and_of_whole_minutes(gateway: Any, asked: dict[str, int], wanted: str) -> None:
    answer = gateway.get("/v1/admin/history", params=asked)
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, wanted)
    longest = gateway.get("/v1/admin/history", params={"range_s": 172_800}).json()
    assert len(longest["times"]) == len(longest["accepted"]) == 2_880
