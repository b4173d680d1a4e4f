"""What each route takes and answers, for the OpenAPI document. A test holds that no route is missing here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from penstock.common.model_entry import ModelEntry
from penstock.gateway.openai import chat_bodies as openai_models
from penstock.gateway.openai import image_bodies
from penstock.gateway.openai import responses_bodies as responses_models
from penstock.gateway.openai import shapes as openai_shapes
from penstock.gateway.routes import (
    answers,
    artifact_answers,
    conversation_answers,
    operator_answers,
    registry_answers,
)
from penstock.gateway.routes.answers import Page
from penstock.gateway.routes.registry import MEDIA_TYPE
from penstock.schemas.bodies import request_type
from penstock.schemas.tasks import BUILT_TASKS

JSON = "application/json"
SSE = "text/event-stream"
BYTES: dict[str, Any] = {"type": "string", "format": "binary"}
EDIT_FORM: dict[str, Any] = {
    "type": "object",
    "description": "Beside the files the fields of a generation, `penstock[seed]` and the like as fields of their own.",
    "properties": {
        "image": BYTES,
        "mask": BYTES,
        "prompt": {"type": "string"},
        **{name: {"type": "string"} for name in ("model", "size", "response_format", "output_format")},
        **{name: {"type": "integer"} for name in ("n", "output_compression", "partial_images")},
        "stream": {"type": "boolean"},
    },
    "required": ["image", "prompt"],
}
CONTENT_TYPES = ("application/octet-stream", "image/png", "image/jpeg", "image/webp", "image/gif", "text/plain")
EVENTS: dict[str, Any] = {"description": "Server-sent events: each `data:` line is a JSON object."}
"""Without a type: tools take it for the schema of the whole text or of each event, as they like."""

ANY_ROUTE = (400, 401, 403, 429, 503)
OF_ONE = (*ANY_ROUTE, 404)
"""Errors of a route that names one thing."""
OF_A_RUN = (*ANY_ROUTE, 404, 409, 410, 413, 422, 500, 504)
"""Errors of a route that waits for a request's outcome."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Documented:
    """`responses` gives for each status and media type a model, a schema, or None for a body that is not described."""

    responses: dict[int, dict[str, Any]] = field(default_factory=dict[int, dict[str, Any]])
    body: Any = None
    body_required: bool = True
    body_type: str = JSON
    errors: tuple[int, ...] = ANY_ROUTE
    error_model: Any = answers.Error
    error_type: str = JSON


def _json(model: Any, status: int = 200) -> dict[int, dict[str, Any]]:
    return {status: {JSON: model}}


def _registry(model: Any, *, body: Any = None, errors: tuple[int, ...] = (404,)) -> Documented:
    return Documented(
        responses={200: {MEDIA_TYPE: model}},
        body=body,
        errors=errors,
        error_model=registry_answers.RegistryErrorBody,
        error_type=MEDIA_TYPE,
    )


_TEXT = {"type": "string"}
_REQUEST = [request_type(task) for task in BUILT_TASKS]
_STREAMED = "The answer, or with `stream: true` its events."

