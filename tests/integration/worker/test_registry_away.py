"""A record whose schema only the registry knows, while the registry is away: intake waits, nothing is dead-lettered."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest
from confluent_kafka import Producer

from penstock.schemas.codec import Codec, schema_text
from penstock.schemas.requests import parse_request
from system import System, eventually
from worker_requests import outcome, send

FOREIGN_ID = 7


class Registry(ThreadingHTTPServer):
    """A registry that answers 503 until it is `up`."""

    up = False
    asked = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Registry

    def do_GET(self) -> None:
        self.server.asked += 1
        found = self.server.up and self.path.endswith(f"/schemas/ids/{FOREIGN_ID}")
        body = json.dumps({"schema": schema_text("InferenceRequest")} if found else {"message": "not now"}).encode()
        self.send_response(200 if found else 503)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def registry() -> Iterator[Registry]:
    server = Registry(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_an_absent_registry_pauses_intake(make_system: Callable[..., System], registry: Registry) -> None:
    system = make_system()
    worker = system.worker(env={"PENSTOCK_SCHEMA_REGISTRY__URL": registry.url}).wait_ready()
    body = {"task": "text_generation", "payload": {"prompt": "hi"}}
    request = parse_request(body, request_id="foreign", now_ms=1)
    producer = Producer({"bootstrap.servers": system.bootstrap})
    topic = system.names.request("text_generation", 5)
    producer.produce(topic, Codec(writer_ids={"InferenceRequest": FOREIGN_ID}).encode(request), partition=0)
    assert producer.flush(60) == 0
    eventually(lambda: not worker.ready(), 30, worker.tail)
    assert "registry" in httpx.get(worker.url + "/readyz").text
    asked = registry.asked
    eventually(lambda: registry.asked > asked + 1, 30, worker.tail)
    assert system.results() == []
    assert system.dead_letters() == []
    registry.up = True
    assert outcome(system, "foreign").status == "completed", worker.tail()
    worker.wait_ready(10)
    send(system, {"request_id": "next"})
    assert outcome(system, "next").status == "completed", worker.tail()
    eventually(lambda: system.lag() == 0, 20, worker.tail)
