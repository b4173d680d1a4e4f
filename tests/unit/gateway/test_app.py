"""The whole app and its process: routes, their page and their OpenAPI document, its stop and its faults."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Callable, Coroutine
from importlib.resources import files
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
import uvicorn
from fastapi import FastAPI, routing
from openapi_spec_validator import validate
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from kit.gateway_http import call
from penstock.cli.paths import free_port
from penstock.common.configuration import KafkaSection
from penstock.gateway.app import create_app, prepare_to_serve, run_gateway
from penstock.gateway.bridge.app import run_bridge
from penstock.gateway.bridge.settings import BridgeSettings
from penstock.gateway.document.described_routes import DOCUMENTED
from penstock.gateway.document.unknown_paths import near_paths
from penstock.gateway.routes.answers import MadeImage, Result
from penstock.gateway.server import Server
from penstock.gateway.settings import GatewaySettings
from penstock.schemas.bodies import EmbeddingRequest, TextRequest, json_schema
from support import wait_until_async


def new_app(folder: Path) -> FastAPI:
    """Never started: it has no Kafka."""
    return create_app(GatewaySettings.model_validate({"gateway": {"view_path": str(folder / "view.sqlite")}}))


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> FastAPI:
    return new_app(tmp_path_factory.mktemp("gateway"))


@pytest.mark.parametrize("prepared", [True, False])
async def test_a_prepared_app_builds_no_routes_at_its_first_request(
    tmp_path: Path, prepared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The framework puts the analysis of all routes off to the first request."""
    app = new_app(tmp_path)
    if prepared:
        await prepare_to_serve(app)
    monkeypatch.setattr(routing, "get_dependant", built := Mock(wraps=routing.get_dependant))
    assert (await call(app, "GET", "/v1/models")).status_code == 503  # it is not connected
    assert (await call(app, "GET", "/healthz")).status_code == 200
    assert (built.call_count == 0) if prepared else (built.call_count > 50)


async def test_documents_that_are_asked_for_at_once_are_made_once(tmp_path: Path) -> None:
    app = new_app(tmp_path)
    answers = await asyncio.gather(*(call(app, "GET", "/openapi.json") for _ in range(4)))
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.content for answer in answers}) == 1


async def test_the_page_of_routes_loads_nothing_from_elsewhere_and_has_the_codes_of_errors(app: FastAPI) -> None:
    """The console links to the codes."""
    answer = await call(app, "GET", "/docs")
    assert answer.status_code == 200
    assert "<script" not in answer.text
    assert re.findall(r'(?:src|href)="(?!/openapi.json|/asyncapi.json|#)[^"]*"', answer.text) == []
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert [path for _, path in DOCUMENTED if f"<code>{path}</code>" not in answer.text] == []
    assert "<tr id=not_found><td><code>not_found</code><td>404<td>no<td>There is no such request" in answer.text
    assert "`" not in answer.text.partition("<h2>errors</h2>")[2].partition("</table>")[0]


@pytest.mark.parametrize("path", ["", "requests", "requests/r.1", "more.jsx"])
async def test_a_path_below_the_console_leads_browsers_to_its_page(app: FastAPI, path: str) -> None:
    browser = {"accept": "text/html"}
    answer = await call(app, "GET", f"/console/{path}", headers=browser)
    assert (answer.status_code, answer.headers["location"]) == (307, f"/console#/{path}")
    assert (await call(app, "GET", "/console/none.js", headers=browser)).status_code == 404


EVENTS = "/v1/requests/{request_id}/events"


