"""Artifacts over HTTP, within the caller's tenant: upload, list, describe, delete, and URLs for browsers."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends, Query, Request
from starlette.responses import Response

from penstock.common.artifacts import Artifact, ArtifactStore
from penstock.gateway.context import context_of, service_of
from penstock.gateway.edge.bodies import declared_length, discard_body
from penstock.gateway.limits.callers import caller_of
from penstock.gateway.routes import artifact_content
from penstock.gateway.routes.artifact_uploads import Upload, check_room, transfer
from penstock.gateway.routes.multipart import read_json
from penstock.gateway.routes.paging import After, Limit, Order, number, read_part
from penstock.schemas.errors import InvalidRequest, TenantLimit, UnsupportedParameter
from penstock.schemas.times import rfc3339

T = TypeVar("T")
router = APIRouter(prefix="/v1/artifacts", tags=["artifacts"])

URL_TTL_S = 3_600.0
SIGNED_URL_TTL_S = 3_600.0
"""The longest life of a URL that the store signs: it stays good when its maker's key is taken back."""
MAX_URL_TTL_S = 7 * 86_400.0
MAX_TTL_S = 10 * 365 * 86_400.0

TtlS = Annotated[
    float | None,
    Query(gt=0, le=MAX_TTL_S, description="Seconds for which it is kept; else as long as `artifacts.ttl_s` says."),
]
Store = Annotated[str | None, Query(description="A store of the configuration, `artifacts.stores`.", max_length=63)]
Prefix = Annotated[str | None, Query(description="A folder for its bytes within the tenant.", max_length=200)]


async def _stored(request: Request, work: Callable[[ArtifactStore, str], T]) -> T:
    """What `work` does with the store and the caller's tenant, on a thread."""
    tenant = caller_of(request).tenant
    return await service_of(request).stored(tenant, lambda store: work(store, tenant))


def artifact_json(artifact: Artifact) -> dict[str, Any]:
    return {
        "object": "artifact",
        "id": artifact.artifact_id,
        "content_url": artifact.url,
        "created_at": rfc3339(artifact.created_at_ms),
        **artifact.reference(),
    }


@router.post("", status_code=201, summary="Upload an artifact: the body is its bytes", dependencies=[Depends(transfer)])
async def upload(request: Request, ttl_s: TtlS = None, store: Store = None, prefix: Prefix = None) -> dict[str, Any]:
    caller = caller_of(request)
    caller.check_submits()
    grant, artifacts = caller.grant, service_of(request).artifacts
    artifacts.check_place(store, prefix)
    try:
        # First what is declared, before any of it has come; then what came.
        await check_room(request, caller, declared_length(request.scope) or 0)
    except TenantLimit:
        await discard_body(request.scope, request.receive)
        raise
    media_type = request.headers.get("content-type", "application/octet-stream").split(";")[0].strip()
    async with Upload(request, caller) as body:
        kept = await artifacts.put_stream(
            caller.tenant,
            body.pieces(),
            media_type=media_type,
            ttl_s=ttl_s,
            store=store,
            prefix=prefix,
            uploader_user_id=None if grant is None else grant.user_id,
            uploader_conversation_id=None if grant is None else grant.conversation_id,
        )
    return artifact_json(kept)


@router.get("", summary="The caller's artifacts, by the time of their making")
async def list_artifacts(
    request: Request, after: After = None, limit: Limit = 20, order: Order = "desc"
) -> dict[str, Any]:
    async def read(after: str | None, limit: int, newest_first: bool) -> list[Artifact]:
        return await _stored(
            request,
            lambda store, tenant: store.list(tenant, after=after, limit=limit, newest_first=newest_first).artifacts,
        )

    part = await read_part(read, lambda artifact: number(artifact.created_at_ms), after, limit, order)
    return part.page([artifact_json(one) for one in part.items])


@router.head("/{artifact_id}", include_in_schema=False)
@router.get("/{artifact_id}", summary="An artifact's size, type, digest and what else is known of it")
async def describe(request: Request, artifact_id: str) -> dict[str, Any]:
    return artifact_json(await _described(request, artifact_id))


@router.delete("/{artifact_id}", summary="Delete an artifact that no conversation holds")
async def delete(request: Request, artifact_id: str) -> dict[str, Any]:
    await _described(request, artifact_id)
    await _stored(request, lambda store, tenant: store.delete(tenant, artifact_id))
    context_of(request).allowances.artifacts.removed(caller_of(request).tenant)
    return {"object": "artifact.deleted", "id": artifact_id, "deleted": True}


@router.post("/{artifact_id}/url", summary="A URL of an artifact's content that needs no key, for a while")
async def make_url(request: Request, artifact_id: str) -> dict[str, Any]:
    """Body, optional: {"ttl_s": …}, seconds, by default an hour and at most a week. For `<img>` and downloads.

    For an hour at most it is one of the store's own where the store can sign them, else one of this gateway with a
    ticket, which ends with the caller's key.
    """
    ttl_s = _ttl_of(await read_json(request) if await request.body() else {})
    artifact = await _described(request, artifact_id)
    url, expires_at = None, time.time() + ttl_s
    if ttl_s <= SIGNED_URL_TTL_S and caller_of(request).grant is None:  # a URL of the store outlives a session
        url = await _stored(request, lambda store, _: store.presigned_url(artifact, ttl_s))
    if url is None:
        ticket, expires_at = context_of(request).tickets.issue_for_artifact(caller_of(request), artifact_id, ttl_s)
        url = f"{artifact.url}?ticket={ticket}"
    return {"object": "artifact.url", "id": artifact_id, "url": url, "expires_at": rfc3339(int(expires_at * 1000))}


def _ttl_of(body: Any) -> float:
    if not isinstance(body, dict):
        raise InvalidRequest("the body must be a JSON object")
    for name in body:
        if name != "ttl_s":
            raise UnsupportedParameter(f"{name} is not supported", param=name)
    ttl_s = body.get("ttl_s") or URL_TTL_S
    if isinstance(ttl_s, bool) or not isinstance(ttl_s, int | float) or not 1 <= ttl_s <= MAX_URL_TTL_S:
        raise InvalidRequest(f"ttl_s must be a number of seconds from 1 to {MAX_URL_TTL_S:.0f}", param="ttl_s")
    return float(ttl_s)


@router.head("/{artifact_id}/content", include_in_schema=False)
@router.get("/{artifact_id}/content", summary="An artifact's bytes", dependencies=[Depends(transfer)])
async def content(request: Request, artifact_id: str) -> Response:
    """`If-None-Match` with its `ETag` gives 304; one `Range` gives 206 with that part, or 416."""
    return await artifact_content.answer(request, service_of(request), await _described(request, artifact_id))


async def _described(request: Request, artifact_id: str) -> Artifact:
    """Raises NotFound."""
    return await _stored(request, lambda store, tenant: store.describe(tenant, artifact_id))
