"""The OpenAPI document: no route promises the framework's errors."""

from __future__ import annotations

import json

from fastapi import FastAPI

from penstock.gateway import openai_routes, registry_routes
from penstock.gateway.openapi import polish_openapi


def test_errors_are_ours_and_keys_are_named() -> None:
    app = FastAPI()
    app.include_router(openai_routes.router)
    app.include_router(registry_routes.router)
    polish_openapi(app)
    document = app.openapi()
    assert document is app.openapi()
    assert "HTTPValidationError" not in json.dumps(document)
    chat = document["paths"]["/v1/chat/completions"]["post"]
    assert chat["responses"]["default"]["content"]["application/json"]["schema"] == {
        "$ref": "#/components/schemas/Error"
    }
    assert {"bearer": []} in chat["security"]
    assert "422" not in document["paths"]["/registry/schemas/ids/{schema_id}"]["get"]["responses"]
