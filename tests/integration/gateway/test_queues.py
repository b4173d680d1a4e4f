"""Queues of other systems on a real broker, by real bridge processes: messages in, answers out, once, in order."""

from __future__ import annotations

import base64
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest
from confluent_kafka.admin import AdminClient, NewPartitions, NewTopic

from penstock.common.admin import end_offsets, partition_counts
from penstock.common.reader import read_to_end
from penstock.gateway.edge.keys import create_key
from penstock.schemas.codec import default_codec
from penstock.schemas.records import DeadLetter, InferenceRequest
from prefix_server import PrefixServer
from support import committed_offsets, wait_until
from system import NOOP, RUNNING, Process, System

DEADLINE_S = 60
LOW = 8
SLOW = {**NOOP, "options": {"tokens": 4, "delay_ms": 20}}


class Merged:
    """Topics of queues, and bridges that merge them."""

    def __init__(self, place: Any, folder: Path) -> None:
        self.place = place
        self.admin = AdminClient({"bootstrap.servers": place.bootstrap})
        self.names = {name: f"{place.prefix}{name}" for name in ("batch", "batch-results", "own", "own-results")}
        self.system = System(bootstrap=place.bootstrap, prefix=place.prefix, folder=folder)
        self.set()

    def create_topics(self) -> Merged:
        topics = [NewTopic(topic, num_partitions=1) for topic in self.names.values()]
        for made in self.admin.create_topics(topics).values():
            made.result(20)
        return self

    def set(self, *, policy: str = "strict", window: int = 64) -> None:
        names = self.names
        batch = {"topic": names["batch"], "tenant": "team", "result_topic": names["batch-results"], "weight": 3}
        own = {
            "topic": names["own"],
            "format": "penstock",
            "tenant": "other",
            "result_topic": names["own-results"],
        }
        self.system.queues = [batch, own]
        self.system.queue_policy = policy
        self.system.queue_merge = {"window": window, "backoff_s": 0.2}

    def bridge(self, name: str = "b1") -> Process:
        return self.system.bridge(name).wait_ready()

    def put(self, queue: str, *messages: bytes) -> None:
        for message in messages:
            self.place.scribe.put(self.names[queue], message, None)

    def llmd(self, message_id: str, **values: Any) -> bytes:
        body = {"id": message_id, "deadline": str(int(time.time()) + 600), "payload": {"prompt": message_id}, **values}
        return json.dumps(body).encode()

    def own(self, request_id: str) -> bytes:
        body = {"task": "text_generation", "request_id": request_id, "priority": LOW, "payload": {"prompt": "p"}}
        return json.dumps(body).encode()

    def requests(self) -> list[InferenceRequest]:
        topic = self.place.scribe.names.request("text_generation", LOW)
        records = sorted(read_to_end(self.place.kafka, topic), key=lambda one: one.timestamp_ms)
        return [default_codec().decode(one.value or b"", InferenceRequest) for one in records]

    def sent(self) -> Counter[str]:
        """How many records each request has."""
        return Counter(request.request_id for request in self.requests())

    def answers(self, queue: str) -> list[dict[str, Any]]:
        records = read_to_end(self.place.kafka, self.names[f"{queue}-results"])
        return [json.loads(one.value or b"null") for one in records]

    def answered(self) -> set[str]:
        """The ids of messages of both queues that have an answer."""
        llmd = {str(answer["id"]) for answer in self.answers("batch")}
        return llmd | {str(answer["request_id"]) for answer in self.answers("own")}

    def work(self, on: Callable[[InferenceRequest], tuple[str, str]], count: int) -> None:
        """Be the worker of the next `count` requests that stand on the topic."""
        done: set[str] = set()

        def all_done() -> bool:
            for request in self.requests():
                if request.request_id not in done:
                    done.add(request.request_id)
                    status, text = on(request)
                    self.place.scribe.job(request.request_id, request.tenant).end(text, status=status)
            return len(done) >= count

        wait_until(all_done, DEADLINE_S, lambda: f"{len(done)} of {count} requests came", poll_s=0.1)

    def all_committed(self, queue: str) -> bool:
        counts = partition_counts(self.place.kafka, [self.names[queue]])
        places = [(self.names[queue], number) for number in range(counts[self.names[queue]])]
        committed = committed_offsets(self.place.bootstrap, f"{self.place.prefix}queues", places)
        ends = end_offsets(self.place.kafka, places)
        return all(one.offset == ends[one.topic, one.partition] for one in committed)


