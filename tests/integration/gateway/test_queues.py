"""Queues of other systems on a real broker: messages in, answers out, once, in the order of the policy."""

from __future__ import annotations

import base64
import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import uvicorn
from confluent_kafka.admin import AdminClient, NewTopic

from penstock.cli.paths import free_port
from penstock.common.admin import end_offsets
from penstock.common.reader import read_to_end
from penstock.gateway import app as gateway_app
from penstock.gateway.context import context_of_app
from penstock.gateway.queues.settings import QueueMergeSection, QueueSection
from penstock.schemas.codec import default_codec
from penstock.schemas.records import DeadLetter, InferenceRequest
from support import committed_offsets, wait_until

DEADLINE_S = 40


class Merged:
    """Topics of queues, and gateways that merge them."""

    def __init__(self, place: Any) -> None:
        self.place = place
        self.names = {name: f"{place.prefix}{name}" for name in ("batch", "batch-results", "own", "own-results")}
        admin = AdminClient({"bootstrap.servers": place.bootstrap})
        topics = [NewTopic(topic, num_partitions=1) for topic in self.names.values()]
        for made in admin.create_topics(topics).values():
            made.result(20)
        self._running: list[tuple[uvicorn.Server, threading.Thread, Any]] = []

    def gateway(self, name: str, *, policy: Any = "strict", window: int = 64, backoff_s: float = 0.2) -> Any:
        batch = QueueSection(
            topic=self.names["batch"], tenant="team", result_topic=self.names["batch-results"], weight=3
        )
        own = QueueSection(
            topic=self.names["own"], format="penstock", tenant="other", result_topic=self.names["own-results"]
        )
        merging = QueueMergeSection(window=window, backoff_s=backoff_s, group_id=f"{self.place.prefix}queues")
        settings = self.place.settings(name).model_copy(
            update={"queues": [batch, own], "queue_policy": policy, "queue_merge": merging}
        )
        app = gateway_app.create_app(settings)
        server = uvicorn.Server(gateway_app.server_config(app, "127.0.0.1", free_port(), drain_s=2))
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        self._running.append((server, thread, app))
        wait_until(lambda: context_of_app(app).connected, DEADLINE_S, f"{name} is connected")
        return app

    def metrics(self) -> str:
        """Of the gateway that was started last."""
        return context_of_app(self._running[-1][2]).metrics.render().decode()

    def stop(self) -> None:
        for server, thread, app in self._running:
            context_of_app(app).prepare_stop()
            server.should_exit = True
            thread.join(30)
            assert not thread.is_alive(), "the gateway did not stop"
        self._running.clear()

    def put(self, queue: str, *messages: bytes) -> None:
        for message in messages:
            self.place.scribe.put(self.names[queue], message, None)

    def llmd(self, message_id: str, **values: Any) -> bytes:
        body = {"id": message_id, "deadline": str(int(time.time()) + 600), "payload": {"prompt": message_id}, **values}
        return json.dumps(body).encode()

    def requests(self, topic_priority: int = 8) -> list[InferenceRequest]:
        topic = self.place.scribe.names.request("text_generation", topic_priority)
        records = sorted(read_to_end(self.place.kafka, topic), key=lambda one: one.timestamp_ms)
        return [default_codec().decode(one.value or b"", InferenceRequest) for one in records]

    def answers(self, queue: str) -> list[dict[str, Any]]:
        records = read_to_end(self.place.kafka, self.names[f"{queue}-results"])
        return [json.loads(one.value or b"null") for one in records]

    def work(self, on: Callable[[InferenceRequest], tuple[str, str]], count: int, priority: int = 8) -> None:
        """Be the worker of the next `count` requests that stand on the topic."""
        done: set[str] = set()

        def all_done() -> bool:
            for request in self.requests(priority):
                if request.request_id not in done:
                    done.add(request.request_id)
                    status, text = on(request)
                    self.place.scribe.job(request.request_id, request.tenant).end(text, status=status)
            return len(done) >= count

        wait_until(all_done, DEADLINE_S, lambda: f"{len(done)} of {count} requests came", poll_s=0.1)


@pytest.fixture
def merged(own_place: Any) -> Iterator[Merged]:
    made = Merged(own_place)
    yield made
    made.stop()


