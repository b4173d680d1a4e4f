"""Webhooks on a real broker: real senders call a real receiver of HTTP, once or more, signed, and lose nothing."""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from confluent_kafka import Producer
from standardwebhooks import Webhook, WebhookVerificationError

from kit.http_server import Answer, serving_http
from kit.http_server import Call as HttpCall
from penstock.common.outgoing import request_record
from penstock.gateway.edge.keys import create_key
from penstock.schemas.codec import default_codec
from penstock.schemas.records import InferenceRequest
from support import committed_offsets, wait_until
from system import NOOP, Process, System, running

DEADLINE_S = 60
SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
NEWER = "whsec_c2VjcmV0LW9mLWFjbWUtMTIzNDU2Nzg5MA=="
SLOW = {**NOOP, "id": "slow", "options": {"tokens": 400, "delay_ms": 50}}


@dataclass
class Call:
    path: str
    headers: Mapping[str, str]
    body: bytes
    at: float

    @property
    def json(self) -> dict[str, Any]:
        return json.loads(self.body)

    def verified(self, secret: str = SECRET) -> dict[str, Any]:
        return Webhook(secret).verify(self.body, dict(self.headers))


@dataclass
class Receiver:
    """A receiver of webhooks: `answer` says what each call gets."""

    calls: list[Call] = field(default_factory=list)
    answer: Callable[[Call], tuple[int, dict[str, str]]] = lambda _: (204, {})
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/hook"

    def of(self, request_id: str) -> list[Call]:
        return [call for call in list(self.calls) if call.json["data"]["request_id"] == request_id]


@contextmanager
def listening(receiver: Receiver) -> Iterator[Receiver]:
    def answer(asked: HttpCall) -> Answer:
        if asked.method == "GET":
            receiver.calls.append(Call("GET " + asked.path, {}, b"{}", time.monotonic()))
            return 200, b""
        call = Call(asked.path, asked.headers, asked.body, time.monotonic())
        receiver.calls.append(call)
        status, headers = receiver.answer(call)
        return status, b"", headers

    with serving_http(answer, receiver.port) as server:
        receiver.port = server.server_port
        yield receiver


@pytest.fixture(scope="module")
def listeners() -> Iterator[list[Receiver]]:
    with listening(Receiver()) as one, listening(Receiver()) as other:
        yield [one, other]


@pytest.fixture
def receiver(listeners: list[Receiver]) -> Receiver:
    """Each test settles its deliveries: the next one's senders would make them."""
    for one in listeners:
        one.calls.clear()
        one.answer = lambda _: (204, {})
    return listeners[0]


@pytest.fixture
def slow(listeners: list[Receiver], receiver: Receiver) -> Receiver:
    """A second one."""
    return listeners[1]


@dataclass
class Site:
    system: System
    gateway: Process
    producer: Producer

    headers: dict[str, str] = field(default_factory=dict)

    @property
    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.gateway.url, timeout=30, headers=self.headers)

    def submit(self, url: str, **fields: Any) -> str:
        body = {"task": "text_generation", "payload": {"prompt": "hello"}, "callback_url": url, **fields}
        with self.client as client:
            answer = client.post("/v1/requests", json=body)
        assert answer.status_code == 202, answer.text
        return answer.json()["request_id"]

    def get(self, path: str, status: int = 200) -> dict[str, Any]:
        with self.client as client:
            answer = client.get(path)
        assert answer.status_code == status, answer.text
        return answer.json()

    def delivery(self, request_id: str) -> dict[str, Any] | None:
        data = self.get(f"/v1/requests/{request_id}/deliveries")["data"]
        return data[0] if data else None

    def until(self, request_id: str, state: str) -> dict[str, Any]:
        def found() -> dict[str, Any] | None:
            delivery = self.delivery(request_id)
            return delivery if delivery is not None and delivery["state"] == state else None

        return wait_until(found, DEADLINE_S, lambda: f"{self.delivery(request_id)}\n{self.system.logs(30)}")

    def put(self, value: bytes, request: InferenceRequest) -> None:
        topic = self.system.names.request(request.task, request.priority)
        self.producer.produce(topic, value, request.request_id.encode())
        assert self.producer.flush(20) == 0

    def sender(self, name: str, **options: Any) -> Process:
        """A process that calls receivers, with keys of its section."""
        env = {f"PENSTOCK_WEBHOOKS__{key.upper()}": json.dumps(value) for key, value in options.items()}
        return self.system.webhooks(name, env=env).wait_ready()

    def end(self) -> None:
        for process in self.system.processes:
            if process.command == "webhooks":
                process.stop()


