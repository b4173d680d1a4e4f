"""The native routes: requests from their acceptance to their outcome, and what operators ask."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Annotated, Any, cast

from fastapi import APIRouter, Depends, Header, Query, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from penstock.gateway.context import context_of, service_of
from penstock.gateway.edge.disconnects import unless_gone
from penstock.gateway.edge.event_stream import KEEPALIVE, KEEPALIVE_S, server_sent
from penstock.gateway.limits.callers import Caller, caller_of
from penstock.gateway.routes import request_lists
from penstock.gateway.routes.multipart import submitted_body
from penstock.gateway.routes.paging import page
from penstock.gateway.routes.request_filters import queried
from penstock.gateway.service.brought_images import BroughtImage, take_images, with_inputs
from penstock.gateway.service.large_answers import whole_request
from penstock.gateway.service.service import GatewayService
from penstock.gateway.service.submitting import Checked, Keep
from penstock.gateway.service.subscriptions import SlowConsumer, Subscription
from penstock.gateway.view.filters import ALL, RequestFilter
from penstock.gateway.view.frames import ResultFrame
from penstock.gateway.view.outputs import json_bytes, on_output_thread
from penstock.schemas.aliases import folded, naming, translate
from penstock.schemas.cursor import decode_cursor
from penstock.schemas.errors import Forbidden, InvalidRequest, Overloaded, PenstockError, UnsupportedParameter
from penstock.schemas.ids import new_request_id
from penstock.schemas.records import InferenceRequest
from penstock.schemas.requests import parse_request, resubmittable


async def events(subscription: Subscription, keepalive_s: float = KEEPALIVE_S) -> AsyncGenerator[bytes]:
    """The stream's bytes to the outcome. A client that does not read is cut off; it resumes with its last event id."""
    try:
        while True:
            try:
                async with asyncio.timeout(keepalive_s):
                    frame = await subscription.next_frame()
            except TimeoutError:
                yield KEEPALIVE
                continue
            if frame is None:
                return
            frames = [frame, *subscription.take_nowait()]
            yield b"".join([server_sent(one.encoded(), one.type, one.cursor) for one in frames])
            if isinstance(frames[-1], ResultFrame):
                return
    except (SlowConsumer, PenstockError):  # it comes again, and hears why
        return
    finally:
        subscription.close()


router = APIRouter(prefix="/v1", tags=["requests"])

MAX_WAIT_S = 60
Wait = Annotated[float, Query(ge=0, le=MAX_WAIT_S, description="Seconds to wait for the outcome.")]
Headers = dict[str, str]


def submission(
    body: Any, caller: Caller, files: Mapping[str, bytes] | None = None
) -> tuple[InferenceRequest, list[BroughtImage], dict[str, str]]:
    """A request of the native JSON form, of this caller, with the images that it brings, and by field the name that
    the caller used.

    Raises as `translate`, `native_request` and `take_images`, with the caller's names.
    """
    if not isinstance(body, dict):
        raise InvalidRequest("the body must be a JSON object")
    fields, given = translate(cast("dict[str, Any]", body))
    if folded(given.get("created_at", "").rpartition(".")[2]) in ("timestamp", "submittedat"):  # the caller's own time
        del fields["created_at"]
    with naming(given):
        images = take_images(fields, caller.tenant, files)
        return native_request(fields, caller), images, given


