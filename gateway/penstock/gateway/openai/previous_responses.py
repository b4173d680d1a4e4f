"""`previous_response_id` of /v1/responses: the input goes on behind what that response was made of, and its answer.

Nothing is shared: each response has all that it was made of in its own request. So several can go on from one.
"""

from __future__ import annotations

from penstock.gateway.edge.errors import FinalFailure
from penstock.gateway.limits.callers import Caller
from penstock.gateway.openai.exchange import completed
from penstock.gateway.openai.found_responses import Found, find_response
from penstock.gateway.openai.responses_answers import Json, items_of
from penstock.gateway.openai.responses_bodies import ResponsesBody
from penstock.gateway.openai.stored_responses import input_items
from penstock.gateway.service.large_answers import whole_request, whole_result
from penstock.gateway.service.service import GatewayService
from penstock.schemas.errors import Conflict, Gone, InvalidRequest, NotFound

PARAM = "previous_response_id"


async def put_previous_in(body: ResponsesBody, service: GatewayService, caller: Caller) -> None:
    """Put its items in front of the input; its instructions are left out, as OpenAI does.

    Raises NotFound without such a response that the caller reaches, Conflict when it has not completed, InvalidRequest
    when it or the body names a conversation.
    """
    if body.previous_response_id is None:
        return
    if body.conversation is not None:
        raise InvalidRequest("previous_response_id does not go with a conversation", param=PARAM)
    try:
        found = await find_response(service, caller.tenant, body.previous_response_id)
        caller.check_reaches(found.entry)
    except NotFound as error:
        raise NotFound(error.message, param=PARAM) from None
    if (conversation := found.request.conversation_id) is not None:
        raise InvalidRequest(
            f"that response is a turn of conversation {conversation}: name that, or fork it", param=PARAM
        )
    answer = await _answer(service, caller.tenant, found)
    earlier = input_items(await whole_request(service, found.request), found.asked)
    own = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
    body.go_on_behind([*earlier, *answer], own)


async def _answer(service: GatewayService, tenant: str, found: Found) -> list[Json]:
    request_id = found.asked.request_id
    if not found.entry.done:
        raise Conflict("the previous response has not ended yet", param=PARAM)
    try:
        frame = (await service.lookups.find_whole(tenant, request_id)).outcome_frame()
        await frame.ready()
        return items_of(request_id, await whole_result(service, tenant, completed(frame)))
    except Gone as error:
        raise NotFound(error.message, param=PARAM) from None
    except FinalFailure as failure:
        reason = failure.error.code
        raise Conflict(
            f"the previous response did not complete ({reason}): go on from the one before", param=PARAM
        ) from None
