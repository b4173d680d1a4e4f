"""Commands about requests: another priority for one, and cancels and priorities for many."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError
from starlette.responses import JSONResponse, Response

from penstock.gateway.context import service_of
from penstock.gateway.edge.validation import validated
from penstock.gateway.limits.callers import Caller, caller_of
from penstock.gateway.routes.multipart import read_json
from penstock.gateway.routes.request_filters import MOST_AGE_S, checked
from penstock.gateway.service.bulk_commands import Bulk, BulkDone
from penstock.gateway.service.selection import ALL_TENANTS, Selection
from penstock.gateway.view.filters import RequestFilter, WaitsFor
from penstock.schemas.errors import InvalidRequest
from penstock.schemas.ids import check_conversation_id
from penstock.schemas.times import rfc3339, time_ms
from penstock.schemas.topics import CLASS_PRIORITIES, MOST_PRIORITY, priority_class

router = APIRouter(prefix="/v1", tags=["requests"])

MOST_IDS = 1_000
Class = Literal["high", "medium", "low"]
NO_FILTER = {"ids", "limit", "dry_run"}


def _checked(value: Any) -> Any:
    is_number = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST_PRIORITY
    if not is_number and not (isinstance(value, str) and value in CLASS_PRIORITIES):
        raise PydanticCustomError("priority", "must be 0 to {most}, or high, medium or low", {"most": MOST_PRIORITY})
    return value


Priority = Annotated[
    int | Class, BeforeValidator(_checked), Field(description="0 the most urgent; or a class: high, medium or low.")
]


class PriorityBody(BaseModel):
    """The priority that a request gets."""

    model_config = ConfigDict(extra="forbid")

    priority: Priority


class ManyBody(BaseModel):
    """Which requests that have not ended are meant: `ids`, or a filter, whose fields must all agree."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    ids: Annotated[list[str] | None, Field(max_length=MOST_IDS)] = None
    status: str | None = None
    conversation_id: str | int | None = None
    user_id: str | None = None
    session_id: str | None = None
    correlation_id: Annotated[str | None, Field(description="That of the requests' metadata.")] = None
    task: str | None = None
    model: Annotated[str | None, Field(description="That was asked for, or chosen.")] = None
    id_contains: Annotated[str | None, Field(min_length=1, description="A part of their ids.")] = None
    class_: Annotated[Class | None, Field(alias="class", description="Of its priority, as it is now.")] = None
    older_than_s: Annotated[
        float | None, Field(ge=0, le=MOST_AGE_S, description="Accepted at least so many seconds ago.")
    ] = None
    accepted_before: Annotated[
        str | None, Field(description="Accepted before this time: RFC 3339, or Unix seconds.")
    ] = None
    waiting_for: Annotated[str | None, Field(description="Those that wait for this reason.")] = None
    tenant: Annotated[
        str | None, Field(description="Another tenant, or `*` for all, with a filter: needs the scope `admin`.")
    ] = None
    limit: Annotated[int | None, Field(ge=1, description="At most so many; `has_more` says if others are left.")] = None
    dry_run: Annotated[bool, Field(description="Do nothing: count them.")] = False

    def bulk(self, waits_for: Callable[[str], WaitsFor]) -> Bulk:
        """`waits_for` judges why requests wait. Raises InvalidRequest."""
        return Bulk(chosen=self._chosen(waits_for), limit=self.limit, dry_run=self.dry_run)

    def _chosen(self, waits_for: Callable[[str], WaitsFor]) -> Selection:
        named = {name for name in ManyBody.model_fields if getattr(self, name) is not None} - {"limit", "dry_run"}
        if not named:
            names = sorted(
                field.alias or name for name, field in ManyBody.model_fields.items() if name not in NO_FILTER
            )
            raise InvalidRequest(f"give ids, or a filter: {', '.join(names)}")
        before_ms = None if self.accepted_before is None else time_ms(self.accepted_before, "accepted_before")
        if self.ids is not None:
            if named - {"ids", "tenant", "accepted_before"}:
                raise InvalidRequest("give either ids or a filter", param="ids")
            if self.tenant == ALL_TENANTS:
                raise InvalidRequest("name the tenant whose ids they are", param="tenant")
            return Selection(ids=dict.fromkeys(self.ids), tenant=self.tenant, accepted_before_ms=before_ms)
        where = RequestFilter(
            status=self.status,
            conversation_id=None if self.conversation_id is None else check_conversation_id(self.conversation_id),
            user_id=self.user_id,
            session_id=self.session_id,
            correlation_id=self.correlation_id,
            task=self.task,
            model=self.model,
            klass=self.class_,
            id_contains=self.id_contains,
            waits_for=None if self.waiting_for is None else waits_for(self.waiting_for),
        )
        return Selection(
            where=checked(where),
            tenant=self.tenant,
            accepted_before_ms=before_ms,
            older_than_ms=None if self.older_than_s is None else round(self.older_than_s * 1000),
        )


class ReprioritizeManyBody(ManyBody):
    """Which requests that wait are meant, and the priority that they get."""

    priority: Priority


@router.post("/requests/{request_id}/reprioritize", status_code=202, summary="Give a request another priority")
async def reprioritize(request: Request, request_id: str) -> Response:
    """202 with the request as it is then. 409 when it has ended or runs: then nothing is changed."""
    caller = caller_of(request)
    priority = _priority(validated(PriorityBody, await read_json(request)).priority, caller)
    entry = await service_of(request).control.reprioritize(caller, request_id, priority)
    return JSONResponse(entry.to_json(), 202, {"x-request-id": request_id})


@router.post("/requests/cancel", status_code=202, summary="Cancel several requests, by ids or by filter")
async def cancel_many(request: Request) -> dict[str, Any]:
    """Answers how many were asked to end, and the first 1,000 of them."""
    body = validated(ManyBody, await read_json(request))
    service = service_of(request)
    bulk = body.bulk(service.facts.waits_for)
    done = await service.bulk_commands.cancel(caller_of(request), bulk)
    return {"object": "cancellation", **_facts(bulk, done)}


@router.post("/requests/reprioritize", status_code=202, summary="Give several requests another priority")
async def reprioritize_many(request: Request) -> dict[str, Any]:
    """Those that run stay as they are. Answers how many were moved, and the first 1,000 of them."""
    caller = caller_of(request)
    body = validated(ReprioritizeManyBody, await read_json(request))
    service = service_of(request)
    bulk, priority = body.bulk(service.facts.waits_for), _priority(body.priority, caller)
    done = await service.bulk_commands.reprioritize(caller, bulk, priority)
    return {"object": "reprioritization", "priority": priority, **_facts(bulk, done)}


def _facts(bulk: Bulk, done: BulkDone) -> dict[str, Any]:
    return {
        "dry_run": bulk.dry_run,
        "count": done.count,
        "request_ids": done.request_ids,
        "has_more": done.has_more,
        "accepted_before": rfc3339(done.accepted_before_ms),
    }


def _priority(asked: int | str, caller: Caller) -> int:
    """A class means the most urgent number of it that the key may use, 2, 5 or 8 at most. Raises Forbidden."""
    if isinstance(asked, int):
        return caller.priority(asked)
    number = CLASS_PRIORITIES[asked]
    allowed = max(number, caller.max_priority)
    return allowed if priority_class(allowed) == asked else caller.priority(number)