@pytest.mark.parametrize(
    ("path", "near"),
    [
        ("/v1/chat/completion", "/v1/chat/completions"),
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/request", "/v1/requests"),
        (EVENTS.format(request_id="3f6c1f5e-52a9-5d0e-9c54-504e53544b31").removesuffix("s"), EVENTS),
        ("/v1/chat", "/v1/chat/completions"),
        ("/v1/model", "/v1/models"),
        ("/v1/" + "%ff" * 500, None),
    ],
)
async def test_the_response_to_an_unknown_path_names_a_near_one_or_the_page_of_routes(
    app: FastAPI, path: str, near: str | None
) -> None:
    answer = await call(app, "GET", path)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], len(error["message"]) < 300) == (404, "not_found", True)
    if near is None:
        assert error["message"].endswith("GET /docs lists the routes")
        assert near_paths("/v1", [path for _, path in DOCUMENTED]) == []
    else:
        assert (error["details"]["near"][0], near in error["message"]) == (near, True)


# -- a server that stops while a socket or a connection is being opened


class Serving:
    """A server of this app on a port of its own."""

    def __init__(self, app: Any, **options: Any) -> None:
        self.port = free_port()
        self.server = Server(
            uvicorn.Config(app, host="127.0.0.1", port=self.port, lifespan="off", log_level="error", **options)
        )

    async def __aenter__(self) -> Serving:
        self.serving = asyncio.create_task(self.server.serve())
        await wait_until_async(lambda: self.server.started, 10)
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.wait_for(self.serving, 20)

    async def begins_to_stop(self) -> None:
        self.server.should_exit = True
        await wait_until_async(lambda: not any(one.is_serving() for one in self.server.servers), 10)


@pytest.mark.parametrize("ws", ["websockets-sansio", "auto"])
async def test_a_socket_that_is_opened_at_the_stop_is_told_to_come_again(ws: Any) -> None:
    asked, answer = asyncio.Event(), asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        asked.set()
        await answer.wait()
        await send({"type": "websocket.accept"})
        await receive()

    async def opened(port: int) -> int | None:
        async with connect(f"ws://127.0.0.1:{port}") as client:
            with pytest.raises(ConnectionClosed):
                await client.recv()
            return client.close_code

    async with asyncio.timeout(30), Serving(app, ws=ws) as site:
        opening = asyncio.create_task(opened(site.port))
        await asked.wait()
        await site.begins_to_stop()
        answer.set()
        assert await opening == 1012


