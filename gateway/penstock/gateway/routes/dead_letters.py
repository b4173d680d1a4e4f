"""`/v1/admin/dlq`: dead letters of all tenants listed, shown, run again and purged, for the scope `admin`."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, ConfigDict, Field

from penstock.gateway.context import service_of
from penstock.gateway.dead_letters.index import LetterFilter
from penstock.gateway.edge.validation import validated
from penstock.gateway.limits.callers import caller_of
from penstock.gateway.routes.multipart import read_json
from penstock.gateway.routes.paging import page
from penstock.gateway.service.redriving import MOST, Chosen, Redriven
from penstock.schemas.errors import InvalidRequest, error_body
from penstock.schemas.times import time_ms

router = APIRouter(prefix="/v1/admin/dlq", tags=["operations"])
Time = Annotated[str | None, Field(description="RFC 3339, or Unix seconds.")]


class Filter(BaseModel):
    """Which letters are meant. What is left out is any."""

    model_config = ConfigDict(extra="forbid")

    reason: Annotated[str | None, Field(description="The code of the error.")] = None
    model: str | None = None
    tenant: str | None = None
    request_id: Annotated[str | None, Field(description="The request that got the letter.")] = None
    since: Time = None
    until: Time = None

    def meant(self) -> LetterFilter:
        """Raises InvalidRequest."""
        return LetterFilter(
            reason=self.reason,
            model=self.model,
            tenant=self.tenant,
            request_id=self.request_id,
            since_ms=None if self.since is None else time_ms(self.since, "since"),
            until_ms=None if self.until is None else time_ms(self.until, "until"),
        )


class ListQuery(Filter):
    after: Annotated[str | None, Field(description="The `last_id` of the page before.")] = None
    limit: Annotated[int, Field(ge=1, le=100, description="Items on a page.")] = 20
    order: Annotated[Literal["asc", "desc"], Field(description="Oldest or newest first.")] = "desc"


class PurgeBody(BaseModel):
    """Which letters to take away: `ids`, or a `filter`."""

    model_config = ConfigDict(extra="forbid")

    ids: Annotated[list[str] | None, Field(max_length=MOST)] = None
    filter: Filter | None = None
    after: Annotated[
        str | None,
        Field(description="The `last_id` of the call before; the id of a letter: behind it, up to the end of now."),
    ] = None
    dry_run: Annotated[bool, Field(description="Do nothing: say what would be done.")] = False

    def chosen(self) -> Chosen:
        """Raises InvalidRequest."""
        if (self.ids is None) == (self.filter is None):
            raise InvalidRequest("give ids or filter; an empty filter means all letters", param="filter")
        return Chosen(ids=self.ids, filter=None if self.filter is None else self.filter.meant(), after=self.after)


class RedriveBody(PurgeBody):
    """Which letters to run again."""

    rate: Annotated[float | None, Field(ge=0.1, le=10_000, description="Letters a second, at most.")] = None
    again: Annotated[bool, Field(description="Those too that were run again before.")] = False


@router.get("", summary="Dead letters of all tenants, newest first")
async def list_letters(request: Request, query: Annotated[ListQuery, Query()]) -> dict[str, Any]:
    """Facts alone; `GET` one for its payload. A purged letter is in no list."""
    limit = query.limit
    found, cursor = await service_of(request).redriving.page(
        query.meant(), after=query.after, limit=limit + 1, newest_first=query.order == "desc"
    )
    shown = page([one.to_json() for one in found[:limit]], has_more=len(found) > limit)
    return {**shown, "last_id": str(replace(cursor, place=found[:limit][-1].place))} if shown["has_more"] else shown


@router.get("/groups", summary="How many dead letters there are, by reason and model")
async def groups(request: Request) -> dict[str, Any]:
    """Letters that were not run again; those with the newest letters first, at most 200. Counted once a second."""
    found = await service_of(request).redriving.groups()
    return page([one.to_json() for one in found], has_more=False)


@router.post("/redrive", summary="Run dead letters again, each as a new request")
async def redrive(request: Request) -> dict[str, Any]:
    """A call handles up to 1,000 letters in about 10 s. A repeat runs nothing twice, unless `again` is set.

    Letters that are written after the first call are not part of it.
    """
    body = validated(RedriveBody, await read_json(request))
    done = await service_of(request).redriving.redrive(
        caller_of(request), body.chosen(), rate=body.rate, dry_run=body.dry_run, again=body.again
    )
    return {
        "object": "dead_letter.redrive",
        "dry_run": body.dry_run,
        "redriven": len(done.requests),
        "request_ids": list(done.requests.values()),
        "skipped": done.skipped,
        "error": None if done.error is None else error_body(done.error)["error"],
        **_rest(done),
    }


@router.post("/purge", summary="Take dead letters away")
async def purge(request: Request) -> dict[str, Any]:
    """Nobody sees them from then on. The bytes of the oldest are deleted at once, others go with retention."""
    body = validated(PurgeBody, await read_json(request))
    done = await service_of(request).redriving.purge(caller_of(request), body.chosen(), dry_run=body.dry_run)
    return {
        "object": "dead_letter.purge",
        "dry_run": body.dry_run,
        "purged": len(done.requests),
        "ids": list(done.requests),
        "skipped": done.skipped,
        **_rest(done),
    }


def _rest(done: Redriven) -> dict[str, Any]:
    """What is left, and where the next call continues."""
    return {"remaining": done.remaining, "has_more": done.remaining > 0, "last_id": str(done.cursor) or None}


@router.get("/{letter_id:path}", summary="One dead letter")
async def show(request: Request, letter_id: str) -> dict[str, Any]:
    """With its original bytes and headers for a key of its tenant that has the scope `read`."""
    return await service_of(request).redriving.show(caller_of(request), letter_id)
