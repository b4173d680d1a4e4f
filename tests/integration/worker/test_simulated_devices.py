"""A worker with a simulated card: the real admission, as gateway, topics and health tell it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from support import wait_until
from system import Process, System
from worker_requests import outcome, send

GB = 10**9


def model(name: str, **fields: Any) -> dict[str, Any]:
    return {
        "id": name,
        "source": "noop",
        "engine": "noop",
        "device": "simulated",
        "vram_bytes": 60 * GB,
        "preload": False,
        "options": {"tokens": 2},
        **fields,
    }


def until(condition: Callable[[], Any], worker: Process, what: Callable[[], Any]) -> Any:
    wait_until(condition, 60, lambda: f"{what()}\n{worker.tail()}")
    return condition()


def test_models_take_turns_on_a_card_wait_for_foreign_memory_and_stop_when_it_is_not_measured(
    make_system: Callable[..., System], tmp_path: Path
) -> None:
    foreign = tmp_path / "foreign"
    foreign.write_text("0")
    card = {"kind": "simulated", "name": "sim0", "total_bytes": 80 * GB, "foreign_file": str(foreign)}
    cpu = {"kind": "cpu", "limit_bytes": GB}
    system = make_system(models=[model("a"), model("b")], devices=[card, cpu], worker_options={"state_interval_s": 0.5})
    worker, gateway = system.worker(), system.gateway()
    worker.wait_ready()
    gateway.wait_ready()

    def get(path: str) -> dict[str, Any]:
        return httpx.get(gateway.url + path, timeout=30).json()

    def device() -> dict[str, Any]:
        return next((one for one in get("/v1/admin/devices")["data"] if one["device"] == "sim0"), {})

    # Both answer, on one card that holds one of them at a time.
    for number in range(2):
        send(system, {"request_id": f"a{number}", "model": "a"}, {"request_id": f"b{number}", "model": "b"})
        for name in "ab":
            done = outcome(system, f"{name}{number}", 60)
            assert (done.status, done.model, done.device) == ("completed", name, "sim0"), worker.tail()
    until(lambda: device().get("measured_bytes") == 60 * GB, worker, device)
    held = device()["holders"]
    assert [(one["model"] in "ab", one["bytes"]) for one in held] == [(True, 60 * GB)]
    shown = device()
    assert (shown["kind"], shown["limit_bytes"], shown["reserved_bytes"]) == ("simulated", 80 * GB, 60 * GB)

    # Others come: the next load waits, and says for what.
    other = "b" if held[0]["model"] == "a" else "a"
    foreign.write_text(str(30 * GB))
    until(lambda: device()["holders"] == [] and device()["foreign_bytes"] == 30 * GB, worker, device)
    send(system, {"request_id": "waits", "model": other})
    waiting: dict[str, Any] = until(
        lambda: (found := get("/v1/requests/waits").get("waiting_for") or {}).get("reason") == "memory" and found,
        worker,
        lambda: get("/v1/requests/waits"),
    )
    assert (waiting["need_bytes"], waiting["free_bytes"]) == (60 * GB, 50 * GB)
    assert device()["holders"] == []
    foreign.write_text("0")
    assert outcome(system, "waits", 60).status == "completed"

    # What cannot be measured is granted no more: health says so, and what is loaded goes on.
    foreign.unlink()
    reasons: list[str] = until(lambda: not worker.ready() and health(worker)["reasons"], worker, lambda: health(worker))
    assert any("the device sim0 has not been measured" in one and "No such file" in one for one in reasons)
    send(system, {"request_id": "held", "model": other}, {"request_id": "later", "model": "ab".replace(other, "")})
    assert outcome(system, "held", 60).status == "completed"
    until(
        lambda: (get("/v1/requests/later").get("waiting_for") or {}).get("reason") == "memory",
        worker,
        lambda: get("/v1/requests/later"),
    )
    foreign.write_text("0")
    assert outcome(system, "later", 60).status == "completed"
    worker.wait_ready()
    assert worker.stop() == 0, worker.tail()


def counts(process: Process, runs: int) -> bool:
    return process.metric("penstock_run_seconds_count", model="a") == runs


def health(worker: Process) -> dict[str, Any]:
    return httpx.get(f"{worker.url}/readyz").json()


def test_a_worker_whose_configuration_names_a_device_that_is_not_there_says_so(
    make_system: Callable[..., System],
) -> None:
    system = make_system(devices=[{"kind": "cuda", "name": "cuda:7"}])
    worker = system.worker()
    assert worker.wait_dead() == 1
    assert "there is no cuda device cuda:7; there are cpu" in worker.tail()


RUN_S, QUEUED = 1.0, 6


def test_known_work_shows_in_metrics_estimates_and_histories(
    make_system: Callable[..., System], tmp_path: Path
) -> None:
    """One run of a second at a time: what was waited, run, loaded and held, when the last would start, and when it did.

    A letter's history has the memory of its device, also behind a redrive.
    """
    hold = tmp_path / "hold"
    options = {"tokens": 1, "first_delay_ms": 1000 * RUN_S, "hold": str(hold)}
    one = model("a", options=options, max_batch_size=1)
    card = {"kind": "simulated", "name": "sim0", "total_bytes": 80 * GB}
    system = make_system(models=[one], devices=[card], worker_options={"state_interval_s": 0.5})
    worker, gateway = system.worker(), system.gateway()
    worker.wait_ready()
    gateway.wait_ready()

    def get(path: str) -> dict[str, Any]:
        return httpx.get(gateway.url + path, timeout=30).json()

    # The first loads the model, and shows how long a run takes.
    send(system, {"request_id": "first"})
    assert outcome(system, "first", 60).status == "completed", worker.tail()
    queued = [f"q{number}" for number in range(QUEUED)]
    send(system, *({"request_id": name} for name in queued))

    def estimates() -> dict[str, str]:
        waiting = {name: get(f"/v1/requests/{name}").get("waiting_for") or {} for name in queued}
        return {name: one["estimated_start_at"] for name, one in waiting.items() if one.get("estimated_start_at")}

    found: dict[str, str] = wait_until(lambda: len(one := estimates()) > QUEUED / 2 and one, 60, worker.tail)
    estimated_s = max(map(datetime.fromisoformat, found.values())).timestamp()
    ends = [outcome(system, name, 60) for name in queued]
    # Those of one moment may change places before they start: when the last starts is known all the same.
    began_s = max(event.created_at - (0 if event.timings is None else event.timings.run_ms) for event in ends) / 1000
    assert abs(began_s - estimated_s) < QUEUED * RUN_S / 2, (estimated_s, began_s)

    runs, waited = QUEUED + 1, RUN_S * sum(range(QUEUED))
    for process in (worker, gateway):
        until(partial(counts, process, runs), worker, worker.tail)
        of_model = {"task": "text_generation", "model": "a"}
        assert runs * RUN_S <= process.metric("penstock_run_seconds_sum", **of_model) <= runs * RUN_S * 2
        waits = {**of_model, "class": "medium"}
        assert process.metric("penstock_wait_seconds_count", **waits) == runs
        # Less than a whole run each: the first may begin before the others have come.
        assert 0.9 * waited <= process.metric("penstock_wait_seconds_sum", **waits) <= 2 * waited
        held = {
            kind: process.metric("penstock_device_memory_bytes", device="sim0", kind=kind)
            for kind in ("limit", "reserved", "measured", "foreign")
        }
        assert held == {"limit": 80 * GB, "reserved": 60 * GB, "measured": 60 * GB, "foreign": 0}
    assert worker.metric("penstock_model_loads_total", model="a") == 1

    hold.touch()
    send(system, {"request_id": "dies", "execution_timeout_ms": 3_000, "max_attempts": 1})
    assert outcome(system, "dies", 60).status == "dead_lettered"
    (letter,) = until(lambda: get("/v1/admin/dlq")["data"], worker, lambda: get("/v1/admin/dlq"))
    (attempt,) = letter["history"]
    memory = {"limit_bytes": 80 * GB, "reserved_bytes": 60 * GB, "measured_bytes": 60 * GB, "foreign_bytes": 0}
    assert (attempt["error"]["code"], attempt["device"]) == ("execution_timeout", "sim0")
    assert {name: attempt["memory"][name] for name in memory} == memory
    hold.unlink()
    redriven = httpx.post(f"{gateway.url}/v1/admin/dlq/redrive", json={"ids": [letter["id"]]}, timeout=30).json()
    again = gateway.request(redriven["request_ids"][0], wait=30)
    assert (again["status"], again["redriven_from"]) == ("completed", "dies"), again
    assert again["history"][0] == attempt
    assert {name: again["history"][1]["memory"][name] for name in memory} == memory
    assert worker.stop() == 0, worker.tail()
