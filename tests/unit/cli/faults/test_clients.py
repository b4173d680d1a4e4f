"""The clients of the fault table against a gateway that is written down here, and a producer that fails at first."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Generator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.faults import clients as module
from penstock.cli.faults.clients import KINDS, Asked, Clients
from penstock.cli.faults.histories import Entry, History, read, text_or_digest
from penstock.common.settings import KafkaSettings
from penstock.schemas.errors import BrokerUnavailable

LARGE = "x" * 300_000
OUTCOME = {"done": True, "status": "completed", "error": None}
STORED = {**OUTCOME, "result": {"artifact": {"artifact_id": "art", "url": "/v1/artifacts/art/content"}}}


class Gateway(ThreadingHTTPServer):
    """Accepts every request as `r`. The store behind it is away for the first fetch."""

    daemon_threads = True
    refuses = False
    fetches = 0
    asked = 0


class Handler(BaseHTTPRequestHandler):
    server: Gateway  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.answer(400 if self.server.refuses else 202, {"request_id": "r"})

    def do_GET(self) -> None:
        if self.path.startswith("/v1/artifacts/"):
            self.server.fetches += 1
            self.answer(503 if self.server.fetches == 1 else 200, {"text": LARGE})
        else:
            self.server.asked += 1
            self.answer(200, STORED)

    def answer(self, status: int, body: Any) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def gateway() -> Generator[Gateway]:
    server = Gateway(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


class Producer:
    """Of the first calls none is acknowledged."""

    failures = 2

    def __init__(self, settings: KafkaSettings) -> None:
        self.sent: list[str] = []

    def __enter__(self) -> Producer:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def submit(self, *, request_id: str, **fields: Any) -> None:
        self.sent.append(request_id)
        if len(self.sent) <= self.failures:
            raise BrokerUnavailable("no broker answers")


def asked(client: str) -> Asked:
    return Asked(number=KINDS.index(client), body={"task": "text_generation", "payload": {"prompt": "x"}}, text=LARGE)


def heard(path: Path, client: str, url: str = "http://127.0.0.1:1", *, within_s: float = 20) -> list[Entry]:
    """The history of one client."""
    history = History(path / "row.jsonl")

    async def play() -> None:
        clients = Clients(history, url, KafkaSettings(), [asked(client)], key="k")
        clients.start()
        async with asyncio.timeout(20):
            waited = 0.0
            while waited < within_s and not all(task.done() for task in clients.tasks):
                await asyncio.sleep(0.01)
                waited += 0.01
        await clients.ask_again()
        await clients.stop()

    asyncio.run(play())
    history.close()
    return list(read(path / "row.jsonl"))


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "Client", Producer)
    monkeypatch.setattr(module, "AGAIN_S", 0.01)


def test_a_large_output_is_fetched_when_the_store_is_back(tmp_path: Path, gateway: Gateway) -> None:
    lines = heard(tmp_path, "poll", f"http://127.0.0.1:{gateway.server_port}")
    whats = [line["what"] for line in lines]
    assert whats == ["expected", "acknowledged", "outcome", "fetched", "outcome_again"]
    assert "text" not in lines[2]
    assert lines[2]["artifact"] == lines[3]["artifact"] == lines[4]["artifact"] == "art"
    assert lines[3]["text"] == text_or_digest(LARGE)
    assert (gateway.asked, gateway.fetches) == (2, 2)


def test_a_client_that_fails_says_why(tmp_path: Path, gateway: Gateway) -> None:
    gateway.refuses = True
    (line,) = heard(tmp_path, "poll", f"http://127.0.0.1:{gateway.server_port}")
    assert line["what"] == "not_settled"
    assert "the gateway refused a request" in line["how"]


def test_a_request_is_produced_until_the_broker_acknowledges_it(tmp_path: Path) -> None:
    lines = heard(tmp_path, "avro")
    assert [(line["what"], line["request_id"]) for line in lines] == [("expected", "k-3"), ("acknowledged", "k-3")]


def test_a_request_that_was_never_acknowledged_is_no_silent_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Producer, "failures", 1 << 30)
    (line,) = heard(tmp_path, "avro", within_s=0.2)
    assert (line["what"], line["how"]) == ("not_settled", "k-3 was not acknowledged: no broker answers")