ROUTES: dict[tuple[str, str], Documented] = {
    ("POST", "/v1/requests"): Documented(
        responses={**_json(answers.Accepted, 202), **_json(answers.RequestPlan)},
        body=_REQUEST,
        errors=(*ANY_ROUTE, 404, 410, 413, 422),
    ),
    ("GET", "/v1/requests"): Documented(responses=_json(Page[answers.RequestObject])),
    ("GET", "/v1/requests/{request_id}"): Documented(responses=_json(answers.RequestObject), errors=(*OF_ONE, 410)),
    ("DELETE", "/v1/requests/{request_id}"): Documented(
        responses=_json(answers.RequestDeleted), errors=(*OF_ONE, 409, 410)
    ),
    ("GET", "/v1/requests/{request_id}/events"): Documented(
        responses={200: {SSE: EVENTS}, 204: {}}, errors=(*OF_ONE, 410)
    ),
    ("POST", "/v1/requests/{request_id}/cancel"): Documented(
        responses={**_json(answers.RequestObject), **_json(answers.RequestObject, 202)}, errors=(*OF_ONE, 410)
    ),
    ("POST", "/v1/requests/cancel"): Documented(responses=_json(answers.Cancellation, 202), body=answers.CancelMany),
    ("GET", "/v1/stats"): Documented(responses=_json(answers.Stats)),
    ("GET", "/v1/admin/stats"): Documented(responses=_json(operator_answers.AdminStats)),
    ("GET", "/v1/admin/devices"): Documented(responses=_json(Page[operator_answers.Device])),
    ("GET", "/v1/admin/models"): Documented(responses=_json(Page[operator_answers.AdminModel])),
    ("POST", "/v1/admin/models"): Documented(
        responses=_json(operator_answers.Desired, 202), body=ModelEntry, errors=(*ANY_ROUTE, 409)
    ),
    ("GET", "/v1/admin/models/{model_id}"): Documented(responses=_json(operator_answers.AdminModel), errors=OF_ONE),
    ("DELETE", "/v1/admin/models/{model_id}"): Documented(
        responses=_json(operator_answers.Desired, 202), errors=OF_ONE
    ),
    ("POST", "/v1/admin/models/{model_id}/{action}"): Documented(
        responses=_json(operator_answers.Desired, 202), errors=OF_ONE
    ),
    ("POST", "/v1/admin/classes/{class_name}/{action}"): Documented(
        responses=_json(operator_answers.Desired, 202), errors=OF_ONE
    ),
    ("POST", "/v1/conversations"): Documented(
        responses=_json(conversation_answers.Conversation),
        body=conversation_answers.NewConversation,
        body_required=False,
        errors=(*ANY_ROUTE, 422),
    ),
    ("GET", "/v1/conversations"): Documented(responses=_json(Page[conversation_answers.Conversation])),
    ("GET", "/v1/conversations/{conversation_id}"): Documented(
        responses=_json(conversation_answers.Conversation), errors=OF_ONE
    ),
    ("DELETE", "/v1/conversations/{conversation_id}"): Documented(
        responses=_json(conversation_answers.ConversationDeleted), errors=OF_ONE
    ),
    ("GET", "/v1/conversations/{conversation_id}/items"): Documented(
        responses=_json(Page[conversation_answers.ConversationItem]), errors=OF_ONE
    ),
    ("GET", "/v1/conversations/{conversation_id}/replay"): Documented(
        responses=_json(conversation_answers.Replay), errors=OF_ONE
    ),
    ("POST", "/v1/admin/artifacts/sweep"): Documented(responses=_json(artifact_answers.ArtifactSweep)),
    ("POST", "/v1/artifacts"): Documented(
        responses=_json(artifact_answers.ArtifactBody, 201),
        body=BYTES,
        body_type="application/octet-stream",
        errors=(*ANY_ROUTE, 413),
    ),
    ("GET", "/v1/artifacts"): Documented(responses=_json(Page[artifact_answers.ArtifactBody])),
    ("GET", "/v1/artifacts/{artifact_id}"): Documented(responses=_json(artifact_answers.ArtifactBody), errors=OF_ONE),
    ("DELETE", "/v1/artifacts/{artifact_id}"): Documented(
        responses=_json(artifact_answers.ArtifactDeleted), errors=(*OF_ONE, 409)
    ),
    ("POST", "/v1/artifacts/{artifact_id}/url"): Documented(
        responses=_json(artifact_answers.ArtifactUrl),
        body=artifact_answers.UrlLifetime,
        body_required=False,
        errors=OF_ONE,
    ),
    ("GET", "/v1/artifacts/{artifact_id}/content"): Documented(
        responses={
            200: dict.fromkeys(CONTENT_TYPES, BYTES),
            206: dict.fromkeys(CONTENT_TYPES, BYTES),
            304: {},
        },
        errors=(*OF_ONE, 416),
    ),
    ("POST", "/v1/chat/completions"): Documented(
        responses={200: {JSON: openai_shapes.ChatCompletion, SSE: EVENTS}},
        body=openai_models.ChatCompletionBody,
        errors=OF_A_RUN,
    ),
    ("POST", "/v1/completions"): Documented(
        responses={200: {JSON: openai_shapes.Completion, SSE: EVENTS}},
        body=openai_models.CompletionBody,
        errors=OF_A_RUN,
    ),
    ("POST", "/v1/responses"): Documented(
        responses={200: {JSON: openai_shapes.ResponseObject, SSE: EVENTS}},
        body=responses_models.ResponsesBody,
        errors=OF_A_RUN,
    ),
    ("POST", "/v1/images/generations"): Documented(
        responses={200: {JSON: openai_shapes.ImageList, SSE: EVENTS}}, body=image_bodies.ImageBody, errors=OF_A_RUN
    ),
    ("POST", "/v1/images/edits"): Documented(
        responses={200: {JSON: openai_shapes.ImageList, SSE: EVENTS}},
        body=EDIT_FORM,
        body_type="multipart/form-data",
        errors=OF_A_RUN,
    ),
    ("POST", "/v1/embeddings"): Documented(
        responses=_json(openai_shapes.EmbeddingList), body=openai_models.EmbeddingBody, errors=OF_A_RUN
    ),
    ("GET", "/v1/models"): Documented(responses=_json(Page[operator_answers.Model])),
    ("GET", "/v1/models/{model_id}"): Documented(responses=_json(operator_answers.Model), errors=OF_ONE),
    ("POST", "/v1/tickets"): Documented(responses=_json(operator_answers.Ticket)),
    ("GET", "/healthz"): Documented(responses=_json(operator_answers.Health), errors=()),
    ("GET", "/readyz"): Documented(
        responses={**_json(operator_answers.Readiness), **_json(operator_answers.Readiness, 503)}, errors=()
    ),
    ("GET", "/metrics"): Documented(responses={200: {"text/plain": _TEXT}}, errors=()),
    ("GET", "/registry/schemas/types"): _registry(list[str], errors=()),
    ("GET", "/registry/schemas/ids/{schema_id}"): _registry(registry_answers.RegistrySchema),
    ("GET", "/registry/schemas/ids/{schema_id}/schema"): _registry({}),
    ("GET", "/registry/schemas/ids/{schema_id}/subjects"): _registry(list[str]),
    ("GET", "/registry/schemas/ids/{schema_id}/versions"): _registry(list[registry_answers.RegistrySubjectVersion]),
    ("GET", "/registry/subjects"): _registry(list[str], errors=()),
    ("GET", "/registry/subjects/{subject}/versions"): _registry(list[int]),
    ("POST", "/registry/subjects/{subject}/versions"): _registry(registry_answers.RegistryId),
    ("GET", "/registry/subjects/{subject}/versions/{version}"): _registry(registry_answers.RegistryVersion),
    ("GET", "/registry/subjects/{subject}/versions/{version}/schema"): _registry({}),
    ("POST", "/registry/subjects/{subject}"): _registry(registry_answers.RegistryVersion),
    ("GET", "/registry/config/{subject}"): _registry(dict[str, str]),
    ("GET", "/registry/config"): _registry(dict[str, str], errors=()),
    ("GET", "/registry/mode/{subject}"): _registry(dict[str, str]),
    ("GET", "/registry/mode"): _registry(dict[str, str], errors=()),
}
