"""A gateway that is started before its broker: HTTP is up and says 503, and it serves as soon as Kafka is there."""

from __future__ import annotations

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
