"""The bytes of an artifact as an HTTP answer: whole, a part of it, or the word that the client has it already."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable

from fastapi import Request
from starlette.responses import Response, StreamingResponse

from penstock.common.artifacts import Artifact
from penstock.common.artifacts.places import SHOWN
from penstock.gateway.edge.conditions import Span, Unsatisfiable, not_modified, span_of
from penstock.gateway.edge.errors import error_response
from penstock.gateway.service.service import GatewayService
from penstock.schemas.errors import InvalidRequest


class RangeNotSatisfiable(InvalidRequest):
    """The range lies behind the artifact's end."""

    http_status = 416


async def answer(request: Request, service: GatewayService, artifact: Artifact) -> Response:
    """200, 206, 304 or 416. The bytes of a whole are sent to the end only if their digest is right."""
    etag, size = f'"{artifact.sha256}"', artifact.size_bytes
    headers = {"etag": etag, "cache-control": "private, no-cache"}
    if not_modified(request.headers.get("if-none-match"), etag):
        return Response(status_code=304, headers=headers)
    try:
        span = span_of(request.headers.get("range"), request.headers.get("if-range"), etag, size)
    except Unsatisfiable:
        refused = error_response(RangeNotSatisfiable(f"the artifact has {size} bytes", details={"bytes": size}))
        refused.headers["content-range"] = f"bytes */{size}"
        return refused
    headers |= {"x-content-type-options": "nosniff", "accept-ranges": "bytes"}
    shown = artifact.media_type in SHOWN
    if not shown:
        headers["content-disposition"] = f'attachment; filename="{artifact.artifact_id}"'
    if span is not None:
        headers["content-range"] = span.content_range(size)
    sent = span or Span(0, size)
    headers["content-length"] = str(sent.end - sent.start)
    status = 200 if span is None else 206
    media_type = artifact.media_type if shown else "application/octet-stream"
    if request.method == "HEAD":
        return Response(status_code=status, media_type=media_type, headers=headers)
    pieces = service.artifacts.pieces(artifact, sent.start, sent.end)

    async def piece() -> bytes:
        return await service.threads.artifacts.run_for(artifact.tenant, next, pieces, b"")

    # One that is small, or not there, is refused as a whole.
    first = await piece()
    return StreamingResponse(_sent(first, piece), status_code=status, media_type=media_type, headers=headers)


async def _sent(first: bytes, next_piece: Callable[[], Awaitable[bytes]]) -> AsyncGenerator[bytes]:
    """One piece at a time: a reader that is slow has no more of it in memory."""
    piece = first
    while piece:
        yield piece
        piece = await next_piece()