@contextmanager
def serving(kafka: Any, folder: Path, listeners: list[Receiver], **options: Any) -> Iterator[Site]:
    """A worker and a gateway. Each test starts senders of its own."""
    prefix = f"hooks-{uuid.uuid4().hex[:8]}."
    system = System(bootstrap=kafka.bootstrap_servers, prefix=prefix, folder=folder, models=[NOOP, SLOW], **options)
    system.webhook_options = {
        "secret": SECRET,
        "secrets": {"acme": [NEWER, SECRET]},
        "internal_hosts": [f"127.0.0.1:{one.port}" for one in listeners],
        "first_retry_s": 0.2,
    }
    with running(system):
        system.start_all(["w1", "g1"])
        producer = Producer({"bootstrap.servers": kafka.bootstrap_servers, "partitioner": "murmur2_random"})
        yield Site(system, system.process("g"), producer)


@pytest.fixture(scope="module")
def site(kafka: Any, tmp_path_factory: pytest.TempPathFactory, listeners: list[Receiver]) -> Iterator[Site]:
    with serving(kafka, tmp_path_factory.mktemp("hooks"), listeners) as made:
        yield made


@pytest.fixture
def here(site: Site, receiver: Receiver) -> Iterator[Site]:
    """The system that most tests share, without a sender."""
    yield site
    site.end()


def calls_of(receiver: Receiver, request_id: str, site: Site, count: int = 1) -> list[Call]:
    return wait_until(
        lambda: calls if len(calls := receiver.of(request_id)) >= count else None,
        DEADLINE_S,
        lambda: f"{len(receiver.calls)} calls\n{site.system.logs(30)}",
    )


def test_each_way_in_is_called_back(here: Site, receiver: Receiver) -> None:
    here.sender("h1")
    over_http = here.submit(receiver.url, metadata={"order": "7"}, priority=2)
    (call,) = calls_of(receiver, over_http, here)
    said = call.verified()
    assert said["type"] == "request.completed"
    shown = here.get(f"/v1/requests/{over_http}")
    only_in_statuses = ("model_reason", "ttl_ms")
    assert said["data"] == {**shown, **dict.fromkeys(only_in_statuses)}
    assert said["data"]["priority"] == 2
    assert call.headers["content-type"] == "application/json"
    with pytest.raises(WebhookVerificationError):
        call.verified(NEWER)
    delivery = here.until(over_http, "delivered")
    assert delivery["webhook_id"] == call.headers["webhook-id"]
    assert [(one["attempt"], one["status_code"], one["error"]) for one in delivery["attempts"]] == [(1, 204, None)]

    avro = InferenceRequest(
        request_id="by-avro",
        task="text_generation",
        text_generation={"prompt": "hello"},
        created_at=int(time.time() * 1000),
        callback_url=receiver.url,
    )
    here.put(request_record(avro, here.system.names, default_codec(), source="test").value, avro)
    body = {"request_id": "by-json", "task": "text_generation", "callback_url": receiver.url}
    here.put(json.dumps({**body, "payload": {"prompt": "x"}}).encode(), avro)
    here.put(json.dumps({**body, "request_id": "invalid", "payload": {"prompt": 5}}).encode(), avro)
    here.put(json.dumps({**body, "request_id": "late", "ttl_ms": 1, "payload": {"prompt": "x"}}).encode(), avro)
    cancelled = here.submit(receiver.url, model="slow", stream=True)
    with here.client as client:
        assert client.post(f"/v1/requests/{cancelled}/cancel").status_code == 202
    ends = {
        "by-avro": "request.completed",
        "by-json": "request.completed",
        "invalid": "request.dead_lettered",
        "late": "request.expired",
        cancelled: "request.cancelled",
    }
    for request_id, kind in ends.items():
        (call,) = calls_of(receiver, request_id, here)
        assert call.verified()["type"] == kind
        assert call.json["data"]["done"] is True
    assert len({call.headers["webhook-id"] for call in receiver.calls}) == len(receiver.calls) == 6
    none = here.get(f"/v1/requests/{without_callback(here)}/deliveries")
    assert none["data"] == []