@pytest.fixture
def merged(own_place: Any, tmp_path: Path) -> Iterator[Merged]:
    made = Merged(own_place, tmp_path).create_topics()
    RUNNING.append(made.system)
    yield made
    RUNNING.remove(made.system)
    made.system.stop()


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
    bridge = merged.bridge()
    merged.work(lambda request: ("completed", f"to {request.payload['prompt']}"), 2)
    wait_until(lambda: len(merged.answers("batch")) >= 4, DEADLINE_S, lambda: merged.answers("batch"))
    found = {answer["id"]: answer for answer in merged.answers("batch")}
    assert found["object"]["payload"]["choices"][0]["text"] == "to object"
    back = json.loads(base64.b64decode(found["b64"]["payload"]))
    assert back["object"] == "text_completion"
    assert found["late"]["error"] == "deadline exceeded"
    assert "no_such_field" in found["odd"]["error"]
    assert all(request.tenant == "team" and request.priority == LOW for request in merged.requests())
    letters = read_to_end(merged.place.kafka, merged.place.scribe.names.dlq)
    (letter,) = [default_codec().decode(one.value or b"", DeadLetter) for one in letters]
    assert letter.original == b"no message"

    def counts() -> list[float]:
        name, topic = "penstock_queue_messages_total", merged.names["batch"]
        outcomes = ("completed", "refused", "dead_lettered")
        return [bridge.metric(name, topic=topic, outcome=outcome) for outcome in outcomes]

    wait_until(lambda: counts() == [2, 2, 1], DEADLINE_S, counts)


def test_requests_of_ours_are_answered_as_http_would(merged: Merged) -> None:
    """With the fields of `GET /v1/requests/{id}`, and their values."""
    merged.put("own", merged.own("mine"), b'{"task": "text_generation", "request_id": "bad"}')
    merged.bridge()
    merged.work(lambda request: ("completed", "yes"), 1)
    wait_until(lambda: len(merged.answers("own")) == 2, DEADLINE_S, "the answers")
    answers = {answer["request_id"]: answer for answer in merged.answers("own")}
    assert (answers["mine"]["status"], answers["mine"]["result"]["text"]) == ("completed", "yes")
    assert answers["bad"]["error"]["code"] == "invalid"
    assert [request.tenant for request in merged.requests()] == ["other"]


@pytest.mark.slow
def test_the_answer_is_the_object_that_http_gives(merged: Merged, tmp_path: Path) -> None:
    body = {"task": "text_generation", "metadata": {"a": "b"}, "payload": {"prompt": "p"}}
    merged.put("own", json.dumps(body).encode())
    merged.system.worker().wait_ready()
    merged.bridge()
    wait_until(lambda: merged.answers("own"), DEADLINE_S, "the answer")
    (answer,) = merged.answers("own")
    keys_file = tmp_path / "keys.json"
    key = create_key(keys_file, tenant="other")
    gateway = merged.place.gateway("g1", auth={"keys_file": keys_file})
    headers = {"authorization": f"Bearer {key}"}
    assert gateway.get(f"/v1/requests/{answer['request_id']}", headers=headers).json() == answer


def test_what_failed_for_a_passing_reason_is_asked_again_as_a_new_request(merged: Merged) -> None:
    merged.put("batch", merged.llmd("1"))
    merged.bridge()
    seen: list[str] = []

    def work(request: InferenceRequest) -> tuple[str, str]:
        seen.append(request.request_id)
        return ("failed", "") if len(seen) == 1 else ("completed", "at last")

    merged.work(work, 2)
    wait_until(lambda: merged.answers("batch"), DEADLINE_S, "the answer")
    assert merged.answers("batch")[0]["payload"]["choices"][0]["text"] == "at last"
    assert len(set(seen)) == 2


