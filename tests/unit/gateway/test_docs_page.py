"""The page of the routes, and what an unknown path is told."""

from __future__ import annotations

import re
from typing import Any

import pytest
from starlette.testclient import TestClient

from penstock.gateway.app import create_app
from penstock.gateway.document.described_routes import DOCUMENTED
from penstock.gateway.document.unknown_paths import near_paths
from penstock.gateway.settings import GatewaySettings


@pytest.fixture(scope="module")
def client() -> Any:
    return TestClient(create_app(GatewaySettings()), base_url="http://127.0.0.1")  # never started: no Kafka


def test_the_page_loads_nothing_from_elsewhere(client: TestClient) -> None:
    """Issue 8, defect 19."""
    answer = client.get("/docs")
    assert answer.status_code == 200
    assert "<script" not in answer.text
    assert re.findall(r'(?:src|href)="(?!/openapi.json|#)[^"]*"', answer.text) == []
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    for _, path in DOCUMENTED:
        assert f"<code>{path}</code>" in answer.text


@pytest.mark.parametrize(
    ("path", "near"),
    [
        ("/v1/chat/completion", "/v1/chat/completions"),
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/request", "/v1/requests"),
        ("/v1/requests/3f6c1f5e-52a9-5d0e-9c54-504e53544b31/event", "/v1/requests/{request_id}/events"),
        ("/v1/chat", "/v1/chat/completions"),
        ("/v1/model", "/v1/models"),
    ],
)
def test_an_unknown_path_is_told_what_is_near(client: TestClient, path: str, near: str) -> None:
    """Issue 8, defect 24: the 404 was bare and named no alternative."""
    answer = client.get(path)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (404, "not_found")
    assert error["details"]["near"][0] == near
    assert near in error["message"]


def test_what_is_near_nothing_is_told_where_the_routes_are(client: TestClient) -> None:
    error = client.get("/v1/" + "%ff" * 500).json()["error"]
    assert error["message"].endswith("GET /docs lists the routes")
    assert len(error["message"]) < 300
    assert near_paths("/v1", [path for _, path in DOCUMENTED]) == []
