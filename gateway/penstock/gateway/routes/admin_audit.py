"""`/v1/admin/audit`: what operators did, for the scope `admin`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from pydantic import Field

from penstock.gateway.access.audit_log import audit_json
from penstock.gateway.context import context_of, service_of
from penstock.gateway.routes.answers import Answer, Json, Time
from penstock.gateway.routes.paging import page
from penstock.schemas.errors import InvalidRequest
from penstock.schemas.records import AuditEvent
from penstock.schemas.times import time_ms

router = APIRouter(prefix="/v1/admin", tags=["operations"])


class AuditAnswer(Answer):
    """One action of an operator."""

    object: Literal["audit_event"]
    id: str
    offset: Annotated[int, Field(description="Of its first record on `inference.audit`.")]
    at: Time
    action: Annotated[str, Field(description="Method and route, or the command.")]
    target: str | None
    parameters: Annotated[
        Json | None, Field(description="`query` and `body` without secrets; of a command its options.")
    ]
    key_id: str | None
    key_name: str | None
    tenant: Annotated[str | None, Field(description="Of the key.")]
    user: Annotated[str | None, Field(description="Of a command: the user of the operating system.")]
    address: str | None
    status: Annotated[int | None, Field(description="Of the answer; null: the action was cut off, or is not done yet.")]


@router.get("/audit", summary="What operators did, newest first")
async def list_audit(
    request: Request,
    action: Annotated[
        str | None, Query(description="Only actions that contain this text, as `/v1/admin/keys`.")
    ] = None,
    key_id: Annotated[str | None, Query(description="Only by this key.")] = None,
    since: Annotated[str | None, Query(description="Only from this time on: RFC 3339, or Unix seconds.")] = None,
    after: Annotated[str | None, Query(description="The `last_id` of the page before.")] = None,
    limit: Annotated[int, Query(ge=1, le=100, description="Items on a page.")] = 20,
) -> dict[str, Any]:
    """Each is recorded before it is done. Kept for 90 days, unless `[topics.config]` says else.

    A page costs up to 20,000 records: it can have less than `limit`, even nothing, and `has_more`.
    """
    if after is not None and not (after.isascii() and after.isdecimal()):
        raise InvalidRequest("after must be the last_id of a page", param="after")

    def wanted(event: AuditEvent) -> bool:
        return (action or "") in event.action and key_id in (None, event.key_id)

    before, since_ms = None if after is None else int(after), None if since is None else time_ms(since, "since")
    audit, threads = context_of(request).orders.audit, service_of(request).threads
    found, follows = await threads.metadata.run(audit.read, before, limit, since_ms, wanted)
    shown = [audit_json(event, offset) for offset, event in found]
    made = page(shown, has_more=follows is not None, ids=[str(one["offset"]) for one in shown])
    return made if follows is None else {**made, "last_id": str(follows)}
