"""The OpenAPI document: paths and parameters as the framework knows them; bodies, answers and errors as they are."""

from __future__ import annotations

from collections.abc import Iterable
from http import HTTPStatus
from typing import Any, cast

from fastapi import FastAPI
from pydantic import TypeAdapter

from penstock.gateway.document.described_routes import DOCUMENTED, JSON, Documented
from penstock.gateway.edge.rules import shown_path
from penstock.gateway.routes.answers import Error

REFERENCE = "#/components/schemas/{model}"
METHODS = ("get", "put", "post", "delete")
_SECURITY: dict[str, Any] = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "A key of `penstock keys create`."},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}


def polish_openapi(app: FastAPI) -> None:
    """Replace `app.openapi` by one that completes the generated document once."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _completed(generate())
        return app.openapi_schema

    app.openapi = openapi


def _completed(document: dict[str, Any]) -> dict[str, Any]:
    schemas, components = _schemas(DOCUMENTED.values())
    generated = document.get("components", {}).get("schemas", {})
    known = {**generated, **components}
    for of_the_framework in ("HTTPValidationError", "ValidationError"):
        known.pop(of_the_framework, None)
    document["components"] = {"schemas": dict(sorted(known.items())), "securitySchemes": _SECURITY}
    for path, operations in document.get("paths", {}).items():
        document_path = shown_path(path)
        for method in METHODS:
            operation = operations.get(method)
            route = DOCUMENTED.get((method.upper(), document_path))
            if operation is None or route is None:
                continue
            operation["operationId"] = _operation_id(method, document_path)
            operation["responses"] = _responses(route, schemas)
            if route.body is not None:
                content = {route.body_type: {"schema": schemas[repr(route.body)]}}
                operation["requestBody"] = {"required": route.body_required, "content": content}
            for parameter in operation.get("parameters", ()):
                if parameter["in"] == "path":  # one that is optional elsewhere is there in this path
                    parameter["schema"] = _not_null(parameter["schema"])
            if path.startswith("/v1/"):
                operation["security"] = [{name: []} for name in _SECURITY]
    return document


def _not_null(schema: dict[str, Any]) -> dict[str, Any]:
    forms = [form for form in schema.get("anyOf", ()) if form != {"type": "null"}]
    return forms[0] if len(forms) == 1 else schema


def _operation_id(method: str, path: str) -> str:
    words = [word.strip("{}") for word in path.split("/") if word not in ("", "v1")]
    return "_".join([method, *words]).replace("-", "_")


def _responses(route: Documented, schemas: dict[str, Any]) -> dict[str, Any]:
    responses: dict[str, Any] = {}
    for status, content in route.responses.items():
        answer: dict[str, Any] = {"description": HTTPStatus(status).phrase}
        if content:
            answer["content"] = {kind: {"schema": schemas[repr(model)]} for kind, model in content.items()}
        responses[str(status)] = answer
    error = {route.error_type: {"schema": schemas[repr(route.error_model)]}}
    for status in sorted(set(route.errors) - route.responses.keys()):
        responses[str(status)] = {"description": HTTPStatus(status).phrase, "content": error}
    # What goes wrong before a route is reached has our own shape on all of them.
    ours = {JSON: {"schema": schemas[repr(Error)]}}
    responses["default"] = {"description": "An error", "content": {**error, **ours}}
    return responses


def _schemas(routes: Iterable[Documented]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(schemas by model, components): each model's own schema, or a reference to it."""
    models: dict[str, Any] = {}
    for route in routes:
        for model in (
            route.body,
            route.error_model,
            *(m for answer in route.responses.values() for m in answer.values()),
        ):
            for one in cast("list[Any]", model) if isinstance(model, list) else [model]:
                models[repr(one)] = one
            models[repr(model)] = model
    found: dict[str, Any] = {}
    typed = {key: model for key, model in models.items() if not isinstance(model, dict | list) and model is not None}
    by_key, definitions = TypeAdapter.json_schemas(
        [(key, "validation", TypeAdapter(model)) for key, model in typed.items()], ref_template=REFERENCE
    )
    for (key, _), schema in by_key.items():
        found[key] = schema
    for key, model in models.items():
        if isinstance(model, dict):
            found[key] = model
        elif isinstance(model, list):
            found[key] = {"anyOf": [found[repr(one)] for one in cast("list[Any]", model)]}
    return found, definitions.get("$defs", {})