def test_an_id_that_comes_twice_is_one_request_and_with_another_payload_a_refusal(merged: Merged) -> None:
    other = merged.llmd("1", payload={"prompt": "another"})
    merged.put("batch", merged.llmd("1"), merged.llmd("1"), other)
    merged.bridge()
    merged.work(lambda request: ("completed", "x"), 1)
    wait_until(lambda: len(merged.answers("batch")) == 3, DEADLINE_S, lambda: merged.answers("batch"))
    refused = [answer["error"] for answer in merged.answers("batch") if "error" in answer]
    assert refused == ["this id was used with another payload"]
    assert list(merged.sent().values()) == [1]


def test_strict_and_window_order_what_goes_out(merged: Merged) -> None:
    mine = {"task": "text_generation", "priority": LOW, "payload": {"prompt": "own"}}
    merged.put("own", *[json.dumps(mine).encode()] * 4)
    merged.put("batch", *[merged.llmd(str(number)) for number in range(4)])
    merged.set(policy="strict", window=1)
    bridge = merged.bridge()

    def waiting() -> dict[str, float]:
        """How many messages of each queue were read and wait."""
        topics = [merged.names[queue] for queue in ("batch", "own")]
        return {topic: bridge.metric("penstock_queue_waiting", topic=topic) for topic in topics}

    # Which of the queues is read first is the broker's to say: one request of the later queue may be under way by then.
    wait_until(lambda: all(waiting().values()), DEADLINE_S, lambda: f"{waiting()} wait")
    merged.work(lambda request: ("completed", "x"), 8)
    order = [request.tenant for request in merged.requests()]
    first = order.index("team")
    assert first <= 1
    assert order[first : first + 4] == ["team"] * 4


def test_a_bridge_waits_for_missing_topics_and_says_so(own_place: Any, tmp_path: Path) -> None:
    merged = Merged(own_place, tmp_path)
    bridge = merged.system.bridge()
    try:
        said = wait_until(lambda: readiness(bridge), DEADLINE_S, bridge.tail)
        assert said["status"] == "unavailable"
        wait_until(lambda: "missing topics" in readiness(bridge)["reason"], DEADLINE_S, lambda: readiness(bridge))
        merged.create_topics()
        bridge.wait_ready()
        assert bridge.stop() == 0
    finally:
        merged.system.stop()


def readiness(bridge: Process) -> dict[str, Any]:
    try:
        return httpx.get(f"{bridge.url}/readyz", timeout=2).json()
    except httpx.HTTPError:
        return {}


def test_a_bridge_that_takes_over_in_order_sends_nothing_twice(merged: Merged) -> None:
    """The first one has sent the requests and stops before their outcomes: the second finds them."""
    merged.put("batch", *[merged.llmd(str(number)) for number in range(6)])
    first = merged.bridge()
    wait_until(lambda: len(merged.requests()) == 6, DEADLINE_S, lambda: f"{len(merged.requests())} requests")
    assert first.stop() == 0, first.tail()
    assert merged.answers("batch") == []
    second = merged.bridge("b2")
    merged.work(lambda request: ("completed", "x"), 6)
    wait_until(lambda: len(merged.answers("batch")) >= 6, DEADLINE_S, lambda: merged.answers("batch"))
    assert sorted(answer["id"] for answer in merged.answers("batch")) == [str(number) for number in range(6)]
    assert len(merged.requests()) == 6
    assert second.stop() == 0, second.tail()
    assert merged.all_committed("batch")


def test_a_bridge_that_is_killed_before_any_outcome_has_sent_all_once(merged: Merged) -> None:
    merged.put("batch", *[merged.llmd(f"batch-{number}") for number in range(6)])
    merged.put("own", *[merged.own(f"own-{number}") for number in range(6)])
    first = merged.bridge()
    wait_until(lambda: len(merged.requests()) == 12, DEADLINE_S, lambda: f"{len(merged.requests())} requests")
    first.kill9()
    merged.bridge("b2")
    merged.system.worker().wait_ready()
    wait_until(lambda: len(merged.answered()) == 12, DEADLINE_S, lambda: f"answered: {merged.answered()}")
    assert_ran_once(merged, 12)


