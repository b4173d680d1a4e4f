"""What a gateway follows and writes: partitions that are added, a disk that is full, ids of a registry, headers."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from confluent_kafka.admin import NewPartitions

from penstock.common import admin
from penstock.common.admin_clients import admin_client
from penstock.common.clock import now_ms
from penstock.common.reader import RawMessage, read_to_end
from penstock.gateway.view import follower as follower_module
from penstock.gateway.view import unwritten as unwritten_module
from penstock.gateway.view.store import Store
from penstock.gateway.view.view import View
from penstock.schemas.codec import default_codec
from penstock.schemas.errors import BrokerUnavailable, PenstockError
from penstock.schemas.ids import new_request_id
from penstock.schemas.records import ConversationMessage, conversation_message_key
from penstock.schemas.requests import parse_request
from registry_server import Registry, foreign
from support import wait_until


def more_partitions(place: Any, topics: list[str], count: int) -> None:
    client = admin_client(place.kafka)
    for future in client.create_partitions([NewPartitions(topic, count) for topic in topics]).values():
        future.result(20)
    wait_until(lambda: admin.partition_counts(place.kafka, topics) == dict.fromkeys(topics, count), describe="added")


def put_on(scribe: Any, topic: str, record: Any, partition: int) -> Any:
    """Once the producer knows the partition."""

    def taken() -> Any:
        try:
            return scribe.put(topic, record, b"k", partition=partition)
        except (AssertionError, PenstockError):
            return None

    return wait_until(taken, 20, f"{topic}/{partition} takes a record")


def test_partitions_that_are_added_are_read(own_place: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all topics that it follows; and while it cannot read one it is not ready."""
    gateway, scribe = own_place.gateway(rediscover_s=0.3), own_place.scribe
    topic = scribe.names.request("text_generation", 5)
    before = scribe.request()
    with monkeypatch.context() as patch:

        def away(*_: Any) -> Any:
            raise BrokerUnavailable("not now")

        patch.setattr(follower_module.admin, "begin_offsets", away)
        more_partitions(own_place, [topic, scribe.names.result, scribe.names.status], 4)
        wait_until(lambda: "is not read yet" in gateway.get("/readyz").text, 20, lambda: gateway.get("/readyz").text)
    wait_until(lambda: gateway.get("/readyz").status_code == 200, 20, lambda: gateway.get("/readyz").text)
    job = scribe.job("added")
    put_on(scribe, topic, job.request, 3)
    assert gateway.get("/v1/requests/added").json()["status"] == "accepted"
    for one in (job, before):
        one.end("x")
        assert gateway.get(f"/v1/requests/{one.id}", params={"wait": 10}).json()["result"]["text"] == "x"


def test_an_empty_view_reads_the_topics_in_the_order_of_their_times(
    own_place: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small requests are read much faster than large outcomes: nearly all that ended long ago would be live at once."""
    count, scribe = 3_000, own_place.scribe
    outcome_text = "x" * 8_000
    for _ in range(count):
        request = parse_request(
            {"task": "text_generation", "payload": {"prompt": "p"}}, request_id=new_request_id(), now_ms=now_ms()
        )
        topic, key = scribe.names.request(request.task, request.priority), request.request_id.encode()
        scribe.transport.send(topic, default_codec().encode(request), key=key)
        job = scribe.job(request.request_id)
        scribe.transport.send(scribe.names.result, default_codec().encode(job.result_event(outcome_text)), key=key)
    scribe.transport.flush(30)
    most = 0

    class Watched(View):
        def apply(self, messages: Sequence[RawMessage]) -> None:
            nonlocal most
            super().apply(messages)
            most = max(most, self.live_count)

    monkeypatch.setattr("penstock.gateway.connecting.View", Watched)
    gateway = own_place.gateway()
    seen = gateway.get("/v1/requests", params={"limit": 100, "status": "completed"}).json()["data"]
    assert len(seen) == 100
    assert most < count / 4


def test_a_disk_that_is_full_from_the_start_is_told(own_place: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading stops at a bound; from then on what the view says of live requests may be old, and it says so."""
    jobs = [own_place.scribe.request() for _ in range(8)]

    def full(*_: Any) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(Store, "_write", full)
        patch.setattr(unwritten_module, "MAX_ENTRIES", 3)
        patch.setattr("penstock.gateway.view.store.MAX_WAITING", 1)
        gateway = own_place.gateway(ready=False)
        wait_until(lambda: "is full" in gateway.get("/readyz").text, 30, lambda: gateway.get("/readyz").text)

        def stands_still() -> bool:
            own_place.scribe.request()
            answer = gateway.get(f"/v1/requests/{jobs[0].id}")
            return answer.status_code == 503 and answer.headers["retry-after"]

        wait_until(stands_still, 30, "what is known of a live request is not told as if it were new")
        refused = gateway.http.post("/v1/requests", json={"task": "text_generation", "payload": {"prompt": "p"}})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
        assert "is full" in refused.json()["error"]["message"]
        assert refused.headers["retry-after"]
    wait_until(lambda: gateway.get("/readyz").status_code == 200, 30, lambda: gateway.get("/readyz").text)
    assert {gateway.get(f"/v1/requests/{job.id}").json()["status"] for job in jobs} == {"accepted"}


def test_what_a_gateway_writes_says_what_it_is(gateway: Any, scribe: Any) -> None:
    request_id = gateway.submit()
    gateway.http.post(f"/v1/requests/{request_id}/cancel")
    for topic, kind in ((scribe.names.request("text_generation", 5), "InferenceRequest"), (scribe.names.control, "Co")):
        records = read_to_end(scribe.settings, topic)
        (headers,) = [dict(one.headers) for one in records if request_id.encode() in (one.key or b"")]
        assert headers["content-type"] == b"application/avro"
        assert headers["ce_type"].startswith(f"penstock.v1.{kind}".encode())
        assert headers["ce_source"] == b"penstock-gateway"
        assert ("traceparent" in headers) == (kind == "InferenceRequest")


@pytest.fixture
def registry() -> Iterator[Registry]:
    with Registry.running() as server:
        yield server


def test_ids_of_a_registry_may_stand_on_every_topic(own_place: Any, registry: Registry) -> None:
    scribe = own_place.scribe
    gateway = own_place.gateway(schema_registry={"url": registry.url, "write": True})
    request_id = gateway.submit(conversation_id="c1")
    turn = ConversationMessage(
        request_id=request_id,
        tenant="default",
        conversation_id="c1",
        direction="in",
        role="user",
        content="p",
        created_at=1,
    )
    gateway.http.post("/v1/conversations", json={"id": "c1"}).raise_for_status()
    topic = scribe.names.conversation("default", "c1")
    scribe.put(topic, foreign("ConversationMessage")(turn), conversation_message_key(turn).encode())
    (item,) = gateway.get("/v1/conversations/c1/items").json()["data"]
    assert item["content"][0]["text"] == "p"
    # Of an id that nobody knows the records are passed by, and what stands behind them is read.
    scribe.put(scribe.names.result, b"\0\0\0\0\7unknown", request_id.encode())
    event = scribe.job(request_id).result_event("x")
    scribe.put(scribe.names.result, foreign("ResultEvent")(event), request_id.encode())
    found = gateway.get(f"/v1/requests/{request_id}", params={"wait": 10}).json()
    assert (found["status"], found["result"]["text"]) == ("completed", "x")
    assert len(registry.asked) <= 6, "each id is asked for once in a while"
