"""All that is declared of each route: what the edge holds it to, and what the OpenAPI document says of it.

The gateway does not start with a route that is missing here.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from penstock.common.model_entry import ModelEntry
from penstock.gateway import hot_routes
from penstock.gateway.batches import answers as batch_answers
from penstock.gateway.edge.rules import (
    WEBSOCKET,
    Access,
    Endpoint,
    Lasts,
    Narrowed,
    RouteKey,
    RouteTable,
    Rules,
    Scope,
    Takes,
    shown_path,
)
from penstock.gateway.edge.tickets import Use
from penstock.gateway.limits.settings import TenantLimits
from penstock.gateway.openai import chat_bodies as openai_models
from penstock.gateway.openai import image_bodies
from penstock.gateway.openai import responses_bodies as responses_models
from penstock.gateway.openai import shapes as openai_shapes
from penstock.gateway.routes import (
    admin_audit,
    admin_keys,
    answers,
    artifact_answers,
    commands,
    conversation_answers,
    conversation_export,
    dead_letters,
    operator_answers,
    registry_answers,
    tickets,
)
from penstock.gateway.routes.answers import Page
from penstock.schemas.bodies import request_type
from penstock.schemas.registry import MEDIA_TYPE
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
FILE_FORM: dict[str, Any] = {
    "type": "object",
    "properties": {
        "file": BYTES,
        "purpose": {"type": "string", "enum": ["batch"]},
        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
        "expires_after[seconds]": {"type": "integer", "minimum": 3_600, "maximum": 2_592_000},
    },
    "required": ["file", "purpose"],
}
LIMITS: dict[str, Any] = {
    "type": "object",
    "description": "Limits by the names of `[gateway.limits]`; null: no limit.",
    "properties": {
        name: {one: value for one, value in schema.items() if one not in ("default", "title")}
        for name, schema in TenantLimits.model_json_schema()["properties"].items()
        if name != "conversation_retention_s"
    },
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


@dataclass(frozen=True, slots=True)
class Declared:
    """One route. What is not documented is no part of the API: redirects, pages, the socket."""

    rules: Rules
    documented: Documented | None = None


def _rules(
    scope: Scope | None,
    takes: Takes = Takes.NOTHING,
    lasts: Lasts = Lasts.SHORT,
    hot: Endpoint | None = None,
    narrowed: Narrowed = Narrowed.REFUSED,
) -> Rules:
    return Rules(scope=scope, takes=takes, lasts=lasts, hot=hot, narrowed=narrowed)


def _route(rules: Rules, model: Any, *statuses: int, **documented: Any) -> Declared:
    """A route that answers JSON of one model, with 200 if nothing else is said. `documented`: see `Documented`."""
    return Declared(rules, Documented(responses={one: {JSON: model} for one in statuses or (200,)}, **documented))


def _shared(rules: Rules, *models: Any) -> Declared:
    """A route whose callers share answers."""
    return Declared(replace(rules, shared=True), Documented(responses={200: {JSON: [*models]}, 304: {}}))


def _usage(rules: Rules) -> Declared:
    """A shared answer that is also made as a table."""
    made: dict[str, Any] = {JSON: Page[operator_answers.UsageGroup], "text/csv": {"type": "string"}}
    return Declared(replace(rules, shared=True), Documented(responses={200: made, 304: {}}))


def _content(rules: Rules, media_types: tuple[str, ...]) -> Declared:
    """A route that answers bytes: all, a part of them, or that the client has them."""
    some = dict.fromkeys(media_types, BYTES)
    return Declared(rules, Documented(responses={200: some, 206: some, 304: {}}, errors=(*OF_ONE, 416)))


def _run(
    model: Any,
    body: Any,
    *,
    body_type: str = JSON,
    streams: bool = True,
    takes: Takes = Takes.LARGE_JSON,
    hot: Endpoint | None = None,
    narrowed: Narrowed = Narrowed.REFUSED,
) -> Declared:
    """A route that submits and answers the outcome, as JSON or in events."""
    answer = {JSON: model, SSE: EVENTS} if streams else {JSON: model}
    documented = Documented(responses={200: answer}, body=body, body_type=body_type, errors=OF_A_RUN)
    return Declared(_rules("submit", takes, Lasts.OUTCOME, hot, narrowed), documented)


_OF_REGISTRIES = frozenset(
    {
        "defaultToGlobal", "deleted", "deletedOnly", "fetchMaxId", "fetchTags", "findTags", "format", "latestOnly",
        "limit", "lookupDeletedSchema", "normalize", "offset", "referenceFormat", "subject", "subjectPrefix", "verbose",
    }
)  # fmt: skip
"""What stock clients of registries send with their calls. Here one schema has one form and none is deleted."""


def _registry(model: Any, *, errors: tuple[int, ...] = (404,), takes: Takes = Takes.NOTHING) -> Declared:
    """Public: the schemas are in the package for everyone, and a stock deserializer has no key of ours to send."""
    documented = Documented(
        responses={200: {MEDIA_TYPE: model}},
        errors=errors,
        error_model=registry_answers.RegistryErrorBody,
        error_type=MEDIA_TYPE,
    )
    return Declared(Rules(access=Access.PUBLIC, takes=takes, query=_OF_REGISTRIES), documented)


READ, CANCEL, ADMIN = _rules("read"), _rules("cancel"), _rules("admin")
ADMIN_JSON = _rules("admin", Takes.JSON)
BY_URL: frozenset[Use] = frozenset({"read", "session"})
"""Tickets in URLs of what a page reads: EventSource sends no headers, and comes again with the same URL."""
READ_ONE = replace(READ, narrowed=Narrowed.BY_PATH, tickets=BY_URL)
FOLLOW_ONE = replace(READ_ONE, lasts=Lasts.OUTCOME)
CANCEL_ONE = replace(CANCEL, narrowed=Narrowed.BY_PATH)
PAGE, PROBE, SCRAPER = Rules(access=Access.PUBLIC), Rules(access=Access.PROBE), Rules(access=Access.SCRAPER)

_TEXT = {"type": "string"}
_REQUEST = [request_type(task) for task in BUILT_TASKS]

ROUTES: dict[RouteKey, Declared] = {
    ("POST", "/v1/requests"): Declared(
        _rules("submit", Takes.FORM, Lasts.WAITING, hot_routes.submit, Narrowed.BY_ROUTE),
        Documented(
            responses={
                202: {JSON: [answers.Accepted, answers.RequestObject]},
                200: {JSON: [answers.RequestPlan, answers.RequestObject]},
            },
            body=_REQUEST,
            errors=(*ANY_ROUTE, 404, 410, 413, 422),
        ),
    ),
    ("POST", "/v1/requests/bulk"): Declared(
        _rules("submit", Takes.LINES, narrowed=Narrowed.BY_ROUTE),
        Documented(
            responses={200: {"application/x-ndjson": _TEXT}},
            body=_TEXT,
            body_type="application/x-ndjson",
            errors=(*ANY_ROUTE, 413),
        ),
    ),
    ("GET", "/v1/requests"): _shared(
        replace(READ, narrowed=Narrowed.BY_ROUTE), answers.RequestPage[answers.RequestObject], answers.OwnChanges
    ),
    ("GET", "/v1/requests/{request_id}"): _route(
        replace(READ_ONE, lasts=Lasts.WAITING, hot=hot_routes.one_request),
        answers.RequestObject,
        errors=(*OF_ONE, 410),
    ),
    ("DELETE", "/v1/requests/{request_id}"): _route(CANCEL_ONE, answers.RequestDeleted, errors=(*OF_ONE, 409, 410)),
    ("GET", "/v1/requests/{request_id}/result"): Declared(
        replace(READ_ONE, lasts=Lasts.WAITING),
        Documented(
            responses={
                200: {"text/plain": _TEXT, JSON: {}, **dict.fromkeys(CONTENT_TYPES[1:5], BYTES)},
                202: {JSON: answers.RequestObject},
                206: dict.fromkeys(CONTENT_TYPES[1:5], BYTES),
                304: {},
            },
            errors=(*OF_A_RUN, 416),
        ),
    ),
    ("GET", "/v1/requests/{request_id}/input"): _route(READ, answers.RequestInput, errors=(*OF_ONE, 410)),
    ("GET", "/v1/requests/{request_id}/deliveries"): _route(READ_ONE, Page[answers.Delivery], errors=(*OF_ONE, 410)),
    ("GET", "/v1/requests/{request_id}/events"): Declared(
        FOLLOW_ONE, Documented(responses={200: {SSE: EVENTS}, 204: {}}, errors=(*OF_ONE, 410))
    ),
    ("POST", "/v1/requests/{request_id}/cancel"): _route(
        CANCEL_ONE, answers.RequestObject, 200, 202, errors=(*OF_ONE, 410)
    ),
    ("POST", "/v1/requests/cancel"): _route(
        _rules("cancel", Takes.JSON, narrowed=Narrowed.BY_ROUTE), answers.Cancellation, 202, body=commands.ManyBody
    ),
    ("POST", "/v1/requests/{request_id}/reprioritize"): _route(
        replace(CANCEL_ONE, takes=Takes.JSON),
        answers.RequestObject,
        202,
        body=commands.PriorityBody,
        errors=(*OF_ONE, 409, 410),
    ),
    ("POST", "/v1/requests/reprioritize"): _route(
        _rules("cancel", Takes.JSON, narrowed=Narrowed.BY_ROUTE),
        answers.Reprioritization,
        202,
        body=commands.ReprioritizeManyBody,
    ),
    ("GET", "/v1/stats"): _route(READ, answers.Stats),
    ("GET", "/v1/usage"): _usage(READ),
    ("GET", "/v1/admin/usage"): _usage(ADMIN),
    ("GET", "/v1/admin/requests"): _shared(
        ADMIN, answers.RequestPage[answers.RequestOfTenant], answers.ChangesOfTenant
    ),
    ("GET", "/v1/admin/requests/{request_id}"): _route(ADMIN, answers.RequestOfTenant, errors=(*OF_ONE, 410)),
    ("GET", "/v1/admin/overview"): _shared(replace(ADMIN, hot=hot_routes.admin_overview), operator_answers.Overview),
    ("GET", "/v1/admin/stats"): _shared(ADMIN, operator_answers.AdminStats),
    ("GET", "/v1/admin/problems"): _shared(ADMIN, operator_answers.Problems),
    ("GET", "/v1/admin/devices"): _shared(ADMIN, Page[operator_answers.Device]),
    ("GET", "/v1/admin/gateways"): _shared(ADMIN, Page[operator_answers.GatewayReport]),
    ("GET", "/v1/waiting"): _shared(READ, operator_answers.AllWaiting),
    ("GET", "/v1/admin/waiting"): _shared(ADMIN, operator_answers.AllWaiting),
    ("GET", "/v1/admin/tenants"): _shared(ADMIN, operator_answers.Tenants),
    ("GET", "/v1/admin/history"): _shared(ADMIN, operator_answers.History),
    ("GET", "/v1/admin/model-events"): _shared(ADMIN, Page[operator_answers.ModelEvent]),
    ("GET", "/v1/admin/models"): _shared(ADMIN, Page[operator_answers.AdminModel]),
    ("POST", "/v1/admin/models"): _route(
        ADMIN_JSON, operator_answers.Desired, 202, body=ModelEntry, errors=(*ANY_ROUTE, 409)
    ),
    ("GET", "/v1/admin/models/{model_id:path}"): _route(ADMIN, operator_answers.AdminModel, errors=OF_ONE),
    ("DELETE", "/v1/admin/models/{model_id:path}"): _route(ADMIN, operator_answers.Desired, 202, errors=OF_ONE),
    ("POST", "/v1/admin/models/{model_id:path}/{action}"): _route(
        ADMIN, operator_answers.Desired, 202, errors=(*OF_ONE, 409)
    ),
    ("GET", "/v1/admin/orders"): _route(ADMIN, Page[operator_answers.OrderInForce]),
    ("GET", "/v1/admin/orders/{revision}"): _route(ADMIN, operator_answers.Order),
    ("POST", "/v1/admin/classes/{class_name}/{action}"): _route(ADMIN, operator_answers.Desired, 202, errors=OF_ONE),
    ("GET", "/v1/admin/keys"): _route(ADMIN, Page[admin_keys.Key]),
    ("POST", "/v1/admin/keys"): _route(
        ADMIN_JSON,
        admin_keys.KeyWithSecret,
        201,
        body=admin_keys.NewKey,
        body_required=False,
        errors=(*ANY_ROUTE, 409),
    ),
    ("GET", "/v1/admin/keys/{key_id}"): _route(ADMIN, admin_keys.Key, errors=OF_ONE),
    ("POST", "/v1/admin/keys/{key_id}"): _route(
        ADMIN_JSON, admin_keys.Key, body=admin_keys.KeyRights, errors=(*OF_ONE, 409)
    ),
    ("DELETE", "/v1/admin/keys/{key_id}"): _route(ADMIN, admin_keys.KeyDeleted, errors=(*OF_ONE, 409)),
    ("POST", "/v1/admin/keys/{key_id}/rotate"): _route(
        ADMIN_JSON,
        admin_keys.KeyWithSecret,
        body=admin_keys.Rotation,
        body_required=False,
        errors=(*OF_ONE, 409),
    ),
    ("GET", "/v1/admin/limits"): _route(ADMIN, Page[admin_keys.TenantLimits]),
    ("POST", "/v1/admin/limits/{tenant}"): _route(ADMIN_JSON, admin_keys.TenantLimits, body=LIMITS),
    ("DELETE", "/v1/admin/limits/{tenant}"): _route(ADMIN, admin_keys.TenantLimits, errors=OF_ONE),
    ("GET", "/v1/admin/audit"): _route(ADMIN, Page[admin_audit.AuditAnswer]),
    ("GET", "/v1/admin/dlq"): _route(ADMIN, Page[operator_answers.DeadLetter]),
    ("GET", "/v1/admin/dlq/groups"): _route(ADMIN, Page[operator_answers.DeadLetterGroup]),
    ("POST", "/v1/admin/dlq/redrive"): _route(ADMIN_JSON, operator_answers.Redrive, body=dead_letters.RedriveBody),
    ("POST", "/v1/admin/dlq/purge"): _route(ADMIN_JSON, operator_answers.Purge, body=dead_letters.PurgeBody),
    ("GET", "/v1/admin/dlq/{letter_id:path}"): _route(ADMIN, operator_answers.DeadLetter, errors=OF_ONE),
    ("POST", "/v1/conversations"): _route(
        _rules("submit", Takes.JSON),
        conversation_answers.Conversation,
        body=conversation_answers.NewConversation,
        body_required=False,
        errors=(*ANY_ROUTE, 422),
    ),
    ("GET", "/v1/conversations"): _route(READ, Page[conversation_answers.Conversation]),
    ("GET", "/v1/conversations/{conversation_id}"): _route(READ_ONE, conversation_answers.Conversation, errors=OF_ONE),
    ("POST", "/v1/conversations/{conversation_id}"): _route(
        _rules("submit", Takes.JSON, narrowed=Narrowed.BY_PATH),
        conversation_answers.Conversation,
        body=conversation_answers.ConversationChange,
        errors=OF_ONE,
    ),
    ("DELETE", "/v1/conversations/{conversation_id}"): _route(
        CANCEL_ONE, conversation_answers.ConversationDeleted, errors=OF_ONE
    ),
    ("GET", "/v1/conversations/{conversation_id}/items"): _route(
        READ_ONE, Page[conversation_answers.ConversationItem], errors=OF_ONE
    ),
    ("POST", "/v1/conversations/{conversation_id}/items"): _route(
        _rules("submit", Takes.LARGE_JSON, narrowed=Narrowed.BY_PATH),
        Page[conversation_answers.ConversationItem],
        body=conversation_answers.NewItems,
        errors=(*ANY_ROUTE, 422),
    ),
    ("GET", "/v1/conversations/{conversation_id}/items/{item_id}"): _route(
        READ_ONE, conversation_answers.ConversationItem, errors=OF_ONE
    ),
    ("POST", "/v1/conversations/{conversation_id}/summarize"): Declared(
        _rules("submit", Takes.JSON, Lasts.WAITING, narrowed=Narrowed.BY_PATH),
        Documented(
            responses={202: {JSON: [answers.Accepted, answers.RequestObject]}, 200: {JSON: answers.RequestObject}},
            body=conversation_answers.NewSummary,
            body_required=False,
            errors=(*OF_ONE, 410, 422),
        ),
    ),
    ("POST", "/v1/conversations/{conversation_id}/fork"): _route(
        _rules("submit", Takes.JSON),
        conversation_answers.Conversation,
        201,
        body=conversation_answers.NewFork,
        errors=(*OF_ONE, 409, 422),
    ),
    ("GET", "/v1/conversations/{conversation_id}/forks"): _route(
        READ, Page[conversation_answers.Conversation], errors=OF_ONE
    ),
    ("GET", "/v1/conversations/{conversation_id}/tree"): _route(
        READ, Page[conversation_answers.ConversationBranch], errors=OF_ONE
    ),
    ("GET", "/v1/conversations/{conversation_id}/replay"): _route(READ_ONE, conversation_answers.Replay, errors=OF_ONE),
    ("GET", "/v1/conversations/{conversation_id}/events"): Declared(
        FOLLOW_ONE, Documented(responses={200: {SSE: EVENTS}}, errors=OF_ONE)
    ),
    ("GET", "/v1/conversations/{conversation_id}/export"): Declared(
        READ, Documented(responses={200: {conversation_export.MEDIA_TYPE: _TEXT}}, errors=OF_ONE)
    ),
    ("POST", "/v1/admin/artifacts/sweep"): _route(ADMIN, artifact_answers.ArtifactSweep),
    ("POST", "/v1/admin/conversations/sweep"): _route(ADMIN, conversation_answers.ConversationSweep),
    ("POST", "/v1/artifacts"): _route(
        _rules("submit", Takes.FILE, narrowed=Narrowed.BY_ROUTE),
        artifact_answers.ArtifactBody,
        201,
        body=BYTES,
        body_type="application/octet-stream",
        errors=(*ANY_ROUTE, 413),
    ),
    ("GET", "/v1/artifacts"): _route(READ, Page[artifact_answers.ArtifactBody]),
    ("GET", "/v1/artifacts/{artifact_id}"): _route(
        replace(READ, narrowed=Narrowed.BY_PATH), artifact_answers.ArtifactBody, errors=OF_ONE
    ),
    ("DELETE", "/v1/artifacts/{artifact_id}"): _route(CANCEL, artifact_answers.ArtifactDeleted, errors=(*OF_ONE, 409)),
    ("POST", "/v1/artifacts/{artifact_id}/url"): _route(
        _rules("read", Takes.JSON, narrowed=Narrowed.BY_PATH),
        artifact_answers.ArtifactUrl,
        body=artifact_answers.UrlLifetime,
        body_required=False,
        errors=OF_ONE,
    ),
    ("GET", "/v1/artifacts/{artifact_id}/content"): _content(
        replace(READ, narrowed=Narrowed.BY_PATH, tickets=frozenset[Use]({"artifact", "session"})), CONTENT_TYPES
    ),
    ("POST", "/v1/chat/completions"): _run(
        openai_shapes.ChatCompletion,
        openai_models.ChatCompletionBody,
        hot=hot_routes.chat,
        narrowed=Narrowed.BY_ROUTE,
    ),
    ("POST", "/v1/completions"): _run(
        openai_shapes.Completion, openai_models.CompletionBody, narrowed=Narrowed.BY_ROUTE
    ),
    ("POST", "/v1/responses"): _run(
        openai_shapes.ResponseObject, responses_models.ResponsesBody, narrowed=Narrowed.BY_ROUTE
    ),
    ("GET", "/v1/responses/{response_id}"): Declared(
        replace(READ_ONE, lasts=Lasts.WAITING),
        Documented(responses={200: {JSON: openai_shapes.ResponseObject, SSE: EVENTS}}, errors=(*OF_ONE, 500)),
    ),
    ("DELETE", "/v1/responses/{response_id}"): _route(CANCEL_ONE, openai_shapes.ResponseDeleted, errors=(*OF_ONE, 409)),
    ("POST", "/v1/responses/{response_id}/cancel"): _route(CANCEL_ONE, openai_shapes.ResponseObject, errors=OF_ONE),
    ("GET", "/v1/responses/{response_id}/input_items"): _route(
        READ_ONE, Page[openai_shapes.ResponseItem], errors=OF_ONE
    ),
    ("POST", "/v1/images/generations"): _run(openai_shapes.ImageList, image_bodies.ImageBody),
    ("POST", "/v1/images/edits"): _run(
        openai_shapes.ImageList, EDIT_FORM, body_type="multipart/form-data", takes=Takes.FORM
    ),
    ("POST", "/v1/embeddings"): _run(openai_shapes.EmbeddingList, openai_models.EmbeddingBody, streams=False),
    ("POST", "/v1/files"): _route(
        _rules("submit", Takes.LINES),
        batch_answers.FileObject,
        body=FILE_FORM,
        body_type="multipart/form-data",
        errors=(*ANY_ROUTE, 413),
    ),
    ("GET", "/v1/files"): _route(READ, Page[batch_answers.FileObject], errors=OF_ONE),
    ("GET", "/v1/files/{file_id}"): _route(READ, batch_answers.FileObject, errors=OF_ONE),
    ("DELETE", "/v1/files/{file_id}"): _route(CANCEL, batch_answers.FileDeleted, errors=(*OF_ONE, 409)),
    ("GET", "/v1/files/{file_id}/content"): _content(READ, ("application/octet-stream",)),
    ("POST", "/v1/batches"): _route(
        _rules("submit", Takes.JSON), batch_answers.BatchObject, body=batch_answers.NewBatch, errors=OF_ONE
    ),
    ("GET", "/v1/batches"): _route(READ, Page[batch_answers.BatchObject], errors=OF_ONE),
    ("GET", "/v1/batches/{batch_id}"): _route(READ, batch_answers.BatchObject, errors=OF_ONE),
    ("POST", "/v1/batches/{batch_id}/cancel"): _route(CANCEL, batch_answers.BatchObject, errors=OF_ONE),
    ("GET", "/v1/models"): _route(replace(READ, narrowed=Narrowed.BY_ROUTE), Page[operator_answers.Model]),
    ("GET", "/v1/models/{model_id:path}"): _route(READ, operator_answers.Model, errors=OF_ONE),
    ("POST", "/v1/tickets"): _route(
        _rules(None, Takes.JSON), operator_answers.Ticket, body=tickets.NewTicket, body_required=False
    ),
    ("DELETE", "/v1/tickets/session"): _route(_rules(None), operator_answers.SessionEnd),
    ("GET", "/healthz"): _route(PROBE, operator_answers.Health, errors=()),
    ("GET", "/health"): _route(PROBE, operator_answers.Health, errors=()),
    ("GET", "/readyz"): _route(PROBE, operator_answers.Readiness, 200, 503, errors=()),
    ("GET", "/metrics"): Declared(SCRAPER, Documented(responses={200: {"text/plain": _TEXT}}, errors=())),
    ("GET", "/registry/schemas/types"): _registry(list[str], errors=()),
    ("GET", "/registry/schemas/ids/{schema_id}"): _registry(registry_answers.RegistrySchema),
    ("GET", "/registry/schemas/ids/{schema_id}/schema"): _registry({}),
    ("GET", "/registry/schemas/ids/{schema_id}/subjects"): _registry(list[str]),
    ("GET", "/registry/schemas/ids/{schema_id}/versions"): _registry(list[registry_answers.RegistrySubjectVersion]),
    ("GET", "/registry/schemas/guids/{guid}"): _registry(registry_answers.RegistrySchema),
    ("GET", "/registry/subjects"): _registry(list[str], errors=()),
    ("GET", "/registry/subjects/{subject}/versions"): _registry(list[int]),
    ("POST", "/registry/subjects/{subject}/versions"): _registry(registry_answers.RegistryId, takes=Takes.JSON),
    ("GET", "/registry/subjects/{subject}/versions/{version}"): _registry(registry_answers.RegistryVersion),
    ("GET", "/registry/subjects/{subject}/versions/{version}/schema"): _registry({}),
    ("POST", "/registry/subjects/{subject}"): _registry(registry_answers.RegistryVersion, takes=Takes.JSON),
    ("GET", "/registry/config/{subject}"): _registry(dict[str, str]),
    ("GET", "/registry/config"): _registry(dict[str, str], errors=()),
    ("GET", "/registry/mode/{subject}"): _registry(dict[str, str]),
    ("GET", "/registry/mode"): _registry(dict[str, str], errors=()),
    # No part of the API that is documented.
    ("POST", "/v1/images/variations"): Declared(_rules("submit", Takes.FORM)),
    (WEBSOCKET, "/v1/ws"): Declared(
        replace(READ, narrowed=Narrowed.BY_ROUTE, tickets=frozenset[Use]({"socket", "session"}))
    ),
    ("GET", "/"): Declared(PAGE),
    ("GET", "/console"): Declared(PAGE),
    ("GET", "/console/{name:path}"): Declared(PAGE),
    ("GET", "/docs"): Declared(PAGE),
    ("GET", "/openapi.json"): Declared(PAGE),
    ("GET", "/asyncapi.json"): Declared(PAGE),
}

TABLE = RouteTable({key: declared.rules for key, declared in ROUTES.items()})
DOCUMENTED: dict[RouteKey, Documented] = {
    (method, shown_path(path)): declared.documented
    for (method, path), declared in ROUTES.items()
    if declared.documented is not None
}
