"""OpenAI's routes for batches, for stock clients. Every gateway answers for every batch of the tenant."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any, TypeVar

from fastapi import APIRouter, Request

from penstock.common.clock import now_ms
from penstock.gateway.batches.answers import NewBatch
from penstock.gateway.batches.file_routes import PURPOSE, find_file
from penstock.gateway.batches.keeping import BatchStore
from penstock.gateway.batches.line_runs import ENDPOINTS
from penstock.gateway.batches.records import WINDOW_S, Batch, batch_id_of, file_id_of
from penstock.gateway.context import context_of, service_of
from penstock.gateway.limits.callers import caller_of
from penstock.gateway.routes.conversations import IdempotencyKey
from penstock.gateway.routes.multipart import BodyRoute
from penstock.gateway.routes.paging import After, Limit, page
from penstock.gateway.service.submitting import key_reused, keyed_id
from penstock.schemas.errors import InvalidRequest

T = TypeVar("T")
router = APIRouter(prefix="/v1/batches", tags=["openai"], route_class=BodyRoute)


@router.post("", summary="Run the lines of a file as low work, as OpenAI's API has it")
async def create_batch(body: NewBatch, request: Request, idempotency_key: IdempotencyKey = None) -> dict[str, Any]:
    """The file is checked after the answer: a batch whose file is wrong ends as `failed`, with line numbers.

    With `Idempotency-Key` a repeat is the same batch.
    """
    if body.endpoint not in ENDPOINTS:
        raise InvalidRequest(f"endpoint must be one of {', '.join(ENDPOINTS)}", param="endpoint")
    caller, made_ms = caller_of(request), now_ms()
    batch_id = str(uuid.uuid4())
    if idempotency_key is not None:
        batch_id = keyed_id(caller.tenant, "batch", idempotency_key)
        standing = await _kept(request, lambda kept, tenant: kept.find((tenant, batch_id)))
        if standing is not None:  # its file may be gone by now
            return _if_asked(standing, body)
    artifact = await find_file(request, body.input_file_id, "input_file_id")
    if artifact.purpose != PURPOSE:
        raise InvalidRequest(f"the purpose of this file is not {PURPOSE}", param="input_file_id")
    batch = Batch(
        batch_id=batch_id,
        tenant=caller.tenant,
        key_id=caller.key_id,
        endpoint=body.endpoint,
        input_file_id=artifact.artifact_id,
        created_ms=made_ms,
        expires_at=made_ms // 1000 + WINDOW_S,
        metadata=body.metadata,
        output_ttl_s=_output_ttl_s(body),
        base_url=str(request.base_url),
    )
    service = service_of(request)
    await service.stored(caller.tenant, lambda store: store.keep_until(artifact, batch.expires_at * 1000))
    made = await _kept(request, lambda kept, _: kept.create(batch))
    context_of(request).wake_batches()
    return _if_asked(made, body)


def _output_ttl_s(body: NewBatch) -> int | None:
    return None if body.output_expires_after is None else body.output_expires_after.seconds


def _if_asked(batch: Batch, body: NewBatch) -> dict[str, Any]:
    """The batch as it is shown. Raises IdempotencyKeyReused if the body asks for another one."""
    asked = (body.endpoint, file_id_of(body.input_file_id, "input_file_id"), body.metadata, _output_ttl_s(body))
    if asked != (batch.endpoint, batch.input_file_id, batch.metadata, batch.output_ttl_s):
        raise key_reused()
    return batch.public()


@router.get("", summary="The tenant's batches, the newest first")
async def list_batches(request: Request, after: After = None, limit: Limit = 20) -> dict[str, Any]:
    behind = None if after is None else batch_id_of(after)
    found = await _kept(request, lambda kept, tenant: kept.list(tenant, behind, limit))
    return page([one.public() for one in found[:limit]], has_more=len(found) > limit)


@router.get("/{batch_id}", summary="One batch")
async def retrieve_batch(request: Request, batch_id: str) -> dict[str, Any]:
    found = batch_id_of(batch_id)
    return (await _kept(request, lambda kept, tenant: kept.get((tenant, found)))).public()


@router.post("/{batch_id}/cancel", summary="Cancel a batch")
async def cancel_batch(request: Request, batch_id: str) -> dict[str, Any]:
    """Lines that have ended are in the files when its status is `cancelled`; a batch that has ended stays as it is."""
    found, now_s = batch_id_of(batch_id), now_ms() // 1000
    batch = await _kept(request, lambda kept, tenant: kept.cancel((tenant, found), now_s))
    context_of(request).wake_batches()
    return batch.public()


async def _kept(request: Request, work: Callable[[BatchStore, str], T]) -> T:
    """What `work` does with the tenant's batches, on a thread."""
    tenant = caller_of(request).tenant
    return await service_of(request).stored(tenant, lambda store: work(BatchStore(store), tenant))
