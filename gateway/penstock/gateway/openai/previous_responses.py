"""Earlier answers in the input of /v1/responses: `previous_response_id`, and references to single items.

Nothing is shared: each response has all that it was made of in its own request. So several can continue one. The id of
an item holds the id of its request: any gateway finds it on the log.
"""

from __future__ import annotations

import re

from penstock.gateway.edge.errors import FinalFailure
from penstock.gateway.limits.callers import Caller
from penstock.gateway.openai.exchange import completed
from penstock.gateway.openai.found_responses import Found, find_response
from penstock.gateway.openai.responses_answers import Json, items_of
from penstock.gateway.openai.responses_bodies import ResponsesBody
from penstock.gateway.openai.stored_responses import input_items
from penstock.gateway.service.large_answers import whole_request, whole_result
from penstock.gateway.service.service import GatewayService
from penstock.schemas.errors import Conflict, Gone, InvalidRequest, NotFound, TooLarge

MOST_ANSWERS = 200
"""Earlier answers that one input refers to."""
_ITEM_ID = re.compile(r"(?:msg_([A-Za-z0-9_.-]{1,200})|fc_([A-Za-z0-9_.-]{1,200})_[0-9]+)")
_THOUGHTS = "rs_"
"""Items of thoughts begin so; no answer here has any."""
PARAM = "previous_response_id"


async def put_items_in(body: ResponsesBody, service: GatewayService, caller: Caller) -> None:
    """Replace the references of the input. Raises NotFound with their place in `param`, and as `Lookups.find_whole`."""
    if not isinstance(body.input, list):
        return
    answers: dict[str, list[Json]] = {}
    for number, item in enumerate(body.input):
        if not is_reference(item):
            continue
        item_id, where = str(item.get("id")), f"input[{number}].id"
        if item_id.startswith(_THOUGHTS):
            body.input[number] = {"type": "reasoning"}
            continue
        named = _ITEM_ID.fullmatch(item_id)
        missing = NotFound(f"there is no item {item_id[:100]}, or no longer", param=where)
        if named is None:
            raise missing
        request_id: str = named[1] or named[2]
        if request_id not in answers:
            if len(answers) == MOST_ANSWERS:
                raise TooLarge(f"input refers to more than {MOST_ANSWERS} answers", param=where)
            answers[request_id] = await _items(service, caller, request_id, missing)
        found = next((one for one in answers[request_id] if one["id"] == item_id), None)
        if found is None:
            raise missing
        body.input[number] = found


def is_reference(item: Json) -> bool:
    """OpenAI's clients may leave its type out."""
    return item.get("type") == "item_reference" or (item.get("type") is None and item.keys() <= {"type", "id"})


async def _items(service: GatewayService, caller: Caller, request_id: str, missing: NotFound) -> list[Json]:
    """The items of an answer. Raises `missing` for a request without an answer, unknown and foreign ones alike."""
    try:
        entry = await service.lookups.find_whole(caller.tenant, request_id)
    except (NotFound, Gone):
        raise missing from None
    if entry.task != "text_generation" or not entry.done or not caller.reaches(entry):
        raise missing
    try:
        frame = entry.result_frame()
        await frame.ready()
        result = completed(frame)
    except FinalFailure:
        raise missing from None
    return items_of(request_id, await whole_result(service, caller.tenant, result))


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
