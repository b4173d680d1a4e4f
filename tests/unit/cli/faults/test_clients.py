"""The clients of the fault table against a scripted gateway, and a producer that fails at first."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from kit.cli import Json, ScriptedGateway
from penstock.cli.faults import clients as module
from penstock.cli.faults.clients import KINDS, Asked, Clients
from penstock.cli.faults.histories import Entry, History, read, text_or_digest
from penstock.common.settings import KafkaSettings
from penstock.schemas.errors import BrokerUnavailable

LARGE = "x" * 300_000
OUTCOME: Json = {"done": True, "status": "completed", "error": None}
ARTIFACT = "/v1/artifacts/art/content"
ACCEPTED: Json = {
    "POST /v1/requests": (202, {"request_id": "r"}),
    "GET /v1/requests/r": {**OUTCOME, "result": {"artifact": {"artifact_id": "art", "url": ARTIFACT}}},
    f"GET {ARTIFACT}": [(503, {}), {"text": LARGE}],
}


class Producer:
    """The first calls fail."""

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


def heard(path: Path, client: str, url: str = "http://127.0.0.1:1", *, within_s: float = 60) -> list[Entry]:
    """The history of one client."""
    history = History(path / "row.jsonl")
    body = {"task": "text_generation", "payload": {"prompt": "x"}}

    async def play() -> None:
        one = Asked(number=KINDS.index(client), body=body, text=LARGE)
        clients = Clients(history, url, KafkaSettings(), [one], key="k")
        clients.start()
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while pending := [task for task in clients.tasks if not task.done()]:  # a task may start another
                    await asyncio.wait(pending)
        await clients.ask_again()
        await clients.stop()

    asyncio.run(play())
    history.close()
    return list(read(path / "row.jsonl"))


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "Client", Producer)
    monkeypatch.setattr(module, "AGAIN_S", 0.01)


def test_a_large_output_is_fetched_when_the_store_is_back(tmp_path: Path, gateway: ScriptedGateway) -> None:
    gateway.play(ACCEPTED)
    lines = heard(tmp_path, "poll", gateway.url)
    whats = [line["what"] for line in lines]
    assert whats == ["expected", "acknowledged", "outcome", "fetched", "outcome_again"]
    assert "text" not in lines[2]
    assert lines[2]["artifact"] == lines[3]["artifact"] == lines[4]["artifact"] == "art"
    assert lines[3]["text"] == text_or_digest(LARGE)
    calls = [call.partition("?")[0] for call in gateway.asked]
    assert (calls.count("GET /v1/requests/r"), calls.count(f"GET {ARTIFACT}")) == (2, 2)


def test_a_client_that_fails_says_why(tmp_path: Path, gateway: ScriptedGateway) -> None:
    gateway.play({"POST /v1/requests": (400, {"request_id": "r"})})
    (line,) = heard(tmp_path, "poll", gateway.url)
    assert line["what"] == "not_settled"
    assert "the gateway refused a request" in line["how"]


def test_a_request_is_produced_until_the_broker_acknowledges_it(tmp_path: Path) -> None:
    lines = heard(tmp_path, "avro")
    assert [(line["what"], line["request_id"]) for line in lines] == [("expected", "k-3"), ("acknowledged", "k-3")]


def test_a_request_that_is_never_acknowledged_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Producer, "failures", 1 << 30)
    (line,) = heard(tmp_path, "avro", within_s=0.2)
    assert (line["what"], line["how"]) == ("not_settled", "k-3 was not acknowledged: no broker answers")
