"""The edge on a real server: large bodies, sockets by ticket, health, metrics, CORS, and unlisted paths."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import openai
import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from penstock.gateway.edge.keys import create_key
from penstock.schemas.records import ModelState, WorkerState

if TYPE_CHECKING:
    from .conftest import Server


def test_a_10_mb_body_is_413_for_the_stock_client_and_it_goes_on(server: Server) -> None:
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="unused", max_retries=0)
    for _ in range(2):
        with pytest.raises(openai.APIStatusError) as caught:
            client.chat.completions.create(model="smol", messages=[{"role": "user", "content": "x" * 10_000_000}])
        assert (caught.value.status_code, caught.value.code) == (413, "too_large")
    answer = client.chat.completions.create(model="smol", messages=[{"role": "user", "content": "say on"}])
    assert answer.choices[0].message.content == "on"


def test_a_body_without_a_length_stops_at_the_limit(server: Server) -> None:
    def drip() -> Iterator[bytes]:
        for _ in range(40):
            yield b"x" * 100_000

    answer = httpx.post(server.url + "/v1/embeddings", content=drip(), headers={"content-type": "application/json"})
    assert answer.status_code == 413


@pytest.mark.parametrize(
    ("method", "path", "content", "status", "code", "words"),
    [
        ("GET", "/v1/nothing", None, 404, "not_found", "there is no route /v1/nothing"),
        ("PUT", "/v1/models", None, 405, "method_not_allowed", "PUT is not allowed here; GET is"),
        ("POST", "/v1/chat/completions", b"{", 400, "invalid", "not valid JSON"),
        ("POST", "/v1/chat/completions", b"[]", 400, "invalid", "not a valid JSON object"),
        ("POST", "/v1/chat/completions", b"\xff", 400, "invalid", "JSON"),
        ("POST", "/v1/chat/completions", b"[" * 100_000, 400, "invalid", "levels"),
        ("POST", "/v1/chat/completions", b'{"model": "smol"}', 400, "invalid", "messages"),
    ],
)
def test_everything_else_has_the_one_shape(
    server: Server, method: str, path: str, content: bytes | None, status: int, code: str, words: str
) -> None:
    answer = httpx.request(method, server.url + path, content=content, headers={"content-type": "application/json"})
    assert answer.status_code == status, answer.text
    assert set(answer.json()["error"]) == {"message", "type", "code", "param", "request_id", "retryable", "details"}
    assert answer.json()["error"]["code"] == code
    assert words in answer.json()["error"]["message"]
    assert answer.headers["x-request-id"]


@pytest.mark.parametrize("path", ["/registry/subjects/x", "/registry/nothing"])
def test_the_registry_refuses_in_its_own_shape(server: Server, path: str) -> None:
    answer = httpx.post(server.url + path, content=b"[" * 5_000, headers={"content-type": "application/json"})
    assert answer.json()["error_code"] == answer.status_code == (404 if path.endswith("nothing") else 400)
    assert answer.headers["content-type"] == "application/vnd.schemaregistry.v1+json"


def test_health_and_metrics(server: Server) -> None:
    assert httpx.get(server.url + "/healthz").json() == {"status": "ok"}
    answer = httpx.get(server.url + "/readyz")
    without = ["far", "org/minilm", "smol"]
    said = answer.json()
    dependencies = {one["name"]: one["ok"] for one in said.pop("dependencies")}
    assert dependencies == {"transactions": True, "usage": True}
    assert (answer.status_code, said) == (
        200,
        {
            "status": "degraded",
            "models_without_worker": without,
            "waiting_without_worker": [],
            "file_differences": [],
            "reason": "no worker is alive",
        },
    )
    assert httpx.get(server.url + "/readyz?require=workers").status_code == 503
    assert httpx.get(server.url + "/readyz?require=nothing").status_code == 400
    states = [ModelState(model=one, state="ready") for one in ("smol", "far")]
    live = WorkerState(worker_id="w", state="running", started_at=0, updated_at=0, models=states)
    server.service.workers.append(live)
    assert httpx.get(server.url + "/readyz").json()["models_without_worker"] == ["org/minilm"]
    available = {one["id"]: one["available"] for one in httpx.get(server.url + "/v1/models").json()["data"]}
    assert available == {"smol": True, "far": True, "org/minilm": False}
    states.append(ModelState(model="org/minilm", state="ready"))
    answer = httpx.get(server.url + "/readyz?require=workers")
    assert (answer.status_code, answer.json()["status"], answer.json()["reason"]) == (200, "ready", None)
    for path in ("/health", "/healthz", "/readyz", "/metrics"):
        answer = httpx.head(server.url + path)
        assert (answer.status_code, answer.content) == (200, b"")
    server.service.ready = type(server.service.ready)(False, "behind on the result topic")
    try:
        answer = httpx.get(server.url + "/readyz")
    finally:
        server.service.ready = type(server.service.ready)(True)
    assert answer.status_code == 503
    assert answer.json()["reason"] == "behind on the result topic"
    assert answer.json()["status"] == "unavailable"
    text = httpx.get(server.url + "/metrics").text
    assert 'penstock_queue_depth{class="high"} 2.0' in text
    assert 'penstock_oldest_age_seconds{class="high"} 1.5' in text
    assert "penstock_inflight 3.0" in text


def test_a_foreign_page_is_refused(server: Server) -> None:
    answer = httpx.get(server.url + "/v1/models", headers={"origin": "https://evil.example"})
    assert answer.status_code == 403
    assert answer.json()["error"]["code"] == "forbidden"
    assert answer.headers["access-control-allow-origin"] == "https://evil.example", "its page can read the text"
    with pytest.raises(ConnectionClosed) as caught, connect(ws(server), origin="https://evil.example") as socket:  # type: ignore[arg-type]
        socket.recv(5)
    assert caught.value.rcvd is not None
    assert caught.value.rcvd.code == 4403


def ws(server: Server, query: str = "") -> str:
    return server.url.replace("http", "ws") + "/v1/ws" + query


@pytest.fixture
def keyed(tmp_path: Path, serve_with_keys) -> Iterator[tuple[Server, str]]:  # type: ignore[no-untyped-def]
    path = tmp_path / "keys.json"
    key = create_key(path, tenant="acme")
    with serve_with_keys(path) as running:
        yield running, key


def test_a_browser_gets_in_by_ticket_and_the_log_shows_none(
    keyed: tuple[Server, str], caplog: pytest.LogCaptureFixture
) -> None:
    server, key = keyed
    page = {"origin": "https://app.example", "access-control-request-method": "POST"}
    preflight = httpx.options(server.url + "/v1/tickets", headers=page)
    assert preflight.headers["access-control-allow-origin"] == "https://app.example"
    headers = {"authorization": f"Bearer {key}", "origin": "https://app.example"}
    answer = httpx.post(server.url + "/v1/tickets", headers=headers)
    assert answer.headers["access-control-allow-origin"] == "https://app.example"
    ticket = answer.json()["ticket"]
    with (
        caplog.at_level(logging.INFO, "uvicorn.error"),
        connect(ws(server, f"?ticket={ticket}"), subprotocols=["penstock.v1"]) as socket,  # type: ignore[list-item]
    ):
        assert socket.recv(5) == "acme"
    assert ticket not in caplog.text
    with (
        pytest.raises(ConnectionClosed) as caught,
        connect(ws(server, f"?ticket={ticket}"), subprotocols=["penstock.v1"]) as socket,  # type: ignore[list-item]
    ):
        socket.recv(5)
    assert caught.value.rcvd is not None
    assert caught.value.rcvd.code == 4401


def test_with_keys_the_stock_clients_use_them(keyed: tuple[Server, str]) -> None:
    server, key = keyed
    client = openai.OpenAI(base_url=server.url + "/v1", api_key=key, max_retries=0)
    answer = client.chat.completions.create(model="smol", messages=[{"role": "user", "content": "say mine"}])
    assert answer.choices[0].message.content == "mine"
    assert server.service.requests[-1].tenant == "acme"
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=server.url + "/v1", api_key="no", max_retries=0).models.list()
    assert httpx.get(server.url + "/registry/subjects").status_code == 200
