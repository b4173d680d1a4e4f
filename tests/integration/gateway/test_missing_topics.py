"""Topics that were deleted under a running gateway: what it says of them, and what it goes on doing."""

from __future__ import annotations

from typing import Any

from penstock.common import admin
from penstock.common.clock import now_ms
from penstock.schemas.desired import model_key
from penstock.schemas.records import ModelInfo, ModelState, WorkerState
from support import create_topics, wait_until

CREATE = "`penstock topics create`"


def test_readiness_names_the_missing_topic_and_the_command_that_creates_it(own_place: Any) -> None:
    gateway = own_place.gateway(rediscover_s=0.1)
    topic = own_place.kafka.names.request_topics()[0]
    admin.delete_topic(own_place.kafka, topic)

    def reason() -> str:
        return str(gateway.get("/readyz").json()["reason"])

    wait_until(lambda: topic in reason(), describe=reason)
    answer = gateway.get("/readyz")
    assert (answer.status_code, answer.json()["status"]) == (503, "unavailable")
    assert CREATE in reason()
    create_topics(own_place.bootstrap, own_place.prefix, partitions=2)
    wait_until(lambda: gateway.get("/readyz").status_code == 200, describe=reason)


def report_model(scribe: Any, name: str) -> None:
    """A live worker serves this model."""
    info = ModelInfo(
        model=name, tasks=["text_generation"], engine="noop", state="ready", updated_at=now_ms(), worker_id="w"
    )
    scribe.put(scribe.names.model, info, model_key(name, None).encode())
    states = [ModelState(model=name, state="ready", device="cpu")]
    worker = WorkerState(worker_id="w", state="running", started_at=1, updated_at=now_ms(), models=states)
    scribe.put(scribe.names.worker, worker, b"w")


def test_models_are_listed_without_the_topic_of_orders_and_orders_name_it(own_place: Any) -> None:
    gateway, topic = own_place.gateway(), own_place.kafka.names.desired
    report_model(own_place.scribe, "smol")
    wait_until(lambda: gateway.get("/v1/models").json()["data"], describe="the gateway knows the model")
    assert gateway.http.post("/v1/admin/models/smol/pause").status_code == 202
    assert gateway.get("/v1/admin/models/smol").json()["paused"] is True
    admin.delete_topic(own_place.kafka, topic)

    def shown() -> dict[str, Any]:
        (model,) = gateway.get("/v1/admin/models").json()["data"]
        return model

    wait_until(lambda: shown()["paused"] is None, describe=lambda: gateway.get("/v1/admin/models").text)
    assert [one["worker_id"] for one in shown()["replicas"]] == ["w"]
    assert (shown()["state"], shown()["desired"], shown()["pinned"]) == ("ready", None, False)
    for answer in (
        gateway.http.post("/v1/admin/models/smol/load"),
        gateway.http.post("/v1/admin/models", json={"id": "new", "source": "x", "engine": "noop"}),
        gateway.http.delete("/v1/admin/models/smol"),
        gateway.http.post("/v1/admin/classes/low/pause"),
        gateway.get("/v1/admin/orders/0"),
    ):
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (503, "broker_unavailable"), answer.text
        assert topic in error["message"]
        assert CREATE in error["message"]