def native_request(body: dict[str, Any], caller: Caller) -> InferenceRequest:
    """A request under our own names. Raises as `parse_request`, and Forbidden."""
    fields = dict(body)
    for name in ("request_id", "tenant", "created_at"):
        if fields.pop(name, None) is not None:
            raise UnsupportedParameter(f"{name} is set by the gateway", param=name)
    priority = fields.get("priority")
    if priority is None or (isinstance(priority, int) and not isinstance(priority, bool) and priority >= 0):
        fields["priority"] = caller.priority(priority)
    return parse_request(fields, tenant=caller.tenant, request_id=new_request_id(), now_ms=time.time_ns() // 1_000_000)


def accepted_json(request_id: str) -> dict[str, Any]:
    url = f"/v1/requests/{request_id}"
    return {
        "object": "request",
        "request_id": request_id,
        "status": "accepted",
        "done": False,
        "status_url": url,
        "events_url": f"{url}/events",
    }


@router.post("/requests", status_code=202, summary="Submit a request of any task")
async def submit(
    request: Request,
    idempotency_key: Annotated[str | None, Header(alias="Idempotency-Key")] = None,
    dry_run: Annotated[
        bool, Query(description="Submit nothing: say what would become of it, or refuse it as it would be refused.")
    ] = False,
    wait: Wait = 0,
) -> Response:
    """202 once the request stands on its topic, acknowledged by all in-sync replicas. A dry run answers 200.

    With `wait` the answer is the request: 200 when it is done, 202 if it is not done after so many seconds.
    """
    caller = caller_of(request)
    service = service_of(request)
    async with submitted_body(request) as (body, files):
        if files is None:
            asked, images, given = submission(body, caller)
        else:  # digests of up to `artifacts.max_bytes`
            asked, images, given = await on_output_thread(lambda: submission(body, caller, files))
    with naming(given):
        checked = await service.submitting.check(caller, asked)
    whole, (checked, keep) = checked.request, with_inputs(checked, images, context_of(request).allowances, service)
    if dry_run:
        service.submitting.check_room(checked)
        return JSONResponse(service.facts.plan(whole, await service.turns.before(whole)))
    return await send(request, checked, keep, idempotency_key=idempotency_key, wait_s=wait)


async def send(
    request: Request, checked: Checked, keep: Keep | None, *, idempotency_key: str | None, wait_s: float
) -> Response:
    """Submit what was checked: 202 once it is accepted; after a wait the request, 200 when it is done."""
    tenant, service = caller_of(request).tenant, service_of(request)
    accepted = await service.submitting.submit(
        checked,
        idempotency_key=idempotency_key,
        traceparent=request.headers.get("traceparent"),
        keep=keep,
    )
    headers = {"location": f"/v1/requests/{accepted.request_id}", "x-request-id": accepted.request_id}
    if accepted.replayed:
        headers["idempotency-replayed"] = "true"
    if wait_s:
        try:
            return await unless_gone(request.receive, _waited(service, tenant, accepted.request_id, wait_s, headers))
        except PenstockError:  # it is accepted all the same: an answer about it says why it cannot be read
            pass
    return JSONResponse(accepted_json(accepted.request_id), 202, headers)


async def _waited(service: GatewayService, tenant: str, request_id: str, wait_s: float, headers: Headers) -> Response:
    """202 if it is not done after `wait_s`. Raises as `Lookups.wait` and `Lookups.public`."""
    entry = await service.lookups.wait(tenant, request_id, wait_s)
    body = await service.lookups.public(entry, service.facts.beside(entry))
    return Response(body, 200 if entry.done else 202, {"content-type": "application/json", **headers})


def _within(caller: Caller, where: RequestFilter) -> RequestFilter:
    """The filter with what the caller's ticket leaves. Raises Forbidden for one that asks for other requests."""
    if (grant := caller.grant) is None or not grant.narrows:
        return where
    if grant.request_id is not None:
        raise Forbidden("this ticket is for one request: ask for it by its id")
    for name in ("conversation_id", "user_id"):
        wanted = getattr(grant, name)
        if wanted is not None and getattr(where, name) not in (None, wanted):
            raise Forbidden(f"this ticket reaches requests with {name} {wanted} only", param=name)
    return replace(where, **{n: v for n in ("conversation_id", "user_id") if (v := getattr(grant, n)) is not None})


@router.get("/requests", summary="The caller's requests, or those that changed")
async def list_requests(
    request: Request,
    where: Annotated[RequestFilter, Depends(queried)],
    asked: Annotated[request_lists.Asked, Depends(request_lists.asked)],
) -> Response:
    caller = caller_of(request)
    return await request_lists.answer(
        request,
        caller.tenant,
        asked,
        _within(caller, where),
        reached=_within(caller, ALL),
        show=lambda _, public: dict(public),
        show_changed=request_lists.facts,
    )


@router.get("/requests/{request_id}", summary="One request; with `wait` until it is done")
async def get_request(
    request: Request,
    request_id: str,
    wait: Wait = 0,
) -> Response:
    service = service_of(request)
    entry = await service.lookups.wait(caller_of(request).tenant, request_id, wait)
    body = await service.lookups.public(entry, service.facts.beside(entry))
    return Response(body, media_type="application/json", headers={"x-request-id": request_id})


@router.get("/requests/{request_id}/input", summary="What was asked for, as it can be submitted again")
async def get_input(request: Request, request_id: str) -> Response:
    """`request` is a body of `POST /v1/requests`. 410 when the topic holds its record no more."""
    service, tenant = service_of(request), caller_of(request).tenant
    with suppress(Overloaded):  # of the history
        await service.lookups.catch_up()  # where its record stands, and whether another gateway has erased it
    entry = await service.lookups.find(tenant, request_id)
    record = await service.records.read(entry)
    whole = await whole_request(service, record.request)
    body = {"object": "request.input", "request_id": request_id, "traceparent": record.traceparent}
    content = await on_output_thread(lambda: json_bytes({**body, "request": resubmittable(whole)}))
    return Response(content, media_type="application/json", headers={"x-request-id": request_id})


@router.get("/requests/{request_id}/deliveries", summary="What became of a request's webhook")
async def list_deliveries(request: Request, request_id: str) -> dict[str, Any]:
    """One delivery with its attempts; none without `callback_url`, and until the first call has ended."""
    data = await service_of(request).deliveries.of_request(caller_of(request).tenant, request_id)
    return page(data, ids=[one["webhook_id"] for one in data])


@router.get("/requests/{request_id}/events", summary="What happens to a request, as server-sent events")
async def stream_events(
    request: Request,
    request_id: str,
    after: Annotated[str | None, Query(description="A cursor, as Last-Event-ID.")] = None,
    last_event_id: Annotated[str | None, Header(alias="Last-Event-ID")] = None,
) -> Response:
    """The event id is the cursor, good at every gateway. Behind the last event: 204, so that a browser stops."""
    caller = caller_of(request)
    service = service_of(request)
    text = last_event_id or after
    cursor = decode_cursor(text) if text else None
    await service.lookups.find(caller.tenant, request_id)
    await service.subscriptions.reach(cursor)
    entry = await service.lookups.find(caller.tenant, request_id)
    entry.check_cursor(cursor)
    if cursor is not None and entry.is_behind(cursor):
        return Response(status_code=204)
    await service.lookups.find_whole(caller.tenant, request_id)
    headers = {"cache-control": "no-cache", "x-accel-buffering": "no", "x-request-id": request_id}
    subscription = service.subscriptions.subscribe(caller.tenant, request_id, cursor)
    return StreamingResponse(events(subscription), media_type="text/event-stream", headers=headers)


@router.post("/requests/{request_id}/cancel", summary="Cancel a request")
async def cancel(request: Request, request_id: str) -> Response:
    """202: its end was asked for. 200 with the request when it has ended already."""
    entry, asked = await service_of(request).control.cancel(caller_of(request), request_id)
    return JSONResponse(entry.to_json(), 202 if asked else 200, {"x-request-id": request_id})


@router.delete("/requests/{request_id}", summary="Erase an ended request")
async def erase(request: Request, request_id: str) -> dict[str, Any]:
    """Every gateway answers 410 from then on; copies in the log go with retention. 409 while it runs."""
    await service_of(request).erase(caller_of(request), request_id)
    return {"object": "request.deleted", "request_id": request_id, "deleted": True}
