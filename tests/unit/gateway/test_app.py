"""The whole app: built before the first request, its page of routes, and the response to an unknown path."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from fastapi import FastAPI, routing

from kit.gateway_http import client
from penstock.gateway.app import create_app, prepare_to_serve
from penstock.gateway.document.described_routes import DOCUMENTED
from penstock.gateway.document.unknown_paths import near_paths
from penstock.gateway.settings import GatewaySettings


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
    built, analyse = list[str](), routing.get_dependant

    def noted(*, path: str, **named: object) -> object:
        built.append(path)
        return analyse(path=path, **named)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(routing, "get_dependant", noted)
    async with client(app) as http:
        assert (await http.get("/v1/models")).status_code == 503  # it is not connected
        assert (await http.get("/healthz")).status_code == 200
    assert (len(built) == 0) if prepared else (len(built) > 50)


async def test_the_page_of_routes_loads_nothing_from_elsewhere(app: FastAPI) -> None:
    async with client(app) as http:
        answer = await http.get("/docs")
    assert answer.status_code == 200
    assert "<script" not in answer.text
    assert re.findall(r'(?:src|href)="(?!/openapi.json|#)[^"]*"', answer.text) == []
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert [path for _, path in DOCUMENTED if f"<code>{path}</code>" not in answer.text] == []


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
    async with client(app) as http:
        answer = await http.get(path)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], len(error["message"]) < 300) == (404, "not_found", True)
    if near is None:
        assert error["message"].endswith("GET /docs lists the routes")
        assert near_paths("/v1", [path for _, path in DOCUMENTED]) == []
    else:
        assert (error["details"]["near"][0], near in error["message"]) == (near, True)
