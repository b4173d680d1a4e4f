"""The summary of a conversation, made and added to it: later turns may have it in place of older ones."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Annotated, Any

from fastapi import APIRouter, Header, Request
from starlette.responses import Response

from penstock.gateway.context import service_of
from penstock.gateway.limits.callers import caller_of
from penstock.gateway.routes.conversations import read_conversation
from penstock.gateway.routes.multipart import read_json
from penstock.gateway.routes.native import Wait, native_request, send
from penstock.schemas.errors import InvalidRequest, NotFound, PenstockError, UnsupportedParameter

router = APIRouter(prefix="/v1/conversations", tags=["conversations"])

OF_THE_PAYLOAD = ("max_tokens", "through_offset")
OF_THE_ROUTE = ("task", "conversation_id", "payload", "summarization", "context")


@router.post("/{conversation_id}/summarize", status_code=202, summary="Sum up a conversation, and keep the summary")
async def summarize(
    request: Request,
    conversation_id: str,
    idempotency_key: Annotated[str | None, Header(alias="Idempotency-Key")] = None,
    wait: Wait = 0,
) -> Response:
    """Body, all optional: `max_tokens`, `through_offset` (the last record to sum up), and what a request of any task
    has: `model`, `priority`, `ttl_ms`, `metadata`, `callback_url` …

    202: the request. Later prompts have its summary in place of older turns; turns go on meanwhile.
    """
    body: Any = await read_json(request) if await request.body() else {}
    if not isinstance(body, dict):
        raise InvalidRequest("the body must be a JSON object")
    for name in OF_THE_ROUTE:
        if name in body:
            raise UnsupportedParameter(f"{name} is given by the route", param=name)
    service, caller = service_of(request), caller_of(request)
    try:
        await read_conversation(request, service.conversations.about, conversation_id)
    except NotFound:  # a repeat gets its answer also when the conversation was deleted meanwhile
        if idempotency_key is None or not await service.submitting.has_key(caller.tenant, idempotency_key):
            raise
    payload = {name: body.pop(name) for name in OF_THE_PAYLOAD if name in body}
    with _named_as_in_the_body():
        asked = native_request(
            {**body, "task": "summarization", "conversation_id": conversation_id, "payload": payload}, caller
        )
        checked = await service.submitting.check(caller, asked)
    return await send(request, checked, None, idempotency_key=idempotency_key, wait_s=wait)


@contextmanager
def _named_as_in_the_body() -> Generator[None]:
    """Errors name the fields of the payload as they stand in the body of this route."""
    try:
        yield
    except PenstockError as error:
        native = error.param or ""
        name = native.removeprefix("payload.")
        if name == native or name not in OF_THE_PAYLOAD:
            raise
        message = error.message.replace(native, name)
        raise type(error)(message, param=name, details=error.details, retry_after_s=error.retry_after_s) from error
