"""References to items of earlier answers in the input of /v1/responses: each is replaced by the item itself.

An item's id holds the id of its request, so the outcome on the log is all that is needed, at any gateway.
"""

from __future__ import annotations

import re
from typing import Any

from penstock.gateway.edge.errors import FinalFailure
from penstock.gateway.limits.callers import Caller
from penstock.gateway.openai.exchange import completed
from penstock.gateway.openai.responses_answers import items_of
from penstock.gateway.openai.responses_bodies import ResponsesBody
from penstock.gateway.service.large_answers import whole_result
from penstock.gateway.service.service import GatewayService
from penstock.schemas.errors import Gone, NotFound, TooLarge

Json = dict[str, Any]

MOST_ANSWERS = 200
"""Earlier answers that one input refers to."""
_ITEM_ID = re.compile(r"(?:msg_([A-Za-z0-9_.-]{1,200})|fc_([A-Za-z0-9_.-]{1,200})_[0-9]+)")
_THOUGHTS = "rs_"
"""Items of thoughts begin so; no answer here has any."""


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
