"""A store of artifacts that fails: outputs that are made wait for it, are stored later and are not made again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from penstock.schemas.codec import default_codec
from penstock.schemas.records import StatusEvent
from system import Process, System, eventually
from worker_requests import command, outcome, send

LARGE = {"id": "large", "source": "noop", "engine": "noop", "tasks": ["text_generation"]} | {
    "options": {"tokens": 1, "chars": 400_000, "slots": 4}
}
SMALL = {"id": "small", "source": "noop", "engine": "noop", "tasks": ["text_generation"]}


def details(system: System, request_id: str) -> list[str]:
    """What its statuses say beside its state."""
    events = [default_codec().decode(m.value() or b"", StatusEvent) for m in system.read(system.names.status)]
    return [event.detail for event in events if event.request_id == request_id and event.detail]


def wait_for_the_store(system: System, worker: Process, request_ids: list[str]) -> None:
    for name in request_ids:
        eventually(lambda name=name: details(system, name), 30, worker.tail)


def test_outputs_are_stored_when_the_store_is_back(make_system: Callable[..., System]) -> None:
    """A file stands where the tenant's folder must be made. It stands there still when the worker is killed."""
    system = make_system(models=[LARGE, SMALL])
    folder: Path = system.folder / "artifacts" / "default"
    folder.parent.mkdir(exist_ok=True)
    folder.write_text("in the way")
    worker = system.worker().wait_ready()
    names = ["a", "b", "c"]
    send(system, *({"request_id": name, "model": "large"} for name in [*names, "cancelled"]))
    wait_for_the_store(system, worker, [*names, "cancelled"])
    (detail,) = details(system, "a")
    assert str(folder.parent) in detail, "the place"
    assert "Not a directory" in detail or "File exists" in detail, "the cause"
    send(system, {"request_id": "small", "model": "small"})
    assert outcome(system, "small").status == "completed"
    command(system, "cancel", "cancelled")
    assert outcome(system, "cancelled").status == "cancelled"
    eventually(lambda: worker.metric("penstock_outputs_not_stored") == 3, 20, worker.tail)
    assert worker.metric("penstock_output_bytes") == 0, "they are on disk"
    worker.kill9()
    worker = system.worker().wait_ready()
    eventually(lambda: all(len(details(system, name)) == 2 for name in names), 60, worker.tail)
    folder.unlink()
    for name in names:
        ended = outcome(system, name)
        assert (ended.status, ended.attempt) == ("completed", 1), worker.tail()
        kept = json.loads((folder / ended.output_artifact.artifact_id / "data").read_text())
        assert len(kept["text"]) == 400_000
    assert len(system.outcomes()) == 5
    eventually(lambda: worker.metric("penstock_outputs_not_stored") == 0, 20, worker.tail)
