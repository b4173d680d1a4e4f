"""A gateway that is started before its broker: HTTP is up and says 503, and it serves as soon as Kafka is there."""

from __future__ import annotations

import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from penstock.cli.embedded_kafka import EmbeddedKafka
from penstock.cli.paths import free_port
from support import wait_until
from system import System

BODY = {"task": "text_generation", "payload": {"prompt": "hi"}}


@pytest.mark.slow
def test_a_gateway_waits_for_its_broker_and_says_so(tmp_path: Path) -> None:
    kafka = EmbeddedKafka(tmp_path / "kafka", free_port())
    (tmp_path / "system").mkdir()
    system = System(kafka.bootstrap_servers, "away-", tmp_path / "system")
    gateway = system.gateway()

    def answers() -> bool:
        try:
            return httpx.get(gateway.url + "/healthz", timeout=2).status_code == 200
        except httpx.HTTPError:
            return False

    try:
        wait_until(answers, 60, gateway.tail)
        assert httpx.get(gateway.url + "/readyz").status_code == 503
        assert "penstock_queue_depth" in httpx.get(gateway.url + "/metrics").text
        for path in ("/v1/requests", "/v1/chat/completions"):
            refused = httpx.post(gateway.url + path, json=BODY, timeout=5)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "broker_unavailable")
            assert refused.headers["retry-after"] == "1"
        with connect(gateway.url.replace("http", "ws") + "/v1/ws") as socket, pytest.raises(ConnectionClosed) as closed:
            socket.recv(5)
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1013
        kafka.start()
        wait_until(lambda: "missing topics" in httpx.get(gateway.url + "/readyz").text, 60, gateway.tail)
        system.create_topics()
        gateway.wait_ready()
        assert httpx.post(gateway.url + "/v1/requests", json=BODY).status_code == 202
        assert gateway.stop() == 0, gateway.tail()
    finally:
        system.stop()
        kafka.kill()


@pytest.mark.slow
def test_outages_are_503_and_leave_nothing_behind(tmp_path: Path) -> None:
    """Whatever is asked while the broker dies and comes back; and no clients of past outages stay."""
    kafka = EmbeddedKafka(tmp_path / "kafka", free_port())
    kafka.start()
    (tmp_path / "system").mkdir()
    system = System(kafka.bootstrap_servers, "out-", tmp_path / "system")
    system.create_topics()
    answers: list[httpx.Response] = []
    clients: list[int] = []
    try:
        gateway = system.gateway()
        gateway.wait_ready()
        known = httpx.post(gateway.url + "/v1/requests", json=BODY).json()["request_id"]
        before = kafka_clients(gateway.popen.pid)
        for outage in range(2):
            kafka.kill()
            with ThreadPoolExecutor(8) as pool:
                asked = [pool.submit(ask, gateway.url, known, outage, number) for number in range(24)]
                kafka.start()
                answers += [answer.result() for answer in asked]
            gateway.wait_ready()
            answers += [ask(gateway.url, known, outage, number) for number in range(24, 36)]
            clients.append(kafka_clients(gateway.popen.pid))
        wrong = [answer.text for answer in answers if answer.status_code >= 500 and answer.status_code != 503]
        assert wrong == []
        assert all("retry-after" in answer.headers for answer in answers if answer.status_code == 503)
        assert {answer.status_code for answer in answers} <= {200, 202, 404, 503}, [a.text for a in answers]
        # Right after an outage a follower may have no client yet.
        most = max(before, clients[0])
        wait_until(lambda: 0 < kafka_clients(gateway.popen.pid) <= most, 60, lambda: f"{before} {clients}")
    finally:
        system.stop()
        kafka.kill()


def kafka_clients(pid: int) -> int:
    """How many Kafka clients a process has: librdkafka runs one thread of this name for each."""
    return sum(task.read_text() == "rdk:main\n" for task in Path(f"/proc/{pid}/task").glob("*/comm"))


def ask(url: str, known: str, outage: int, number: int) -> httpx.Response:
    """One of the calls that need the broker."""
    with httpx.Client(base_url=url, timeout=60) as http:
        match number % 6:
            case 0:
                return http.post("/v1/requests", json=BODY)
            case 1:
                return http.post("/v1/requests", json=BODY, headers={"idempotency-key": f"{outage}-{number}"})
            case 2:
                return http.post(f"/v1/requests/{known}/cancel")
            case 3:
                return http.get(f"/v1/requests/{uuid.uuid4()}")
            case 4:
                return http.post("/v1/conversations", json={"id": f"c{outage}-{number}"})
            case _:
                return http.get("/v1/conversations")