def without_callback(here: Site) -> str:
    with here.client as client:
        answer = client.post("/v1/requests", json={"task": "text_generation", "payload": {"prompt": "x"}})
        request_id = answer.json()["request_id"]
        assert client.get(f"/v1/requests/{request_id}?wait=30").json()["done"]
    return request_id


def test_a_receiver_that_is_down_is_called_again_and_its_answers_are_heeded(here: Site, receiver: Receiver) -> None:
    times: dict[str, int] = {}

    def answer(call: Call) -> tuple[int, dict[str, str]]:
        path = call.path
        times[path] = times.get(path, 0) + 1
        match path:
            case "/gone":
                return 410, {}
            case "/moved":
                return 302, {"location": f"http://127.0.0.1:{receiver.port}/elsewhere"}
            case "/later" if times[path] == 1:
                return 429, {"retry-after": "2"}
            case "/broken" if times[path] < 4:
                return 500, {}
        return 200, {}

    receiver.answer = answer
    base = receiver.url.removesuffix("/hook")
    here.sender("h1", give_up_s=8)
    ids = {path: here.submit(f"{base}/{path}") for path in ("gone", "moved", "later", "broken")}
    gone = here.until(ids["gone"], "failed")
    assert [one["status_code"] for one in gone["attempts"]] == [410]
    broken = here.until(ids["broken"], "delivered")
    assert [one["status_code"] for one in broken["attempts"]] == [500, 500, 500, 200]
    assert len({call.headers["webhook-id"] for call in receiver.of(ids["broken"])}) == 1
    assert all(call.verified() for call in receiver.of(ids["broken"]))
    here.until(ids["later"], "delivered")
    first, second = receiver.of(ids["later"])
    assert second.at - first.at >= 2
    moved = here.until(ids["moved"], "failed")
    assert {one["status_code"] for one in moved["attempts"]} == {302}
    assert len(moved["attempts"]) > 2
    assert not [call for call in receiver.calls if "elsewhere" in call.path]
    letters = {letter.request_id: letter for letter in here.system.dead_letters()}
    assert {letters[ids[path]].reason_code for path in ("gone", "moved")} == {"webhook_undeliverable"}
    assert letters[ids["gone"]].attempts == 1
    assert set(letters) & set(ids.values()) == {ids["gone"], ids["moved"]}


def test_a_slow_receiver_holds_up_nobody_else(here: Site, receiver: Receiver, slow: Receiver) -> None:
    release = threading.Event()
    slow.answer = lambda _: (200, {}) if release.wait(60) else (500, {})
    here.sender("h1", max_in_flight=16, timeout_s=60)
    held = [here.submit(slow.url) for _ in range(30)]
    wait_until(lambda: len(slow.calls) == 2, DEADLINE_S, lambda: str(len(slow.calls)))
    for request_id in [here.submit(receiver.url) for _ in range(10)]:
        here.until(request_id, "delivered")
    assert len(slow.calls) == 2, "an eighth of the calls"
    here.until(held[-1], "waiting")  # it is kept, so that its offset holds up nobody's commit
    release.set()
    for request_id in held:
        here.until(request_id, "delivered")
    assert len(slow.calls) == 30


