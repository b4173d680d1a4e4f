"""The OpenAPI document, told the truth: our error shape with 400 instead of the framework's 422, and how to log in."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

_TEXT_OR_NULL = {"anyOf": [{"type": "string"}, {"type": "null"}]}
_ERROR: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "code", "param", "request_id", "retryable", "details"],
            "properties": {
                "message": {"type": "string", "description": "For people."},
                "type": {"type": "string", "description": "The family of the error, as OpenAI names them."},
                "code": {"type": "string", "description": "Stable; decide by this."},
                "param": {**_TEXT_OR_NULL, "description": "The field at fault."},
                "request_id": _TEXT_OR_NULL,
                "retryable": {"type": "boolean", "description": "Whether the same request may succeed later."},
                "details": {"anyOf": [{"type": "object"}, {"type": "null"}]},
            },
        }
    },
}
_SECURITY: dict[str, Any] = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "A key of `penstock keys create`."},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}


def polish_openapi(app: FastAPI) -> None:
    """Replace `app.openapi` by one that mends the generated document once."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _mended(generate())
        return app.openapi_schema

    app.openapi = openapi


def _mended(document: dict[str, Any]) -> dict[str, Any]:
    components = document.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    schemas["Error"] = _ERROR
    for generated in ("HTTPValidationError", "ValidationError"):
        schemas.pop(generated, None)
    components["securitySchemes"] = _SECURITY
    answer = {
        "description": "An error",
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
    }
    for path, operations in document.get("paths", {}).items():
        for operation in operations.values():
            operation.get("responses", {}).pop("422", None)
            if path.startswith("/v1/"):
                operation["responses"]["default"] = answer
                operation["security"] = [{name: []} for name in _SECURITY]
    return document
