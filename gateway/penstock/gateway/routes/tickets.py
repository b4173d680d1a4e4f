"""`POST /v1/tickets`: a ticket for a browser that cannot send headers on a WebSocket."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter, Request

from penstock.gateway.context import context_of
from penstock.gateway.edge.tickets import TICKET_TTL_S
from penstock.gateway.limits.callers import caller_of

router = APIRouter(tags=["auth"])


@router.post("/v1/tickets", summary="A 60-second ticket for one WebSocket")
async def create_ticket(request: Request) -> dict[str, Any]:
    """Connect with `/v1/ws?ticket=…`; the ticket has the rights of the key that asked and works once per gateway."""
    ticket, expires_at = context_of(request).tickets.issue(caller_of(request))
    stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(expires_at))
    return {"object": "ticket", "ticket": ticket, "expires_in": TICKET_TTL_S, "expires_at": stamp}