def test_what_may_not_be_called_is_refused_with_the_setting(here: Site, receiver: Receiver) -> None:
    url = f"http://127.0.0.1:{receiver.port}/hook"
    strict = here.system.gateway("strict", env={"PENSTOCK_WEBHOOKS__INTERNAL_HOSTS": "[]"}).wait_ready()

    def refused(url: str) -> dict[str, Any]:
        body = {"task": "text_generation", "payload": {"prompt": "x"}, "callback_url": url}
        answer = httpx.post(f"{strict.url}/v1/requests", json=body, timeout=30)
        assert answer.status_code == 400, answer.text
        return answer.json()["error"]

    for internal in (url, "http://localhost/", "http://[::1]/", "http://169.254.169.254/"):
        assert "webhooks." in refused(internal)["message"]
    assert refused("http://127.0.0.1/")["message"].endswith("webhooks.internal_hosts may name it")
    assert refused("ftp://x/")["param"] == "callback_url"
    assert strict.stop() == 0
    # Straight onto the topic nobody refuses it: it runs, and its webhook becomes a dead letter.
    here.sender("h1", internal_hosts=[])
    request = InferenceRequest(request_id="topic", task="text_generation", created_at=1)
    body = {"request_id": "topic", "task": "text_generation", "callback_url": url}
    here.put(json.dumps({**body, "payload": {"prompt": "x"}}).encode(), request)
    failed = here.until("topic", "failed")
    assert failed["attempts"][0]["status_code"] is None
    (letter,) = [one for one in here.system.dead_letters() if one.request_id == "topic"]
    assert letter.reason_code == "webhook_undeliverable"
    assert "webhooks.internal_hosts" in letter.reason
    assert here.get("/v1/requests/topic")["status"] == "completed"
    assert receiver.calls == []


def test_tenants_have_secrets_of_their_own_and_change_them(
    kafka: Any, tmp_path: Path, listeners: list[Receiver], receiver: Receiver
) -> None:
    keys_file = tmp_path / "keys.json"
    keys = {tenant: create_key(keys_file, tenant=tenant, name=tenant) for tenant in ("acme", "other")}
    with serving(kafka, tmp_path / "system", listeners, auth={"keys_file": str(keys_file)}) as here:
        here.sender("h1")
        ids: dict[str, str] = {}
        for tenant, key in keys.items():
            here.headers = {"authorization": f"Bearer {key}"}
            ids[tenant] = here.submit(receiver.url)
            here.until(ids[tenant], "delivered")
        (call,) = receiver.of(ids["acme"])
        assert call.verified(NEWER) == call.verified(SECRET)
        (call,) = receiver.of(ids["other"])
        assert call.verified(SECRET)
        with pytest.raises(WebhookVerificationError):
            call.verified(NEWER)
        here.get(f"/v1/requests/{ids['acme']}/deliveries", 404)
        assert "whsec" not in "".join(process.log.read_text() for process in here.system.processes)


def group_lag(here: Site) -> int:
    """Of the senders' group: records of the result topic that are not committed."""
    ends = here.system.ends([here.system.names.result])
    found = committed_offsets(here.system.bootstrap, f"{here.system.prefix}webhooks", list(ends))
    return sum(end - max(0, next(p.offset for p in found if (p.topic, p.partition) == tp)) for tp, end in ends.items())


def test_killed_while_calls_are_open_nothing_is_lost(here: Site, receiver: Receiver) -> None:
    """Open calls are made again by the next process, with the same ids; what waits for its retry is remembered."""
    release = threading.Event()
    broken = {"on": True}

    def answer(call: Call) -> tuple[int, dict[str, str]]:
        if call.path == "/broken":
            return (500 if broken["on"] else 200), {}
        release.wait(40)
        return 200, {}

    receiver.answer = answer
    base = receiver.url.removesuffix("/hook")
    options = {"timeout_s": 60, "max_in_flight": 64}
    first = here.sender("h1", **options)
    waiting = [here.submit(f"{base}/broken") for _ in range(5)]
    for request_id in waiting:
        here.until(request_id, "waiting")
    held = [here.submit(receiver.url) for _ in range(20)]
    opened = wait_until(
        lambda: found if len(found := [c for c in receiver.calls if c.path == "/hook"]) >= 4 else None,
        DEADLINE_S,
        lambda: here.system.logs(30),
    )
    first.kill9()
    release.set()
    broken["on"] = False
    second = here.sender("h2", **options)
    for request_id in [*held, *waiting]:
        here.until(request_id, "delivered")
    for call in opened:
        again = receiver.of(call.json["data"]["request_id"])
        assert len({one.headers["webhook-id"] for one in again}) == 1
        assert len(again) >= 2
    attempts = here.until(waiting[0], "delivered")["attempts"]
    assert attempts[0]["status_code"] == 500
    assert [one["attempt"] for one in attempts] == list(range(1, len(attempts) + 1))
    wait_until(lambda: group_lag(here) == 0, DEADLINE_S, lambda: str(group_lag(here)))
    count = len(receiver.calls)
    assert second.stop() == 0
    third = here.sender("h3", **options)
    again = here.submit(receiver.url)
    here.until(again, "delivered")
    assert len(receiver.calls) == count + 1, "what was delivered is not called again"
    assert third.stop() == 0