@pytest.mark.parametrize("http", ["httptools", "h11"])
async def test_a_connection_that_was_just_made_is_answered_at_the_stop(http: Any) -> None:

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    async with asyncio.timeout(30), Serving(app, http=http) as site:
        reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
        await wait_until_async(lambda: bool(site.server.server_state.connections), 10)
        await site.begins_to_stop()
        writer.write(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 200")
        assert answer.endswith(b"ok")
        writer.close()


# -- what a callback of the event loop raises is logged and ends its process, in order and with the exit code 1


def gateway(kafka: KafkaSection, port: int, folder: Path) -> Coroutine[None, None, int]:
    section = {"port": port, "view_path": folder / "view.sqlite", "drain_s": 0}
    return run_gateway(GatewaySettings.model_validate({"kafka": kafka, "gateway": section}))


def bridge(kafka: KafkaSection, port: int, folder: Path) -> Coroutine[None, None, int]:
    section = {"health_port": port, "artifacts_dir": str(folder)}
    return run_bridge(BridgeSettings.model_validate({"kafka": kafka, "bridge": section, "queues": [{"topic": "jobs"}]}))


@pytest.mark.parametrize("process", [gateway, bridge])
async def test_a_callback_that_raises_ends_the_process(
    process: Callable[[KafkaSection, int, Path], Coroutine[None, None, int]],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    port, kafka = free_port(), KafkaSection(bootstrap_servers=f"127.0.0.1:{free_port()}")
    running = asyncio.create_task(process(kafka, port, tmp_path))
    async with httpx.AsyncClient() as http:

        async def lives() -> bool:
            try:
                return (await http.get(f"http://127.0.0.1:{port}/healthz")).status_code == 200
            except httpx.TransportError:
                return False

        await wait_until_async(lives, 60)

    def fails() -> None:
        raise KeyError("as in a bug")

    with caplog.at_level(logging.ERROR):
        asyncio.get_running_loop().call_soon(fails)
        async with asyncio.timeout(60):
            assert await running == 1
    (record,) = [one for one in caplog.records if one.exc_info and one.exc_info[0] is KeyError]
    assert "fails" in record.getMessage()


# -- the OpenAPI document


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    app = create_app(GatewaySettings())
    made = app.openapi()
    assert made is app.openapi()
    return made


def operations(document: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    return {
        (method.upper(), path): operation
        for path, found in document["paths"].items()
        for method, operation in found.items()
    }


EVENT = json.loads((files("penstock.schemas") / "avro" / "ResultEvent.avsc").read_text())


def record_in(schema: Any) -> dict[str, Any]:
    """The record in a field's type: of a union, or of an array."""
    inner = next(one for one in schema if one != "null") if isinstance(schema, list) else schema
    return inner if inner["type"] == "record" else record_in(inner["items"])


def fields_of(schema: Any) -> dict[str, Any]:
    return {field["name"]: field["type"] for field in record_in(schema)["fields"]}


def test_answers_have_each_field_of_the_records() -> None:
    """Generated clients know no more than is documented."""
    event = fields_of(EVENT)
    for output in ("text_generation", "embedding", "image_generation", "conversation_items"):  # other tasks use one
        assert fields_of(event[output]).keys() <= Result.model_fields.keys(), output
    assert fields_of(fields_of(event["image_generation"])["images"]).keys() == MadeImage.model_fields.keys()


def test_it_is_valid(document: dict[str, Any]) -> None:
    validate(json.loads(json.dumps(document)))


def test_every_route_says_what_it_takes_and_answers(document: dict[str, Any]) -> None:
    assert operations(document).keys() == DOCUMENTED.keys()
    for (method, path), operation in operations(document).items():
        where = f"{method} {path}"
        if method == "POST" and path not in NO_BODY:
            (content,) = operation["requestBody"]["content"].values()
            assert content["schema"], where
        good = {status: answer for status, answer in operation["responses"].items() if status[0] == "2"}
        assert good, where
        for status, answer in good.items():
            assert status == "204" or all(found["schema"] is not None for found in answer["content"].values()), where
        for answer in operation["responses"].values():
            assert all(found["schema"] is not None for found in answer.get("content", {}).values()), where
        if path.startswith("/v1/"):
            assert {"bearer": []} in operation["security"], where
            assert {"400", "401", "403", "503", "default"} <= operation["responses"].keys(), where


NO_BODY = {
    "/v1/requests/{request_id}/cancel",
    "/v1/batches/{batch_id}/cancel",
    "/v1/responses/{response_id}/cancel",
    "/v1/tickets",
    "/v1/admin/artifacts/sweep",
    "/v1/admin/conversations/sweep",
    "/v1/admin/models/{model_id}/{action}",
    "/v1/admin/classes/{class_name}/{action}",
}


def test_events_are_declared_as_such(document: dict[str, Any]) -> None:
    of_request, chat = ("GET", "/v1/requests/{request_id}/events"), ("POST", "/v1/chat/completions")
    types = [{*operations(document)[one]["responses"]["200"]["content"]} for one in (of_request, chat)]
    assert types == [{"text/event-stream"}, {"application/json", "text/event-stream"}]


def test_errors_are_ours(document: dict[str, Any]) -> None:
    assert "HTTPValidationError" not in json.dumps(document)
    error = document["components"]["schemas"]["ErrorFacts"]
    assert {"message", "type", "code", "param", "request_id", "retryable", "details"} == set(error["required"])


@pytest.mark.parametrize("kind", [TextRequest, EmbeddingRequest])
def test_bodies_have_a_description_for_all_that_is_not_plain(kind: Any) -> None:
    assert json_schema(kind)["additionalProperties"] is False
