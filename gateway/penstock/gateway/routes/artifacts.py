"""Artifacts over HTTP: upload bytes, fetch them again, within the caller's tenant."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from penstock.gateway.context import context_of, service_of
from penstock.gateway.limits.callers import caller_of
from penstock.producers.artifacts import Artifact, ArtifactStore
from penstock.schemas.errors import InvalidRequest

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


@router.post("", status_code=201, summary="Upload an artifact: the body is its bytes")
async def upload(request: Request) -> dict[str, Any]:
    caller = caller_of(request)
    caller.require("submit")
    data = await request.body()
    if not data:
        raise InvalidRequest("the body is empty: send the artifact's bytes")
    media_type = request.headers.get("content-type", "application/octet-stream").split(";")[0].strip()
    allowances = context_of(request).allowances
    if allowances.limits_artifacts(caller):
        used = allowances.artifacts.known(caller.tenant, time.monotonic())
        if used is None:
            used = await asyncio.to_thread(_store(request).used_bytes, caller.tenant)
            allowances.artifacts.measured(caller.tenant, used, time.monotonic())
        allowances.artifact_room(caller, used, len(data))
        allowances.artifacts.added(caller.tenant, len(data))
    return artifact_json(await asyncio.to_thread(_store(request).put, caller.tenant, data, media_type=media_type))


@router.get("/{artifact_id}", summary="An artifact's size, type and digest")
async def describe(request: Request, artifact_id: str) -> dict[str, Any]:
    caller = caller_of(request)
    caller.require("read")
    return artifact_json(await asyncio.to_thread(_store(request).describe, caller.tenant, artifact_id))


@router.get("/{artifact_id}/content", summary="An artifact's bytes")
async def content(request: Request, artifact_id: str) -> Response:
    caller = caller_of(request)
    caller.require("read")
    store = _store(request)
    artifact = await asyncio.to_thread(store.describe, caller.tenant, artifact_id)
    data = await asyncio.to_thread(store.get, caller.tenant, artifact_id)
    shown = artifact.media_type in _SHOWN
    headers = {"x-content-type-options": "nosniff", "etag": f'"{artifact.sha256}"'}
    if not shown:
        headers["content-disposition"] = f'attachment; filename="{artifact.artifact_id}"'
    return Response(data, media_type=artifact.media_type if shown else "application/octet-stream", headers=headers)