def test_two_processes_share_the_work_and_one_goes(here: Site, receiver: Receiver) -> None:
    one, two = here.sender("share1"), here.sender("share2")

    def sent(process: Process) -> bool:
        return "webhooks.attempt" in process.log.read_text()

    ids: list[str] = []

    def both() -> bool:
        ids.append(here.submit(receiver.url))
        return sent(one) and sent(two)

    wait_until(both, DEADLINE_S, lambda: here.system.logs(20))
    assert one.stop() == 0
    ids += [here.submit(receiver.url) for _ in range(20)]
    for request_id in ids:
        here.until(request_id, "delivered")
    assert len(receiver.calls) == len(ids), "an orderly stop repeats nothing"


def test_an_erased_request_is_told_to_nobody(here: Site, receiver: Receiver) -> None:
    receiver.answer = lambda _: (500, {})
    sender = here.sender("h1", first_retry_s=1)
    request_id = here.submit(receiver.url)
    here.until(request_id, "waiting")
    with here.client as client:
        assert client.delete(f"/v1/requests/{request_id}").status_code == 200
    here.get(f"/v1/requests/{request_id}/deliveries", 410)

    def dropped() -> bool:
        return sender.metric("penstock_webhooks_total", state="dropped") == 1

    wait_until(dropped, DEADLINE_S, lambda: here.system.logs(30))
    before = len(receiver.calls)
    other = here.submit(receiver.url)
    calls_of(receiver, other, here, 2)
    assert len(receiver.of(request_id)) == before
    assert not [one for one in here.system.dead_letters() if one.request_id in (request_id, other)]
    receiver.answer = lambda _: (204, {})
    here.until(other, "delivered")


def test_statuses_are_told_too_where_they_are_asked_for(here: Site, receiver: Receiver) -> None:
    """Why it waits, that it runs, its outcome; also when the sender is killed in between."""

    def kinds(request_id: str) -> list[str]:
        return [call.json["type"] for call in receiver.of(request_id)]

    def until_told(request_id: str, kind: str) -> Call:
        def told() -> Call | None:
            return next((call for call in receiver.of(request_id) if call.json["type"] == kind), None)

        return wait_until(told, DEADLINE_S, lambda: f"{kinds(request_id)}\n{here.system.logs(30)}")

    with here.client as client:
        first = here.sender("h1")
        assert client.post("/v1/admin/models/slow/pause", json={}).status_code == 202
        body = {"model": "slow", "metadata": {"order": "9"}}
        told = here.submit(receiver.url, callback_statuses=True, **body)
        untold = here.submit(receiver.url, **body)
        said = until_told(told, "request.queued").verified()
        assert said["data"]["waiting_for"]["reason"] == "paused"
        assert (said["data"]["metadata"], said["data"]["done"]) == ({"order": "9"}, False)
        first.kill9()
        assert client.post("/v1/admin/models/slow/resume", json={}).status_code == 202
        here.sender("h2")
        until_told(told, "request.running")
        for request_id in (told, untold):
            assert client.post(f"/v1/requests/{request_id}/cancel").status_code == 202
        until_told(told, "request.cancelled")
        until_told(untold, "request.cancelled")
        assert kinds(untold) == ["request.cancelled"]
        by_id = {call.headers["webhook-id"]: call.json["type"] for call in receiver.of(told)}
        assert sorted(by_id.values()) == ["request.cancelled", "request.queued", "request.running"]
        none = {"task": "text_generation", "payload": {"prompt": "x"}, "callback_statuses": True}
        assert client.post("/v1/requests", json=none).json()["error"]["param"] == "callback_statuses"
