"""Outcomes of what ended before this gateway began: its file holds facts, and the result topic the rest."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient
from websockets.sync.client import connect

from support import ask_broker, wait_until

Sse = Callable[..., list[tuple[str, dict[str, Any]]]]

MANY = 150
TEXT = "a sentence that only the topic holds"


@pytest.fixture
def ended(own_place: Any) -> Any:
    """Some requests have ended at a gateway that has stopped since; another one begins on its file."""
    first = own_place.gateway("g")
    jobs = [own_place.scribe.request(conversation_id="c" if at % 2 else None) for at in range(MANY)]
    for at, job in enumerate(jobs):
        job.chunk(TEXT, 0).end(f"{TEXT} {at}") if at % 3 else job.end("", status="failed")
    wait_until(lambda: first.get(f"/v1/requests/{jobs[-1].id}").json()["done"], 20, "the last one has ended")
    first.stop()
    assert TEXT.encode() not in (own_place.folder / "g.sqlite").read_bytes(), "an index, not a copy"
    return own_place, own_place.gateway("g"), jobs


def test_what_ended_before_is_told_as_it_was(ended: Any, sse: Sse) -> None:
    _, gateway, jobs = ended
    with ThreadPoolExecutor(16) as clients:
        found = list(clients.map(lambda job: gateway.get(f"/v1/requests/{job.id}").json(), jobs))
    for at, public in enumerate(found):
        assert public["done"]
        assert "result_omitted" not in public
        if at % 3:
            assert (public["status"], public["result"]["text"]) == ("completed", f"{TEXT} {at}")
        else:
            assert public["status"] == "failed"
    listed = gateway.get("/v1/requests?limit=100&conversation_id=c&order=asc").json()["data"]
    assert [one["request_id"] for one in listed] == [job.id for job in jobs[1::2]]
    assert all(one["result"] or one["status"] == "failed" for one in listed)
    frames = sse(gateway, jobs[1].id)
    assert [frame["type"] for _, frame in frames] == ["chunk", "result"]
    assert frames[0][1]["text"] == frames[1][1]["result"]["text"] == f"{TEXT} 1"


def test_a_socket_and_a_repeat_are_told_it_too(ended: Any) -> None:
    _, gateway, jobs = ended
    with connect(gateway.ws) as socket:
        socket.send(json.dumps({"type": "subscribe", "request_id": jobs[2].id}))
        frames = [json.loads(socket.recv(timeout=15)) for _ in range(2)]
    assert [frame["type"] for frame in frames] == ["chunk", "result"]
    assert frames[1]["result"]["text"] == f"{TEXT} 2"
    answer = gateway.http.post(f"/v1/requests/{jobs[4].id}/cancel")
    assert (answer.status_code, answer.json()["result"]["text"]) == (200, f"{TEXT} 4")


def test_a_chat_is_sent_again_after_a_restart_and_has_its_answer(own_place: Any) -> None:
    """Its outcome is neither in memory nor in the file: the stock client's repeat waits until it is read."""
    first = own_place.gateway("g")
    body = {"model": "m", "messages": [{"role": "user", "content": "p"}]}

    def ask(gateway: Any) -> Any:
        return gateway.http.post("/v1/chat/completions", json=body, headers={"Idempotency-Key": "k"})

    with ThreadPoolExecutor(1) as client:
        asked = client.submit(ask, first)
        wait_until(lambda: first.get("/v1/requests").json()["data"], 20, "it is accepted")
        job = own_place.scribe.job(first.get("/v1/requests").json()["data"][0]["request_id"])
        job.end(TEXT)
        assert asked.result(20).json()["choices"][0]["message"]["content"] == TEXT
    first.stop()
    again = ask(own_place.gateway("g"))
    assert again.json()["choices"][0]["message"]["content"] == TEXT, again.text


def test_what_the_topic_has_deleted_is_said_to_be_gone(ended: Any) -> None:
    place, gateway, jobs = ended
    admin = AdminClient({"bootstrap.servers": place.bootstrap})
    topic = place.kafka.names.result
    ask_broker(
        lambda: [
            one.result(10) for one in admin.delete_records([TopicPartition(topic, at, -1) for at in (0, 1)]).values()
        ]
    )
    public = gateway.get(f"/v1/requests/{jobs[1].id}").json()
    assert (public["status"], public["done"], public["result"], public["result_omitted"]) == (
        "completed",
        True,
        None,
        True,
    )
    assert public["finished_at"] is not None
    assert gateway.get("/v1/requests?limit=5").json()["data"][0]["result_omitted"]
    refused = gateway.get(f"/v1/requests/{jobs[1].id}/events")
    assert (refused.status_code, refused.json()["error"]["code"]) == (410, "gone")
    with connect(gateway.ws) as socket:
        socket.send(json.dumps({"type": "subscribe", "request_id": jobs[2].id}))
        frame = json.loads(socket.recv(timeout=15))
    assert (frame["type"], frame["error"]["code"]) == ("error", "gone")
    assert gateway.http.delete(f"/v1/requests/{jobs[1].id}").status_code == 200
