"""Query strings: every route refuses an unknown parameter by its name."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any, get_type_hints

import httpx
import pytest
from fastapi import FastAPI
from openai.types import batch_list_params, file_list_params
from openai.types.conversations import item_list_params
from openai.types.responses import input_item_list_params, response_retrieve_params

from gateway_parts import service_with
from penstock.gateway.app import create_app
from penstock.gateway.context import context_of_app
from penstock.gateway.document.described_routes import ROUTES
from penstock.gateway.edge.rules import WEBSOCKET
from penstock.gateway.settings import GatewaySettings

CONTENT = "/v1/artifacts/a/content"


@pytest.fixture(scope="module")
def app() -> FastAPI:
    """A gateway without parts behind its routes."""
    app = create_app(GatewaySettings())
    context_of_app(app).connected = service_with(SimpleNamespace(catching_up=lambda: None))
    return app


async def refusal(app: FastAPI, method: str, path: str) -> dict[str, Any]:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
        answer = await http.request(method, path, json=None if method in ("GET", "HEAD") else {})
        assert answer.status_code == 400, (method, path, answer.text)
        body = answer.json()
        # The shape of a registry's errors has neither.
        return body.get("error", {"code": "unsupported_parameter", "param": "no_such"} | body)


@pytest.mark.parametrize(("method", "path"), sorted(key for key in ROUTES if key[0] != WEBSOCKET))
async def test_every_route_refuses_an_unknown_parameter(app: FastAPI, method: str, path: str) -> None:
    error = await refusal(app, method, re.sub(r"\{[^}]*\}", "1", path) + "?api-version=1&n%6f_such=1")
    assert (error["code"], error["param"]) == ("unsupported_parameter", "no_such")
    assert "`no_such`" in error["message"]


@pytest.mark.parametrize(
    ("path", "parameters"),
    [
        ("/v1/files", file_list_params.FileListParams),
        ("/v1/batches", batch_list_params.BatchListParams),
        ("/v1/responses/r", response_retrieve_params.ResponseRetrieveParamsStreaming),
        ("/v1/responses/r/input_items", input_item_list_params.InputItemListParams),
        ("/v1/conversations/c/items", item_list_params.ItemListParams),
    ],
)
async def test_the_parameters_of_the_stock_client_are_known(app: FastAPI, path: str, parameters: type) -> None:
    query = "&".join("include[]=x" if name == "include" else f"{name}=1" for name in get_type_hints(parameters))
    error = await refusal(app, "GET", f"{path}?no_such=1&{query}")
    assert (error["code"], error["param"]) == ("unsupported_parameter", "no_such")
    known = error["message"].partition("this route has ")[2].split(", ")
    assert {part.partition("=")[0] for part in query.split("&")} <= set(known)


@pytest.mark.parametrize(
    ("method", "path", "known"),
    [
        ("POST", "/v1/requests?dryrun=true", "this route has dry_run, wait"),
        ("GET", "/v1/requests?stauts=queued", "this route has after, class, conversation_id, correlation_id"),
        ("GET", "/v1/requests/r?Wait=3", "this route has ticket, wait"),
        ("GET", "/readyz?requires=workers", "this route has require"),
        ("GET", CONTENT + "?tickets=1", "this route has ticket"),
        ("GET", "/v1/admin/dlq?reasons=poison", "reason"),  # its parameters are those of a model
        ("POST", "/v1/chat/completions?stream=true", "this route has none"),
    ],
)
async def test_the_refusal_names_the_known_parameters(app: FastAPI, method: str, path: str, known: str) -> None:
    assert known in (await refusal(app, method, path))["message"]


@pytest.mark.parametrize(
    "path",
    [
        "/healthz?api-version=2024-10-21",
        "/registry/subjects?deleted=false&subjectPrefix=x",
        "/registry/config?defaultToGlobal=true",
        "/health",
        "/readyz?require=workers",
    ],
)
async def test_parameters_of_stock_clients_are_accepted(path: str) -> None:
    app = create_app(GatewaySettings())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as http:
        assert (await http.get(path)).status_code in (200, 503)
