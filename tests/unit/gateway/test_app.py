"""What the framework puts off to the first requests is done before there are any."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from penstock.gateway.app import create_app, prepare_to_serve
from penstock.gateway.settings import GatewaySettings


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths of routes whose dependencies are analysed from now on."""
    from fastapi import routing

    found: list[str] = []
    analyse = routing.get_dependant

    def noted(*, path: str, **named: object) -> object:
        found.append(path)
        return analyse(path=path, **named)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(routing, "get_dependant", noted)
    return found


def new_app(folder: Path) -> FastAPI:
    return create_app(GatewaySettings.model_validate({"gateway": {"view_path": str(folder / "view.sqlite")}}))


async def ask(app: FastAPI) -> None:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        assert (await client.get("/v1/models")).status_code == 503  # it is not connected
        assert (await client.get("/healthz")).status_code == 200


async def test_the_first_request_builds_no_routes(tmp_path: Path, built: list[str]) -> None:
    app = new_app(tmp_path)
    await prepare_to_serve(app)
    built.clear()
    await ask(app)
    assert built == []


async def test_else_it_would_build_all_of_them(tmp_path: Path, built: list[str]) -> None:
    app = new_app(tmp_path)
    built.clear()
    await ask(app)
    assert len(built) > 50
