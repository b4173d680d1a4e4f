"""The OpenAPI document: every route with its body, its answers and its errors, accepted by a validator."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openapi_spec_validator import validate

from penstock.gateway.app import create_app
from penstock.gateway.document.described_routes import DOCUMENTED
from penstock.gateway.settings import GatewaySettings
from penstock.schemas.bodies import EmbeddingRequest, TextRequest, json_schema


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
    found = operations(document)
    assert list(found["GET", "/v1/requests/{request_id}/events"]["responses"]["200"]["content"]) == [
        "text/event-stream"
    ]
    assert set(found["POST", "/v1/chat/completions"]["responses"]["200"]["content"]) == {
        "application/json",
        "text/event-stream",
    }


def test_errors_are_ours(document: dict[str, Any]) -> None:
    assert "HTTPValidationError" not in json.dumps(document)
    error = document["components"]["schemas"]["ErrorFacts"]
    assert {"message", "type", "code", "param", "request_id", "retryable", "details"} == set(error["required"])


@pytest.mark.parametrize("kind", [TextRequest, EmbeddingRequest])
def test_bodies_have_a_description_for_all_that_is_not_plain(kind: Any) -> None:
    assert json_schema(kind)["additionalProperties"] is False
