"""What no route has, or JSON cannot hold, in a query, a body or a field, is refused by its name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from types import SimpleNamespace, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints
from unittest.mock import AsyncMock, Mock

import httpx
import pytest
from fastapi import FastAPI
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types import batch_list_params, file_list_params
from openai.types.conversations import item_list_params
from openai.types.responses import input_item_list_params, response_retrieve_params
from pydantic import BaseModel
from pydantic_core import from_json

from gateway_parts import routes_with, service_with
from kit.examples import examples
from kit.gateway_http import call, gateway_app
from penstock.gateway.app import ROUTERS, create_app
from penstock.gateway.context import context_of_app
from penstock.gateway.document.described_routes import ROUTES, TABLE
from penstock.gateway.edge.rules import WEBSOCKET, RouteKey, Rules, Takes
from penstock.gateway.openai.chat_bodies import OpenAIBody, StreamOptions
from penstock.gateway.openai.responses_bodies import Reasoning, TextOptions
from penstock.gateway.routes.conversation_answers import NewSummary
from penstock.gateway.settings import GatewaySettings

# -- query strings


CONTENT = "/v1/artifacts/a/content"


@pytest.fixture(scope="module")
def app() -> FastAPI:
    """A gateway without parts behind its routes."""
    app = create_app(GatewaySettings())
    context_of_app(app).connected = service_with(
        SimpleNamespace(catching_up=lambda: None, history_until_ms=lambda: None)
    )
    context_of_app(app).access = Mock(begin_action=AsyncMock(return_value=AsyncMock()))
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
        ("GET", "/v1/requests?stauts=queued", "this route has after, changed_since, class, conversation_id"),
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
    assert (await call(create_app(GatewaySettings()), "GET", path)).status_code in (200, 503)


# -- bodies by one reader


JSON = (Takes.JSON, Takes.LARGE_JSON, Takes.FORM)
NO_JSON = ("/v1/files", "/v1/images/edits", "/v1/images/variations")
PATHS = sorted(
    path.replace("{", "").replace("}", "").replace(":path", "")
    for method, path in ROUTES
    if method == "POST" and TABLE.rules(method, path).takes in JSON and path not in NO_JSON
)
UNREAD = ("/v1/admin/models", "/v1/requests")
"""Without a broker they answer before they read."""
FIELDS = ("prompt_cache_key", "safety_identifier", "tool_choice", "metadata", "user", "model", "input", "messages")
NAMES = st.sampled_from(FIELDS) | st.text("abc", min_size=1, max_size=3)
ODD = st.sampled_from(["NaN", "Infinity", "-Infinity", "1e999", "9" * 5_000, r'"\ud83d"', r'"a\udc00"', r'["\ud800"]'])


@cache
def whole_app() -> FastAPI:
    return gateway_app(*ROUTERS, hot=True)


async def post(path: str, content: bytes) -> httpx.Response:
    return await call(whole_app(), "POST", path, content=content, headers={"content-type": "application/json"})


def refused(answer: httpx.Response) -> tuple[int, str | None, str]:
    """Its status, param and message, read as strictly as JSON is defined."""
    body = from_json(answer.content, allow_inf_nan=False)
    error = body.get("error", {"param": None} | body)  # a registry's shape has no param
    return answer.status_code, error["param"], error["message"]


@pytest.mark.parametrize("path", PATHS)
@settings(max_examples=examples(40), deadline=None)
@given(st.lists(NAMES, min_size=1, max_size=3), ODD)
async def test_what_json_cannot_hold_is_refused_by_its_place(path: str, at: list[str], odd: str) -> None:
    text = odd
    for name in reversed(at):
        text = f'{{"id": 1, "{name}": {text}}}'
    place = ".".join(at) + ("[0]" if odd[0] == "[" else "")
    status, param, message = refused(await post(path, text.encode()))
    told = message.startswith(place) if path.startswith("/registry/") else param == place
    assert (told and status == 400) or (status == 503 and path in UNREAD), message


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("content", [b"{", b"\xff", b"[" * 20_000, b'{"a":' * 300 + b"1" + b"}" * 300])
async def test_what_is_no_json_is_refused(path: str, content: bytes) -> None:
    status, param, _ = refused(await post(path, content))
    assert (status, param) == (400, None) or (status == 503 and path in UNREAD)


# -- no body has fields that are silently ignored


BODIES = {key: route.documented.body for key, route in ROUTES.items() if route.documented is not None}
ELSEWHERE = (OpenAIBody, StreamOptions, Reasoning, TextOptions, NewSummary)
"""`other_fields` judges OpenAI's, and those of a request of any task stand beside a summary's."""


def models_in(kind: Any) -> Iterator[type[BaseModel]]:
    """The models of an annotation, and those of their fields."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        yield kind
        for field in kind.model_fields.values():
            yield from models_in(field.annotation)
    elif get_origin(kind) in (Union, UnionType, Annotated, list, dict, tuple):
        for one in get_args(kind):
            yield from models_in(one)


@pytest.mark.parametrize(("key", "body"), [(key, body) for key, body in BODIES.items() if body is not None])
def test_models_of_bodies_forbid_what_they_do_not_have(key: RouteKey, body: Any) -> None:
    for model in models_in(body):
        assert model.model_config.get("extra") == "forbid" or issubclass(model, ELSEWHERE), (key, model)


@pytest.fixture
def acting_app() -> FastAPI:
    paths = {("POST", "/v1/acts"): Rules(scope="cancel"), ("DELETE", "/v1/acts"): Rules(scope="cancel")}
    acting_app = gateway_app(routes=routes_with(paths))

    @acting_app.api_route("/v1/acts", methods=["POST", "DELETE"])
    async def _acts() -> str:  # pyright: ignore[reportUnusedFunction]
        return "done"

    return acting_app


@pytest.mark.parametrize("method", ["POST", "DELETE"])
@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        (b"", 200, None),
        (b" {} ", 200, None),
        (b"null", 200, None),
        (b'{"reason": "x"}', 400, "reason"),
        (b"[1]", 400, None),
        (b"no json", 400, None),
        (b"{" + b" " * 70_000 + b"}", 413, None),
    ],
)
async def test_a_route_that_takes_no_body_refuses_one_that_says_something(
    acting_app: FastAPI, method: str, body: bytes, status: int, param: str | None
) -> None:
    answer = await call(acting_app, method, "/v1/acts", content=body)
    assert answer.status_code == status
    assert status == 200 or answer.json()["error"]["param"] == param


def test_every_route_that_is_documented_with_a_body_takes_one() -> None:
    """Else it would be refused as one that no route reads."""
    for key, body in BODIES.items():
        assert body is None or ROUTES[key].rules.takes is not Takes.NOTHING, key
