"""No body has fields that are silently ignored: they are refused, or OpenAI's routes name them."""

from __future__ import annotations

from collections.abc import Iterator
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import pytest
from fastapi import FastAPI
from pydantic import BaseModel

from gateway_parts import routes_with
from kit.gateway_http import client, gateway_app
from penstock.gateway.document.described_routes import ROUTES
from penstock.gateway.edge.rules import RouteKey, Rules, Takes
from penstock.gateway.openai.chat_bodies import OpenAIBody, StreamOptions
from penstock.gateway.openai.responses_bodies import Reasoning, TextOptions
from penstock.gateway.routes.conversation_answers import NewSummary

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
def app() -> FastAPI:
    paths = {("POST", "/v1/acts"): Rules(scope="cancel"), ("DELETE", "/v1/acts"): Rules(scope="cancel")}
    app = gateway_app(routes=routes_with(paths))

    @app.api_route("/v1/acts", methods=["POST", "DELETE"])
    async def _acts() -> str:  # pyright: ignore[reportUnusedFunction]
        return "done"

    return app


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
    app: FastAPI, method: str, body: bytes, status: int, param: str | None
) -> None:
    async with client(app) as http:
        answer = await http.request(method, "/v1/acts", content=body)
        assert answer.status_code == status
        if status != 200:
            assert answer.json()["error"]["param"] == param


def test_every_route_that_is_documented_with_a_body_takes_one() -> None:
    """Else it would be refused as one that no route reads."""
    for key, body in BODIES.items():
        assert body is None or ROUTES[key].rules.takes is not Takes.NOTHING, key
