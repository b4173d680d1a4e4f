"""A rolling change of `penstock.toml`: workers of a pool whose files differ end nothing that another one can run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from support import create_topics
from system import NOOP, Process, System, eventually
from worker_requests import outcome, send, statuses, turn

Make = Callable[..., System]
OLD = {**NOOP, "id": "old", "tasks": ["text_generation"]}
NEW: dict[str, Any] = {**NOOP, "id": "new", "tasks": ["text_generation", "embedding"], "aliases": ["newer"]}
SETTINGS = {"session_timeout_s": 6, "heartbeat_s": 1, "state_interval_s": 0.5}


def worker(system: System, name: str, *models: dict[str, Any], pool: str | None = None) -> Process:
    """A worker whose file has these models."""
    system.models = models
    own_pool = {} if pool is None else {"PENSTOCK_WORKER__POOL": pool}
    return system.worker(name, env={"PENSTOCK_WORKER__WORKER_ID": name, **own_pool}).wait_ready()


@pytest.mark.slow
def test_what_one_worker_lacks_another_runs(make_system: Make) -> None:
    system = make_system(worker_options=SETTINGS)
    both, lacking = worker(system, "both", OLD, NEW), worker(system, "lacking", OLD)
    eventually(lambda: both.assigned() == lacking.assigned() == 10, 60, both.tail)
    gateway = system.gateway().wait_ready()
    texts = [{"request_id": f"t{n}", "model": "newer", "priority": n % 10} for n in range(20)]
    vectors = [
        {"request_id": f"e{n}", "task": "embedding", "model": "new" if n % 2 else None, "payload": {"input": "x"}}
        for n in range(12)
    ]
    turns = [turn(f"c{n}", "hi", f"c{n}", model="new") for n in range(8)]
    send(system, *texts, *vectors, *turns)
    ids = [request["request_id"] for request in (*texts, *vectors)]
    assert {request_id: outcome(system, request_id, 60).status for request_id in ids} == dict.fromkeys(ids, "completed")
    assert {outcome(system, request_id).worker_id for request_id in ids} == {"both"}

    # Where the files differ is reported everywhere.
    missing = "the model new is missing on lacking"
    with httpx.Client(base_url=gateway.url, timeout=60) as http:
        eventually(lambda: http.get("/readyz").json()["reason"] == missing, 60, gateway.tail)
        listed = {one["id"]: one["missing_on"] for one in http.get("/v1/admin/models").json()["data"]}
    assert listed == {"old": [], "new": ["lacking"]}
    for process in (both, lacking):
        eventually(lambda log=process.log: f"worker.files_differ {missing}" in log.read_text(), 60, process.tail)

    # A turn stays with its conversation, and says what it waits for.
    stay = {n for n in range(8) if f"c{n}" not in system.outcomes()}
    eventually(lambda: all("queued" in statuses(system, f"c{n}") for n in stay - ended(system, stay)), 60, lacking.tail)
    assert lacking.stop() == 0, lacking.tail()
    worker(system, "lacking-2", OLD, NEW)
    eventually(lambda: "worker.files_agree" in both.log.read_text(), 60, both.tail)
    for number in range(8):
        assert outcome(system, f"c{number}", 60).status == "completed"
    system.wait_drained(60)


def ended(system: System, numbers: set[int]) -> set[int]:
    return {number for number in numbers if f"c{number}" in system.outcomes()}


@pytest.mark.slow
def test_a_gateway_takes_what_one_worker_has_whichever_wrote_last(make_system: Make) -> None:
    """One worker has the new file, then one with the old file starts: both are served."""
    system = make_system(worker_options=SETTINGS)
    changed = {**NEW, "id": "old"}
    gateway = system.gateway().wait_ready()
    worker(system, "changed", changed)
    again = worker(system, "unchanged", OLD)
    with httpx.Client(base_url=gateway.url, timeout=60) as http:

        def written_last() -> bool:
            workers = {one["worker_id"]: one for one in http.get("/v1/admin/stats").json()["workers"]}
            return workers.keys() >= {"changed", "unchanged"} and workers["unchanged"]["state"] == "running"

        eventually(written_last, 60, again.tail)
        text = {"task": "text_generation", "model": "newer", "payload": {"prompt": "hi"}}
        vector = {"task": "embedding", "model": "old", "payload": {"input": "x"}}
        answers = [http.post("/v1/requests?wait=60", json=body).json() for body in [text, vector] * 10]
        assert [one.get("status", one) for one in answers] == ["completed"] * 20
        plain = http.get("/v1/models").json()["data"]
        assert [(one["aliases"], one["tasks"]) for one in plain if one["id"] == "old"] == [(["newer"], NEW["tasks"])]


@pytest.mark.slow
def test_what_one_worker_cannot_load_another_runs(make_system: Make, tmp_path: Path) -> None:
    system = make_system(worker_options=SETTINGS)
    broken = {**NEW, "engine": "text", "source": str(tmp_path), "options": {}, "tasks": ["text_generation"]}
    loads, fails = worker(system, "loads", OLD, NEW), worker(system, "fails", OLD, broken)
    eventually(lambda: loads.assigned() == fails.assigned() == 10, 60, loads.tail)
    turns = [turn(f"c{n}", "hi", f"c{n}", model="new") for n in range(12)]
    send(system, *({"request_id": f"r{n}", "model": "new", "priority": n % 10} for n in range(20)), *turns)
    events = [outcome(system, f"r{n}", 60) for n in range(20)]
    assert {(event.status, event.worker_id) for event in events} == {("completed", "loads")}, fails.tail()
    # A turn stays with its conversation until its worker can load the model.
    eventually(lambda: fails.log.read_text().count("model.load_failed model=new") > 2, 60, fails.tail)
    stay = set(range(12)) - ended(system, set(range(12)))
    assert stay, "some conversations are on the worker that cannot load the model"
    assert fails.stop() == 0, fails.tail()
    worker(system, "mended", OLD, NEW)
    assert {outcome(system, f"c{n}", 60).status for n in range(12)} == {"completed"}
    system.wait_drained(60)


@pytest.mark.slow
def test_a_model_that_moves_to_another_pool_takes_its_requests_along(make_system: Make) -> None:
    """From the common pool, and from one that the requests name; the workers of the new pool are started first."""
    system = make_system(worker_options=SETTINGS)
    for pool in ("p", "q"):
        create_topics(system.bootstrap, system.prefix, pool=pool)
    left = [{"request_id": f"c{n}", "model": "new"} for n in range(6)]
    named = [{"request_id": f"p{n}", "model": "new", "pool": "p"} for n in range(6)]
    send(system, *left)
    send(system, *named, pool="p")
    moved = {**NEW, "pool": "q"}
    for name, pool in (("wq", "q"), ("wp", "p"), ("w", None)):
        worker(system, name, OLD, moved, pool=pool)
    for request in (*left, *named):
        event = outcome(system, request["request_id"], 60)
        assert (event.status, event.worker_id, event.model) == ("completed", "wq", "new")
    system.wait_drained(60)


@pytest.mark.slow
def test_a_pool_that_the_common_workers_file_lacks_gets_its_requests(make_system: Make) -> None:
    """Those that waited for it, and those that come later. Turns keep their order."""
    system = make_system(worker_options=SETTINGS)
    create_topics(system.bootstrap, system.prefix, pool="q")
    common = worker(system, "common", OLD)
    early = [{"request_id": "t0", "model": "newer"}, *(turn(f"c{n}", "hi", "c", model="new") for n in range(3))]
    send(system, *early)
    for request in early:
        eventually(lambda request=request: statuses(system, request["request_id"]), 60, common.tail)
    worker(system, "wq", {**NEW, "pool": "q"}, pool="q")
    late = [{"request_id": "t1", "model": "new"}, turn("c3", "hi", "c", model="new")]
    send(system, *late)
    for request in (*early, *late):
        event = outcome(system, request["request_id"], 60)
        assert (event.status, event.worker_id, event.model) == ("completed", "wq", "new"), common.tail()
    keys = [(message.key() or b"").decode() for message in system.read(system.names.conversation("default", "c"))]
    assert [key.partition("/out/")[0] for key in keys if "/out/" in key] == ["c0", "c1", "c2", "c3"]
    system.wait_drained(60)
