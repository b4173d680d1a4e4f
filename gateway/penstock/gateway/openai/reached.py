"""Whether the ticket of a narrowed caller reaches the request, response, conversation or artifact that a path names."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from penstock.gateway.context import GatewayContext
from penstock.gateway.limits.callers import Caller
from penstock.gateway.openai.stored_responses import request_id_of
from penstock.gateway.service.reached_artifacts import check_artifact


def reach_check(context: GatewayContext) -> Callable[[Caller, str], Awaitable[None]]:
    """For the edge. The check raises NotFound or Forbidden for what is not reached."""

    async def check(caller: Caller, path: str) -> None:
        kind, name = path.split("/")[2:4]
        if kind == "conversations":
            caller.check_conversation(name)
            return
        if kind == "artifacts":
            await check_artifact(context.service, caller, name)
            return
        request_id = request_id_of(name) if kind == "responses" else name
        caller.check_reaches(await context.service.lookups.find(caller.tenant, request_id))

    return check