def test_a_bridge_that_is_killed_in_the_middle_loses_and_repeats_nothing(merged: Merged) -> None:
    """Some messages are answered, some have requests that run, some were not begun."""
    merged.system.models = [SLOW]
    merged.set(policy="round_robin", window=8)
    merged.system.worker().wait_ready()
    count = 60
    merged.put("batch", *[merged.llmd(f"batch-{number}") for number in range(count)])
    merged.put("own", *[merged.own(f"own-{number}") for number in range(count)])
    first = merged.bridge()
    wait_until(lambda: len(merged.answered()) >= 20, DEADLINE_S, lambda: f"{len(merged.answered())} answered")
    first.kill9()
    answered, sent = len(merged.answered()), len(merged.requests())
    assert answered < 2 * count, "it was killed too late"
    merged.bridge("b2")
    wait_until(lambda: len(merged.answered()) == 2 * count, DEADLINE_S, lambda: f"{len(merged.answered())} answered")
    assert sent < 2 * count
    assert_ran_once(merged, 2 * count)
    for queue in ("batch", "own"):
        wait_until(partial(merged.all_committed, queue), DEADLINE_S, f"all of {queue} is committed")


def test_bridges_that_come_and_go_share_the_queues_and_send_nothing_twice(merged: Merged) -> None:
    """Partitions move from one to another while their requests are on their way."""
    grown = merged.admin.create_partitions([NewPartitions(merged.names["batch"], 4)])
    for made in grown.values():
        made.result(20)
    merged.system.models = [SLOW]
    merged.set(window=16)
    merged.system.worker().wait_ready()
    put = 0

    def completed_by(bridge: Process) -> bool:
        """Whether it has completed a message; more messages come as long as it is asked."""
        nonlocal put
        merged.put("batch", *[merged.llmd(f"batch-{number}") for number in range(put, put + 5)])
        put += 5
        topic = merged.names["batch"]
        return bridge.metric("penstock_queue_messages_total", topic=topic, outcome="completed") > 0

    first = merged.bridge()
    wait_until(partial(completed_by, first), DEADLINE_S, first.tail)
    second = merged.bridge("b2")
    wait_until(partial(completed_by, second), DEADLINE_S, second.tail)
    assert first.stop() == 0, first.tail()
    wait_until(lambda: len(merged.answered()) == put, DEADLINE_S, lambda: f"{len(merged.answered())} of {put} answered")
    assert_ran_once(merged, put)


def assert_ran_once(merged: Merged, count: int) -> None:
    """One record for each message, one outcome for each record, one content for each answer."""
    sent = merged.sent()
    assert len(sent) == count
    assert set(sent.values()) == {1}, sent
    ends = Counter(event.request_id for event in merged.system.results() if event.kind == "terminal")
    assert ends == sent
    assert all("error" not in answer for answer in merged.answers("batch"))
    assert {answer["status"] for answer in merged.answers("own")} <= {"completed"}


OBJECTIVE, FAIRNESS = "x-gateway-inference-objective", "x-llm-d-inference-fairness-id"


