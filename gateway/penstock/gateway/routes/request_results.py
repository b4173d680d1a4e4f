"""The output of a request at one call: its text, its image, its vector, without anything around it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import PlainTextResponse, Response

from penstock.gateway.context import service_of
from penstock.gateway.edge.errors import FinalFailure, outcome_error
from penstock.gateway.limits.callers import caller_of
from penstock.gateway.routes import artifact_content
from penstock.gateway.routes.artifact_uploads import transfers
from penstock.gateway.routes.native import Wait
from penstock.gateway.service.large_answers import beside_the_loop, whole_result
from penstock.gateway.service.service import GatewayService
from penstock.gateway.view.entries import Entry
from penstock.gateway.view.outputs import json_bytes, on_output_thread
from penstock.schemas.errors import InternalError

router = APIRouter(prefix="/v1", tags=["requests"])

BESIDE_THE_OUTPUT = ("usage", "context", "finish_reason", "artifact", "dimensions")


@router.get("/requests/{request_id}/result", summary="A request's output, as it is")
async def get_result(
    request: Request, request_id: str, open_transfer: Annotated[Callable[[], None], Depends(transfers)], wait: Wait = 0
) -> Response:
    """A text, the bytes of an image, or JSON. 202 with the request while it runs; the outcome's error if it failed."""
    service, tenant = service_of(request), caller_of(request).tenant
    entry = await service.lookups.wait(tenant, request_id, wait)
    named = {"x-request-id": request_id}
    if not entry.done:
        body = await service.lookups.public(entry, service.facts.beside(entry))
        return Response(body, 202, named, media_type="application/json")
    output = await _output_of(service, await service.lookups.find_whole(tenant, request_id))
    images: list[dict[str, Any]] = output.get("images") or []
    if len(images) == 1:
        open_transfer()
        artifact_id = str(images[0]["artifact_id"])
        artifact = await service.stored(tenant, lambda store: store.describe(tenant, artifact_id))
        response = await artifact_content.answer(request, service, artifact)
    else:
        response = await beside_the_loop(output, lambda: _answer(output))
        response.headers.update({"x-content-type-options": "nosniff", "cache-control": "private, no-cache"})
    response.headers.update(named)
    return response


async def _output_of(service: GatewayService, entry: Entry) -> dict[str, Any]:
    """Raises FinalFailure for every outcome but `completed`, and as `ArtifactStore.get`."""
    outcome = entry.outcome_frame()
    if outcome.status != "completed":
        raise FinalFailure(outcome_error(outcome.status, outcome.error), entry.request_id)
    large = outcome.large
    output = outcome.result if large is None else await on_output_thread(large.result)
    if output is None:
        raise InternalError("the outcome has no output")
    return await whole_result(service, entry.tenant, output)


def _answer(output: dict[str, Any]) -> Response:
    """What an output is, without what is sent beside it: one text or vector alone, of several a list."""
    shown = {name: value for name, value in output.items() if value is not None and name not in BESIDE_THE_OUTPUT}
    match shown:
        case {"text": str() as text, **others} if not others:
            return PlainTextResponse(text)
        case {"embeddings": [vector], **others} if not others:
            content = vector
        case {"embeddings": content} | {"choices": content} | {"images": content}:
            pass
        case _:
            content = shown
    return Response(json_bytes(content), media_type="application/json")
