"""OpenAI's routes for files, for stock clients: the input and the output of batches."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from starlette.datastructures import FormData, UploadFile
from starlette.responses import Response

from penstock.common.artifacts import Artifact
from penstock.gateway.batches.answers import ExpiresAfter
from penstock.gateway.batches.keeping import BatchStore
from penstock.gateway.batches.records import batch_name, file_id_of, file_json, file_name
from penstock.gateway.context import context_of, service_of
from penstock.gateway.edge.bodies import is_multipart
from penstock.gateway.edge.validation import validated
from penstock.gateway.limits.callers import caller_of
from penstock.gateway.routes import artifact_content
from penstock.gateway.routes.artifact_uploads import check_room, transfer
from penstock.gateway.routes.multipart import form_of
from penstock.gateway.routes.paging import After, Order, number, read_part
from penstock.schemas.errors import Conflict, InvalidRequest, NotFound, UnsupportedParameter

router = APIRouter(prefix="/v1/files", tags=["openai"])

PIECE_BYTES = 2**20
MOST_LISTED = 100
PURPOSE = "batch"
_FIELDS = frozenset({"file", "purpose", "expires_after[anchor]", "expires_after[seconds]"})
Limit = Annotated[int, Query(ge=1, le=10_000, description=f"Files on a page; at most {MOST_LISTED} are given.")]


@router.post("", summary="Upload a file for a batch, as OpenAI's API has it: multipart")
async def create_file(request: Request) -> dict[str, Any]:
    """The file lies on the disk while it comes, then streams into the artifact store."""
    if not is_multipart(request.scope):
        raise InvalidRequest("send multipart/form-data with the parts file and purpose", param="file")
    context, service, caller = context_of(request), service_of(request), caller_of(request)
    async with form_of(request) as form:
        file, ttl_s = _upload_of(form)
        size = file.size or 0
        await check_room(request, caller, size)
        with context.allowances.artifacts.adding(caller.tenant, size):
            kept = await service.artifacts.put_stream(
                caller.tenant,
                _pieces(request, file),
                media_type="application/jsonl",
                ttl_s=ttl_s,
                purpose=PURPOSE,
                filename=(file.filename or "file.jsonl")[:255],
                max_bytes=context.settings.gateway.max_batch_bytes,
            )
    return file_json(kept)


def _upload_of(form: FormData) -> tuple[UploadFile, int | None]:
    """(the file, the seconds for which it is kept if that is said)."""
    for name in form:
        if name not in _FIELDS:
            raise UnsupportedParameter(f"{name[:100]} is not supported", param=name[:100])
    file, purpose = form.get("file"), form.get("purpose")
    if purpose != PURPOSE:
        raise InvalidRequest(f"purpose must be {PURPOSE}", param="purpose")
    if not isinstance(file, UploadFile) or not file.size:
        raise InvalidRequest("file must be a file that is not empty", param="file")
    anchor, seconds = form.get("expires_after[anchor]"), form.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return file, None
    given = int(seconds) if isinstance(seconds, str) and seconds.isdecimal() and len(seconds) < 10 else seconds
    try:
        return file, validated(ExpiresAfter, {"anchor": anchor, "seconds": given}).seconds
    except InvalidRequest as refused:
        raise InvalidRequest(f"expires_after.{refused.message}", param=f"expires_after.{refused.param}") from None


async def _pieces(request: Request, file: UploadFile) -> AsyncIterator[bytes]:
    """Raises Unauthenticated when the key was revoked meanwhile."""
    while piece := await file.read(PIECE_BYTES):
        caller_of(request)
        yield piece


@router.get("", summary="The tenant's files")
async def list_files(
    request: Request, purpose: str | None = None, after: After = None, limit: Limit = MOST_LISTED, order: Order = "desc"
) -> dict[str, Any]:
    tenant, service = caller_of(request).tenant, service_of(request)

    async def read(after: str | None, limit: int, newest_first: bool) -> list[Artifact]:
        behind = None if after is None else file_id_of(after, "after")
        options: Any = {"after": behind, "limit": limit, "newest_first": newest_first, "purpose": purpose}
        return await service.stored(tenant, lambda store: store.list_files(tenant, **options).artifacts)

    part = await read_part(read, lambda file: number(file.created_at_ms), after, min(limit, MOST_LISTED), order)
    return part.page([file_json(one) for one in part.items])


@router.get("/{file_id}", summary="One file")
async def retrieve_file(request: Request, file_id: str) -> dict[str, Any]:
    return file_json(await find_file(request, file_id))


@router.get("/{file_id}/content", summary="A file's bytes", dependencies=[Depends(transfer)])
async def file_content(request: Request, file_id: str) -> Response:
    """Also parts of it (`Range`), as of an artifact."""
    return await artifact_content.answer(request, service_of(request), await find_file(request, file_id))


@router.delete("/{file_id}", summary="Delete a file that no batch reads")
async def delete_file(request: Request, file_id: str) -> dict[str, Any]:
    """409 while a batch runs that reads it."""
    artifact, tenant = await find_file(request, file_id), caller_of(request).tenant
    service = service_of(request)
    reader = await service.stored(tenant, lambda store: BatchStore(store).reader_of(tenant, artifact.artifact_id))
    if reader is not None:
        raise Conflict(f"{batch_name(reader)} reads this file: cancel it first", param="file_id")
    await service.stored(tenant, lambda store: store.delete(tenant, artifact.artifact_id))
    context_of(request).allowances.artifacts.removed(tenant)
    return {"id": file_name(artifact.artifact_id), "object": "file", "deleted": True}


async def find_file(request: Request, name: str, param: str = "file_id") -> Artifact:
    """Raises NotFound for what is no file of the caller's tenant."""
    tenant, file_id = caller_of(request).tenant, file_id_of(name, param)
    try:
        found = await service_of(request).stored(tenant, lambda store: store.describe(tenant, file_id))
    except NotFound:
        found = None
    if found is None or found.purpose is None:
        raise NotFound("there is no such file", param=param)
    return found
