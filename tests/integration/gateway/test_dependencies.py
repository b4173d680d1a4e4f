"""What a running gateway says of that which it depends on: the artifact store, the topic of orders, workers."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from penstock.common import admin
from penstock.common.clock import now_ms
from penstock.schemas.desired import model_key
from penstock.schemas.records import ModelInfo, ModelState, WorkerState
from support import create_topics, wait_until


def readyz(gateway: Any) -> dict[str, Any]:
    answer = gateway.get("/readyz")
    assert answer.status_code == 200, answer.text
    return answer.json()


def dependency(gateway: Any, name: str) -> dict[str, Any]:
    (found,) = [one for one in readyz(gateway)["dependencies"] if one["name"] == name]
    return found


def report(scribe: Any, *models: str, observed: int | None = None) -> None:
    """A live worker serves these models, and has followed orders so far."""
    states = [ModelState(model=name, state="ready", device="cpu") for name in models]
    worker = WorkerState(
        worker_id="w",
        state="running",
        started_at=1,
        updated_at=now_ms(),
        models=states,
        observed_revision=observed,
    )
    scribe.put(scribe.names.worker, worker, b"w")


def know(scribe: Any, name: str) -> None:
    info = ModelInfo(
        model=name, tasks=["text_generation"], engine="noop", state="ready", updated_at=now_ms(), worker_id="w"
    )
    scribe.put(scribe.names.model, info, model_key(name, None).encode())


def replaced_by_a_file(folder: Path) -> bool:
    shutil.rmtree(folder, ignore_errors=True)
    try:
        folder.write_text("no folder")
    except IsADirectoryError:
        return False
    return True


def test_a_store_that_cannot_be_written_is_told_and_requests_are_taken(own_place: Any) -> None:
    gateway, folder = own_place.gateway(probe_s=0.1), own_place.folder / "artifacts"

    def ready() -> bool:
        report(own_place.scribe)
        return readyz(gateway)["status"] == "ready"

    wait_until(lambda: dependency(gateway, "artifacts")["ok"] is True, 20, lambda: readyz(gateway))
    wait_until(ready, 20, lambda: readyz(gateway))
    wait_until(lambda: replaced_by_a_file(folder), 20, "a probe makes the folder again")
    # Without keys whoever asks is an operator. A probe that ran when the folder went says another cause first.
    wait_until(lambda: str(folder) in (readyz(gateway)["reason"] or ""), 20, lambda: readyz(gateway))
    body = readyz(gateway)
    assert body["status"] == "degraded"
    assert "the artifact store cannot be used" in body["reason"]
    assert dependency(gateway, "artifacts")["ok"] is False
    assert gateway.submit()
    folder.unlink()
    wait_until(ready, 20, lambda: readyz(gateway))
    # A probe may just be under way.
    wait_until(lambda: not any(path.is_file() for path in folder.rglob("*")), 20, "nothing stays behind")


def test_a_topic_of_orders_that_is_missing_is_named(own_place: Any) -> None:
    gateway, topic = own_place.gateway(probe_s=0.1), own_place.kafka.names.desired
    wait_until(lambda: dependency(gateway, "orders")["ok"] is True, 20, lambda: readyz(gateway))
    admin.delete_topic(own_place.kafka, topic)
    wait_until(lambda: dependency(gateway, "orders")["ok"] is False, 20, lambda: readyz(gateway))
    reason = dependency(gateway, "orders")["reason"]
    assert topic in reason
    assert "`penstock topics create`" in reason
    create_topics(own_place.bootstrap, own_place.prefix, partitions=2)
    wait_until(lambda: dependency(gateway, "orders")["ok"] is True, 20, lambda: readyz(gateway))


@pytest.mark.parametrize("observed", [None, 0])
def test_a_worker_that_does_not_follow_orders_is_named(own_place: Any, observed: int | None) -> None:
    scribe, gateway = own_place.scribe, own_place.gateway(probe_s=0.1, worker_late_s=1.0)
    know(scribe, "smol")
    wait_until(lambda: gateway.get("/v1/models").json()["data"], describe="the gateway knows the model")
    for action in ("pause", "resume"):
        assert gateway.http.post(f"/v1/admin/models/smol/{action}").status_code == 202

    def not_followed() -> bool:
        report(scribe, "smol", observed=observed)
        return dependency(gateway, "orders")["reason"] == "w do not follow the orders about models and classes"

    def followed() -> bool:
        report(scribe, "smol", observed=1)
        return dependency(gateway, "orders")["ok"] is True

    wait_until(not_followed, 30, lambda: readyz(gateway))
    assert readyz(gateway)["status"] == "degraded"
    wait_until(followed, 30, lambda: readyz(gateway))


def test_requests_for_a_model_that_nobody_serves_are_counted(own_place: Any) -> None:
    scribe, gateway = own_place.scribe, own_place.gateway()
    know(scribe, "far")
    know(scribe, "smol")
    report(scribe, "smol")
    wait_until(lambda: readyz(gateway)["models_without_worker"] == ["far"], 20, lambda: readyz(gateway))
    assert readyz(gateway)["waiting_without_worker"] == []
    far = [gateway.submit(model="far") for _ in range(2)]
    gateway.submit(model="smol")
    first = min(gateway.get(f"/v1/requests/{one}").json()["created_at"] for one in far)
    (waiting,) = readyz(gateway)["waiting_without_worker"]
    assert (waiting["model"], waiting["requests"], waiting["since"]) == ("far", 2, first)
    assert waiting["reason"] == "no live worker has far"
    for one in far:
        scribe.job(one).end("done")
    wait_until(lambda: readyz(gateway)["waiting_without_worker"] == [], 20, lambda: readyz(gateway))
