"""`POST /v1/tickets`: a ticket for a page, which must not hold a key and sends no headers with sockets and events."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict, Field
from starlette.datastructures import Headers

from penstock.gateway.context import context_of
from penstock.gateway.edge.auth import SESSION_COOKIE, same_place
from penstock.gateway.edge.rules import Scope
from penstock.gateway.edge.tickets import TTL_S
from penstock.gateway.edge.validation import validated
from penstock.gateway.limits.callers import caller_of
from penstock.gateway.routes.multipart import read_json
from penstock.schemas.errors import Forbidden, InvalidRequest
from penstock.schemas.ids import check_conversation_id
from penstock.schemas.times import rfc3339

router = APIRouter(tags=["auth"])


class NewTicket(BaseModel):
    """Each field narrows: a ticket never has more than the key that asks for it."""

    model_config = ConfigDict(extra="forbid")

    use: Annotated[
        Literal["socket", "read", "session"],
        Field(
            description="`socket` opens one WebSocket, once at each gateway. `read` reads one request or conversation,"
            " and `session` stands for the key on any route, both as often as wanted."
        ),
    ] = "socket"
    scopes: Annotated[
        list[Scope] | None,
        Field(min_length=1, description="By default those of the key; for `read` only `read`."),
    ] = None
    request_id: Annotated[str | None, Field(min_length=1, max_length=255, description="The only request.")] = None
    conversation_id: Annotated[str | int | None, Field(description="Requests of this conversation only.")] = None
    user_id: Annotated[
        str | None, Field(min_length=1, max_length=255, description="Requests with this `user_id` only.")
    ] = None
    ttl_s: Annotated[
        float | None,
        Field(ge=1, description="Seconds: 60 by default and 600 at most for `socket`, an hour and a day for others."),
    ] = None


@router.post("/v1/tickets", summary="A ticket for a page: for a WebSocket, for reading one thing, or for a session")
async def create_ticket(request: Request, response: Response) -> dict[str, Any]:
    """Use it as `?ticket=…` on `/v1/ws` (`socket`, `session`), and on the routes of one request or conversation that
    read (`read`, `session`). A session also works as `Authorization: Bearer …`; a page of the gateway's own Origin
    gets it as a cookie too.
    """
    asked = validated(NewTicket, await read_json(request) if await request.body() else {})
    caller = caller_of(request)
    if caller.grant is not None:
        raise Forbidden("a ticket makes no tickets: ask with a key")
    scopes = _scopes(asked)
    for scope in scopes or ():
        caller.require(scope)
    most_s = TTL_S[asked.use][1]
    if asked.ttl_s is not None and asked.ttl_s > most_s:
        raise InvalidRequest(f"ttl_s of use {asked.use} must be at most {most_s:.0f}", param="ttl_s")
    conversation_id = None if asked.conversation_id is None else check_conversation_id(asked.conversation_id)
    if asked.use == "read" and asked.request_id is None and conversation_id is None:
        raise InvalidRequest("a ticket of use read needs a request_id or a conversation_id", param="request_id")
    narrowed = {"request_id": asked.request_id, "conversation_id": conversation_id, "user_id": asked.user_id}
    office = context_of(request).tickets
    ticket, expires_at = office.issue(caller, use=asked.use, scopes=scopes, ttl_s=asked.ttl_s, **narrowed)
    expires_in = round(expires_at - office.clock())
    if asked.use == "session" and _of_own_page(request.headers):
        secure = request.url.scheme == "https"
        response.set_cookie(
            SESSION_COOKIE, ticket, expires_in, path="/v1", secure=secure, httponly=True, samesite="strict"
        )
    return {
        "object": "ticket",
        "ticket": ticket,
        "use": asked.use,
        "scopes": sorted(caller.scopes if scopes is None else scopes),
        **narrowed,
        "expires_in": expires_in,
        "expires_at": rfc3339(int(expires_at * 1000)),
    }


@router.delete("/v1/tickets/session", summary="Log a page out: the cookie of its session goes")
async def end_session(response: Response) -> dict[str, Any]:
    """A session that was copied elsewhere is good until it expires or its key is revoked."""
    response.delete_cookie(SESSION_COOKIE, path="/v1", httponly=True, samesite="strict")
    return {"object": "ticket.deleted", "use": "session"}


def _of_own_page(headers: Headers) -> bool:
    """Whether a page of the gateway's own Origin asks.

    Browsers send no Sec-Fetch-Site over plain http, except to loopback.
    """
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    if site is not None:
        return site == "same-origin"
    return origin is not None and same_place(origin, headers.get("host", ""))


def _scopes(asked: NewTicket) -> list[Scope] | None:
    """Raises InvalidRequest."""
    if asked.use != "read":
        return asked.scopes
    if asked.scopes not in (None, ["read"]):
        raise InvalidRequest("a ticket of use read has the scope read alone", param="scopes")
    return ["read"]
