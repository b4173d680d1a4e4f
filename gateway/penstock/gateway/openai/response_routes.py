"""OpenAI's responses: made at once or in the background, and fetched, followed, cancelled and deleted later."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from starlette.responses import JSONResponse, Response

from penstock.gateway.context import service_of
from penstock.gateway.edge.errors import FinalFailure
from penstock.gateway.limits.callers import caller_of
from penstock.gateway.openai import endpoints
from penstock.gateway.openai.exchange import AnswerStream, completed
from penstock.gateway.openai.found_responses import find_response
from penstock.gateway.openai.previous_responses import put_items_in, put_previous_in
from penstock.gateway.openai.responses_answers import Asked, Json, ResponseWriter, ended_otherwise, response
from penstock.gateway.openai.responses_bodies import WORDS, ResponsesBody
from penstock.gateway.openai.responses_streams import FIRST_DELTA, BackgroundWriter, background_events
from penstock.gateway.openai.routes import Exchange, shaped
from penstock.gateway.openai.stored_responses import input_items, unfinished
from penstock.gateway.routes.multipart import BodyRoute
from penstock.gateway.routes.paging import After, Include, Limit, Order, first_page
from penstock.gateway.service.large_answers import whole_request, whole_result
from penstock.gateway.service.service import GatewayService
from penstock.gateway.view.entries import Entry
from penstock.schemas.errors import Gone, InvalidRequest, NotFound

router = APIRouter(prefix="/v1", tags=["openai"], route_class=BodyRoute)

CANCELLED_S = 5.0
"""So long a cancel waits for the end. Without a worker it comes later."""


@router.post("/responses", summary="Responses, as OpenAI's API has them")
async def create_response(body: ResponsesBody, request: Request) -> Response:
    """Plain or streamed; a client that disconnects cancels, unless the response is made in the background."""
    service, caller = service_of(request), caller_of(request)
    tenant = caller.tenant
    await put_items_in(body, service, caller)
    await put_previous_in(body, service, caller)
    exchange = await Exchange.of(request, body, endpoints.RESPONSE)
    entry = service.lookups.peek(tenant, exchange.request_id)
    if entry is not None:
        exchange.created = entry.accepted_ms // 1000  # as every gateway gives it later
    asked = endpoints.about(body, exchange.made)
    if not body.background:
        return exchange.stream(ResponseWriter(asked)) if exchange.streams else await exchange.answer(body)
    answer = _followed(service, tenant, asked) if exchange.streams else await _shown(service, tenant, asked, entry)
    answer.headers.update(exchange.headers)
    return answer


@router.get("/responses/{response_id}", summary="A response, as it is or as a stream of its events")
async def retrieve_response(
    request: Request,
    response_id: str,
    stream: Annotated[bool, Query(description="Its events; of one that was made in the background only.")] = False,
    starting_after: Annotated[
        int | None, Query(ge=0, description="The number of the last event that the caller has.")
    ] = None,
    include: Include = None,
    include_obfuscation: Annotated[bool, Query(description="Accepted; nothing is padded.")] = False,
) -> Response:
    """The same at every gateway."""
    service, tenant = service_of(request), caller_of(request).tenant
    found = await find_response(service, tenant, response_id)
    if not stream:
        if starting_after is not None:
            raise InvalidRequest("starting_after goes with stream=true only", param="starting_after")
        return await _shown(service, tenant, found.asked, found.entry)
    if not found.asked.repeated["background"]:
        raise InvalidRequest("only a response that was made with background: true can be streamed", param="stream")
    return _followed(service, tenant, found.asked, starting_after)


@router.post("/responses/{response_id}/cancel", summary="Cancel a response that is made in the background")
async def cancel_response(request: Request, response_id: str) -> Response:
    """The response, cancelled; as it is if it has ended before, or if no worker is there to end it."""
    service, caller = service_of(request), caller_of(request)
    found = await find_response(service, caller.tenant, response_id)
    if not found.asked.repeated["background"]:
        raise InvalidRequest(
            "only a response that was made with background: true can be cancelled: close its connection"
        )
    entry, asked_to_end = await service.control.cancel(caller, found.entry.request_id)
    if asked_to_end:
        entry = await service.lookups.wait(caller.tenant, entry.request_id, CANCELLED_S)
    return await _shown(service, caller.tenant, found.asked, entry)


@router.delete("/responses/{response_id}", summary="Delete a response that has ended")
async def delete_response(request: Request, response_id: str) -> Response:
    """It is erased as a request is. 409 while it runs: cancel it first."""
    service, caller = service_of(request), caller_of(request)
    found = await find_response(service, caller.tenant, response_id)
    await service.erase(caller, found.entry.request_id)
    return JSONResponse({"id": response_id, "object": "response.deleted", "deleted": True})


@router.get("/responses/{response_id}/input_items", summary="What a response was made of")
async def list_input_items(
    request: Request,
    response_id: str,
    after: After = None,
    limit: Limit = 20,
    order: Order = "desc",
    include: Include = None,
) -> dict[str, Any]:
    """Messages, calls and their outputs, as the model was given them, without the instructions."""
    service, tenant = service_of(request), caller_of(request).tenant
    found = await find_response(service, tenant, response_id)
    items = input_items(await whole_request(service, found.request), found.asked)
    if order == "desc":
        items.reverse()
    if after is not None:
        ids = [item["id"] for item in items]
        if after not in ids:
            raise InvalidRequest("after names no item of this response", param="after")
        items = items[ids.index(after) + 1 :]
    return first_page(items, limit=limit)


async def _shown(service: GatewayService, tenant: str, asked: Asked, entry: Entry | None) -> Response:
    """The response as it is now. Raises NotFound when its outcome is kept no longer."""
    if entry is None or not entry.done:
        now = unfinished(asked, "accepted" if entry is None else entry.status_name)
        return await shaped(now, lambda now: now, {"x-request-id": asked.request_id})
    try:
        frame = (await service.lookups.find_whole(tenant, asked.request_id)).outcome_frame()
    except Gone as error:
        raise NotFound(error.message) from None
    await frame.ready()
    try:
        result = await whole_result(service, tenant, completed(frame, WORDS))
    except FinalFailure as failure:
        error = failure.error
        return await shaped({}, lambda _: ended_otherwise(asked, error), {"x-request-id": asked.request_id})
    return await shaped(result, lambda result: response(asked, result), {"x-request-id": asked.request_id})


def _followed(service: GatewayService, tenant: str, asked: Asked, after: int | None = None) -> Response:
    """The events of a response behind the number `after`, to its outcome. A client that leaves cancels nothing."""
    resumed = after is not None and after >= FIRST_DELTA
    frames = service.subscriptions.replay(tenant, asked.request_id, resumed=resumed)
    writer = BackgroundWriter(asked, after)

    async def whole(result: Json) -> Json:
        return await whole_result(service, tenant, result)

    events = background_events(frames, writer, whole)
    return AnswerStream(events, asked.request_id, failure=writer.broken, abandoned=frames.close, close=frames.close)