def test_messages_of_llmd_are_answered_in_their_form(merged: Merged) -> None:
    encoded = base64.b64encode(b'{"prompt": "b64"}').decode()
    merged.put(
        "batch",
        merged.llmd("object"),
        merged.llmd("b64", payload=encoded),
        merged.llmd("late", deadline="1000"),
        merged.llmd("odd", payload={"prompt": "x", "no_such_field": 1}),
        b"no message",
    )
    merged.gateway("g1")
    merged.work(lambda request: ("completed", f"to {request.payload['prompt']}"), 2)
    wait_until(lambda: len(merged.answers("batch")) >= 4, DEADLINE_S, lambda: merged.answers("batch"))
    found = {answer["id"]: answer for answer in merged.answers("batch")}
    assert found["object"]["payload"]["choices"][0]["text"] == "to object"
    back = json.loads(base64.b64decode(found["b64"]["payload"]))
    assert back["object"] == "text_completion"
    assert found["late"]["error"] == "deadline exceeded"
    assert "no_such_field" in found["odd"]["error"]
    assert all(request.tenant == "team" and request.priority == 8 for request in merged.requests())
    letters = read_to_end(merged.place.kafka, merged.place.scribe.names.dlq)
    (letter,) = [default_codec().decode(one.value or b"", DeadLetter) for one in letters]
    assert letter.original == b"no message"
    shown = f'penstock_dlq_letters{{reason="{letter.reason_code}"}} 1.0'
    wait_until(lambda: shown in merged.metrics().splitlines(), DEADLINE_S, merged.metrics)


def test_requests_of_ours_are_answered_as_http_would(merged: Merged) -> None:
    body = {"task": "text_generation", "request_id": "mine", "priority": 9, "payload": {"prompt": "p"}}
    merged.put("own", json.dumps(body).encode(), b'{"task": "text_generation", "request_id": "bad"}')
    merged.gateway("g1")
    merged.work(lambda request: ("completed", "yes"), 1)
    wait_until(lambda: merged.answers("own"), DEADLINE_S, "the answer")
    answer = merged.answers("own")[0]
    assert (answer["request_id"], answer["status"], answer["result"]["text"]) == ("mine", "completed", "yes")
    assert [request.tenant for request in merged.requests()] == ["other"]


def test_what_failed_for_a_passing_reason_is_asked_again_as_a_new_request(merged: Merged) -> None:
    merged.put("batch", merged.llmd("1"))
    merged.gateway("g1")
    seen: list[str] = []

    def work(request: InferenceRequest) -> tuple[str, str]:
        seen.append(request.request_id)
        return ("failed", "") if len(seen) == 1 else ("completed", "at last")

    merged.work(work, 2)
    wait_until(lambda: merged.answers("batch"), DEADLINE_S, "the answer")
    assert merged.answers("batch")[0]["payload"]["choices"][0]["text"] == "at last"
    assert len(set(seen)) == 2


def test_strict_and_window_order_what_goes_out(merged: Merged) -> None:
    mine = {"task": "text_generation", "priority": 8, "payload": {"prompt": "own"}}
    merged.put("own", *[json.dumps(mine).encode()] * 4)
    merged.put("batch", *[merged.llmd(str(number)) for number in range(4)])
    app = merged.gateway("g1", policy="strict", window=1)
    # Which of the queues is read first is the broker's to say: one request of the later queue may be under way by then.
    wait_until(lambda: all(waiting(merged, app).values()), DEADLINE_S, lambda: f"{waiting(merged, app)} wait")
    merged.work(lambda request: ("completed", "x"), 8)
    order = [request.tenant for request in merged.requests()]
    first = order.index("team")
    assert first <= 1
    assert order[first : first + 4] == ["team"] * 4


def waiting(merged: Merged, app: Any) -> dict[str, float]:
    """How many messages of each queue were read and wait."""
    metrics = context_of_app(app).metrics.registry
    topics = [merged.names[queue] for queue in ("batch", "own")]
    return {topic: metrics.get_sample_value("penstock_queue_waiting", {"topic": topic}) or 0 for topic in topics}


def test_a_gateway_that_takes_over_sends_nothing_twice(merged: Merged) -> None:
    """The first gateway has sent the requests and goes before their outcomes: the second finds them."""
    merged.put("batch", *[merged.llmd(str(number)) for number in range(6)])
    merged.gateway("g1")
    wait_until(lambda: len(merged.requests()) == 6, DEADLINE_S, lambda: f"{len(merged.requests())} requests")
    merged.stop()
    assert merged.answers("batch") == []
    merged.gateway("g2")
    merged.work(lambda request: ("completed", "x"), 6)
    wait_until(lambda: len(merged.answers("batch")) >= 6, DEADLINE_S, lambda: merged.answers("batch"))
    assert sorted(answer["id"] for answer in merged.answers("batch")) == [str(number) for number in range(6)]
    assert len(merged.requests()) == 6
    merged.stop()
    tp = (merged.names["batch"], 0)
    assert _committed(merged) == end_offsets(merged.place.kafka, [tp])[tp]


def _committed(merged: Merged) -> int:
    group, place = f"{merged.place.prefix}queues", (merged.names["batch"], 0)
    return committed_offsets(merged.place.bootstrap, group, [place])[0].offset