def test_headers_of_request_queue_and_model_reach_a_remote_server_in_this_order(merged: Merged) -> None:
    """The request's before the queue's before the model's; a name that the model does not list is no header."""
    with PrefixServer().listening() as server:
        listed = {"headers": {OBJECTIVE: "of-model", FAIRNESS: "of-model"}, "caller_headers": [OBJECTIVE, FAIRNESS]}
        far = {"id": "far", "source": server.url, "engine": "remote", "tasks": ["text_generation"]}
        unlisted = {**far, "id": "unlisted", "options": {"headers": {OBJECTIVE: "of-model"}}}
        merged.system.models = [{**far, "options": listed}, unlisted]
        batch, own = merged.system.queues
        merged.system.queues = [{**batch, "extra": {OBJECTIVE: "of-queue", "note": "q"}}, own]
        merged.system.worker().wait_ready()
        merged.bridge()
        body = {"prompt": "Count", "model": "far", "max_tokens": 2}
        asked = {"X-Gateway-Inference-Objective": "of-request", FAIRNESS: "me"}
        smuggled = {"authorization": "Bearer stolen", FAIRNESS: "me"}
        merged.put(
            "batch",
            merged.llmd("queue", payload=body),
            merged.llmd("request", payload={**body, "penstock": {"extra": asked}}),
            merged.llmd("unlisted", payload={**body, "model": "unlisted", "penstock": {"extra": smuggled}}),
            merged.llmd("odd", payload={**body, "penstock": {"extra": {OBJECTIVE: "a\r\nauthorization: b"}}}),
        )
        plain = {"task": "text_generation", "model": "far", "payload": {"prompt": "Count", "max_tokens": 2}}
        merged.put(
            "own",
            json.dumps({**plain, "request_id": "model"}).encode(),
            json.dumps({**plain, "request_id": "own", "extra": {FAIRNESS: "me"}}).encode(),
        )
        wait_until(lambda: len(merged.answered()) == 6, DEADLINE_S, lambda: merged.system.logs(20))
        found = {answer["id"]: answer.get("error") for answer in merged.answers("batch")}
        assert {one for one, error in found.items() if error} == {"odd"}
        assert f"{OBJECTIVE} is sent as a header" in str(found["odd"])
        names = (OBJECTIVE, FAIRNESS, "authorization")
        seen = sorted(tuple(one.get(name, "") for name in names) for one in server.headers)
        assert seen == [
            ("of-model", "", ""),  # unlisted
            ("of-model", "me", ""),
            ("of-model", "of-model", ""),
            ("of-queue", "of-model", ""),
            ("of-request", "me", ""),
        ]
        bodies = [body for body in server.asked if body["model"] == "far"]
        assert not any(name in body for body in bodies for name in (OBJECTIVE, FAIRNESS, *asked))
        assert sorted(body.get("note", "") for body in bodies) == ["", "", "q", "q"], "what is no header is a field"


def test_limits_that_operators_order_hold_for_queues_at_once_and_after_a_restart(
    merged: Merged, tmp_path: Path
) -> None:
    keys_file = tmp_path / "keys.json"
    operator = {"authorization": f"Bearer {create_key(keys_file, tenant='ops', scopes=['admin'])}"}
    gateway = merged.place.gateway("g1", auth={"keys_file": keys_file})
    bridge = merged.bridge()

    def order(**limits: Any) -> None:
        answer = gateway.http.post("/v1/admin/limits/other", json=limits, headers=operator)
        assert answer.status_code == 200, answer.text

    def refused(request_id: str) -> bool:
        """Whether a message that comes now is refused, with the reason in its outcome."""
        merged.put("own", merged.own(request_id))
        answer: dict[str, Any] = {}

        def ended() -> bool:
            found = [one for one in merged.answers("own") if one["request_id"] == request_id]
            answer.update(found[0] if found else {})
            return bool(found) or request_id in merged.sent()

        wait_until(ended, DEADLINE_S, lambda: f"{merged.answers('own')}\n{bridge.tail()}")
        if answer:
            assert (answer["status"], answer["error"]["code"]) == ("failed", "forbidden")
            assert "pri" in answer["error"]["message"], answer
        return bool(answer)

    assert not refused("before")
    order(max_priority=LOW + 1)
    numbers = count()
    # The promise is a second; a busy machine has more.
    wait_until(lambda: refused(f"ordered-{next(numbers)}"), 10, "the order holds", promised=True)
    assert bridge.stop() == 0, bridge.tail()
    bridge = merged.bridge("b2")
    assert refused("restarted")
    bridge.kill9()
    bridge = merged.bridge("b3")
    assert refused("killed")
    order(outstanding=0)

    def tried_again() -> float:
        return bridge.metric("penstock_queue_messages_total", topic=merged.names["own"], outcome="tried_again")

    def holds() -> bool:
        merged.put("own", merged.own(f"early-{next(numbers)}"))
        return tried_again() > 0

    wait_until(holds, DEADLINE_S, bridge.tail, poll_s=0.2)
    merged.put("own", merged.own("waits"))
    before = tried_again()
    wait_until(lambda: tried_again() > before, DEADLINE_S, bridge.tail)
    assert "waits" not in merged.sent()
    assert gateway.http.delete("/v1/admin/limits/other", headers=operator).status_code == 200
    wait_until(lambda: "waits" in merged.sent(), DEADLINE_S, bridge.tail)
