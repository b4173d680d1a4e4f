"""Artifacts over HTTP: upload bytes, fetch them again, within the caller's tenant."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from typing import Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response, StreamingResponse

from penstock.gateway.context import context_of, service_of
from penstock.gateway.edge.bodies import declared_length, discard_body
from penstock.gateway.limits.callers import Caller, caller_of
from penstock.producers.artifacts import Artifact, ArtifactStore
from penstock.schemas.errors import InvalidRequest, TenantLimit

router = APIRouter(prefix="/v1/artifacts", tags=["artifacts"])

# What a browser may show from our origin; all else is sent as a download, so that an upload never runs as a page.
_SHOWN = frozenset({"image/png", "image/jpeg", "image/webp", "image/gif", "text/plain"})


def _store(request: Request) -> ArtifactStore:
    store = service_of(request).artifacts
    return store


def artifact_json(artifact: Artifact) -> dict[str, Any]:
    return {
        "object": "artifact",
        "id": artifact.artifact_id,
        "media_type": artifact.media_type,
        "bytes": artifact.size_bytes,
        "sha256": artifact.sha256,
        "content_url": f"/v1/artifacts/{artifact.artifact_id}/content",
    }


async def _transfer(request: Request) -> AsyncGenerator[None]:
    """A slot until the answer is sent. Raises TenantLimit, Overloaded."""
    give_back = context_of(request).allowances.open_transfer(caller_of(request))
    try:
        yield
    finally:
        give_back()


@router.post(
    "", status_code=201, summary="Upload an artifact: the body is its bytes", dependencies=[Depends(_transfer)]
)
async def upload(request: Request) -> dict[str, Any]:
    caller = caller_of(request)
    caller.require("submit")
    try:
        # First what is declared, before it is in memory; then what came.
        await _check_room(request, caller, declared_length(request.scope) or 0)
    except TenantLimit:
        await discard_body(request.scope, request.receive)
        raise
    data = await request.body()
    if not data:
        raise InvalidRequest("the body is empty: send the artifact's bytes")
    media_type = request.headers.get("content-type", "application/octet-stream").split(";")[0].strip()
    await _check_room(request, caller, len(data))
    with context_of(request).allowances.artifacts.adding(caller.tenant, len(data)):
        kept = await asyncio.to_thread(_store(request).put, caller.tenant, data, media_type=media_type)
    return artifact_json(kept)


async def _check_room(request: Request, caller: Caller, more_bytes: int) -> None:
    """As of now, up to the next await. Raises TenantLimit."""
    allowances = context_of(request).allowances
    if allowances.limits_artifacts(caller):
        store = _store(request)
        used = await allowances.artifacts.used(caller.tenant, lambda: store.used_bytes(caller.tenant))
        allowances.artifact_room(caller, used, more_bytes)


@router.get("/{artifact_id}", summary="An artifact's size, type and digest")
async def describe(request: Request, artifact_id: str) -> dict[str, Any]:
    caller = caller_of(request)
    caller.require("read")
    return artifact_json(await asyncio.to_thread(_store(request).describe, caller.tenant, artifact_id))


@router.get("/{artifact_id}/content", summary="An artifact's bytes", dependencies=[Depends(_transfer)])
async def content(request: Request, artifact_id: str) -> Response:
    caller = caller_of(request)
    caller.require("read")
    store = _store(request)
    artifact = await asyncio.to_thread(store.describe, caller.tenant, artifact_id)
    pieces = store.pieces(artifact)
    # One that is small, or not there, is refused as a whole.
    first = await asyncio.to_thread(next, pieces, b"")
    shown = artifact.media_type in _SHOWN
    headers = {
        "x-content-type-options": "nosniff",
        "etag": f'"{artifact.sha256}"',
        "content-length": str(artifact.size_bytes),
    }
    if not shown:
        headers["content-disposition"] = f'attachment; filename="{artifact.artifact_id}"'
    media_type = artifact.media_type if shown else "application/octet-stream"
    return StreamingResponse(_sent(first, pieces), media_type=media_type, headers=headers)


async def _sent(first: bytes, pieces: Iterator[bytes]) -> AsyncGenerator[bytes]:
    """One piece at a time: a reader that is slow has no more of it in memory."""
    piece = first
    while piece:
        yield piece
        piece = await asyncio.to_thread(next, pieces, b"")
