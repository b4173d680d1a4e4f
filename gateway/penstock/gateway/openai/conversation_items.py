"""The items of a conversation in OpenAI's shapes: its messages as they are listed, and items that callers append.

An item that is appended is a turn without an answer: it goes through the conversation's line, in order with turns.
"""

from __future__ import annotations

from typing import Any, cast

from fastapi import APIRouter, Request

from penstock.common.conversations import Turn
from penstock.gateway.context import context_of, service_of
from penstock.gateway.edge.disconnects import unless_gone
from penstock.gateway.edge.validation import validated
from penstock.gateway.limits.callers import caller_of
from penstock.gateway.openai.chat_bodies import in_openai_words
from penstock.gateway.openai.exchange import completed
from penstock.gateway.openai.nested_fields import item_names
from penstock.gateway.openai.other_fields import set_aside_within
from penstock.gateway.openai.responses_bodies import in_item_places, item_messages
from penstock.gateway.routes.conversation_answers import NewConversation
from penstock.gateway.routes.conversations import IdempotencyKey, create_conversation, new_id, read_conversation
from penstock.gateway.routes.item_ids import offset_of
from penstock.gateway.routes.multipart import read_json
from penstock.gateway.routes.native import native_request
from penstock.gateway.routes.paging import After, Include, Limit, Order, first_page, number, read_part
from penstock.gateway.service.brought_images import take_images, with_inputs
from penstock.gateway.service.service import GatewayService
from penstock.gateway.service.submitting import Checked, Keep
from penstock.gateway.view.entries import Entry
from penstock.schemas.errors import InvalidRequest, NotFound, PenstockError, UnsupportedParameter
from penstock.schemas.finite_json import Flaw, loads_finite
from penstock.schemas.ids import check_conversation_id
from penstock.schemas.records import ArtifactRef

router = APIRouter(prefix="/v1/conversations", tags=["conversations"])

Json = dict[str, Any]

WAIT_S = 60.0
WORDS = {"payload.messages": "items"}


@router.post("", summary="Create a conversation")
async def create(request: Request, idempotency_key: IdempotencyKey = None) -> Json:
    """Body, all optional: {"id": …, "title": …, "metadata": …, "summarize": …, "items": […]}. Turns come with requests
    that name it; the first would create it as well. With `Idempotency-Key` a repeat means the same conversation, and
    appends nothing twice; with another body it is refused for an hour."""
    body = await read_json(request, history=False) if await request.body() else {}
    if not isinstance(body, dict):
        raise InvalidRequest("the body must be a JSON object")
    asked = validated(NewConversation, body)
    conversation_id = check_conversation_id(asked.id or new_id(caller_of(request).tenant, idempotency_key))
    items = await check_items(request, conversation_id, asked.items) if asked.items else None
    made = await create_conversation(request, conversation_id, asked, idempotency_key)
    if items is not None:
        await append_items(request, *items, idempotency_key)
    return made


@router.get("/{conversation_id}/items", summary="The messages that count, as items")
async def items(
    request: Request,
    conversation_id: str,
    after: After = None,
    limit: Limit = 20,
    order: Order = "desc",
    include: Include = None,
) -> Json:
    conversations = service_of(request).conversations

    async def read(after: str | None, limit: int, newest_first: bool) -> list[Turn]:
        behind = None if after is None else offset_of(after, "after")
        turns = conversations.turns
        return await read_conversation(request, turns, conversation_id, limit, after=behind, newest_first=newest_first)

    async def end_now() -> str:
        return number(await read_conversation(request, conversations.end, conversation_id) - 1)

    part = await read_part(read, lambda turn: number(turn.offset), after, limit, order, end_now=end_now)
    step = 1 if order == "asc" else -1
    return part.page([item for turn in part.items for item in items_of_turn(turn)[::step]])


@router.post("/{conversation_id}/items", summary="Append items")
async def create_items(
    request: Request, conversation_id: str, idempotency_key: IdempotencyKey = None, include: Include = None
) -> Json:
    """Body: {"items": […]}, messages, calls of tools and their answers. The answer has them as they stand there."""
    body = await read_json(request, history=False)
    if not isinstance(body, dict):
        raise InvalidRequest("the body must be a JSON object")
    for name in body:
        if name != "items":
            raise UnsupportedParameter(f"{name[:100]} is not supported", param=name[:100])
    checked, keep = await check_items(request, conversation_id, body.get("items"))
    made = await append_items(request, checked, keep, idempotency_key)
    return first_page(made, limit=len(made))


@router.get("/{conversation_id}/items/{item_id}", summary="One item")
async def retrieve_item(request: Request, conversation_id: str, item_id: str, include: Include = None) -> Json:
    offset = offset_of(item_id, "item_id")
    turns = await read_conversation(
        request, service_of(request).conversations.turns, conversation_id, 1, after=offset - 1
    )
    found = (item for turn in turns if turn.offset == offset for item in items_of_turn(turn) if item["id"] == item_id)
    if (item := next(found, None)) is None:
        raise NotFound("there is no such item", param="item_id")
    return item


async def check_items(request: Request, conversation_id: str, items: Any) -> tuple[Checked, Keep | None]:
    """The request that appends items. Raises InvalidRequest, and as `Submitter.check` and `check_room`."""
    if not isinstance(items, list) or not items:
        raise InvalidRequest("items must be a list of at least one item", param="items")
    for place, item in enumerate(items):
        _check_arguments(item, f"items[{place}].arguments")
    set_aside_within(items, item_names, "items", "refuse")
    caller, service = caller_of(request), service_of(request)
    messages, places = item_messages(items, "items")
    body = {
        "task": "conversation_items",
        "conversation_id": check_conversation_id(conversation_id),
        "payload": {"messages": messages},
    }
    try:
        images = take_images(body, caller.tenant)
        checked = await service.submitting.check(caller, native_request(body, caller))
    except PenstockError as error:
        raise in_item_places(in_openai_words(error, words=WORDS), "items", places) from error
    checked, keep = with_inputs(checked, images, context_of(request).allowances, service)
    service.submitting.check_room(checked)
    return checked, keep


def _check_arguments(item: Any, param: str) -> None:
    """What is kept is read by each later turn, so it must be what the model's template expects."""
    if not isinstance(item, dict) or cast("Json", item).get("type") != "function_call":
        return
    try:
        given = loads_finite(item["arguments"])
    except Flaw as flaw:
        raise flaw.refusal(param, param) from None
    except (ValueError, TypeError, KeyError, AttributeError):
        given = None
    if not isinstance(given, dict):
        raise InvalidRequest(f"{param} must be the JSON text of an object", param=param)


async def append_items(
    request: Request, checked: Checked, keep: Keep | None, idempotency_key: str | None
) -> list[Json]:
    """Append items and wait until they stand in the log. Raises FinalFailure, and as `submit`."""
    service, tenant = service_of(request), checked.request.tenant
    conversation_id = checked.request.conversation_id or ""
    accepted = await service.submitting.submit(
        checked, idempotency_key=idempotency_key, traceparent=request.headers.get("traceparent"), keep=keep
    )
    entry = await unless_gone(request.receive, _outcome(service, tenant, accepted.request_id))
    frame = entry.result_frame()
    await frame.ready()
    offsets: list[int] = completed(frame, WORDS)["offsets"]
    turns = await read_conversation(
        request, service.conversations.turns, conversation_id, offsets[-1] - offsets[0] + 1, after=offsets[0] - 1
    )
    return [item for turn in turns if turn.offset in offsets for item in items_of_turn(turn)]


async def _outcome(service: GatewayService, tenant: str, request_id: str) -> Entry:
    while not (await service.lookups.wait(tenant, request_id, WAIT_S)).done:
        pass
    return await service.lookups.find_whole(tenant, request_id)  # of a repeat it may be on its topic alone


def items_of_turn(turn: Turn) -> list[Json]:
    """A message as OpenAI's items: the text, then each call of a tool. The ids tell where it stands in the topic."""
    message, offset = turn.message, turn.offset
    common = {
        "object": "conversation.item",
        "status": "completed",
        "created_at": message.created_at // 1000,
        "request_id": message.request_id,
        "offset": offset,
    }
    if message.role == "tool":
        output = {"type": "function_call_output", "id": f"fco_{offset}", "call_id": message.tool_call_id}
        return [{**common, **output, "output": message.content}]
    calls = [
        {
            **common,
            "type": "function_call",
            "id": f"fc_{offset}_{number}",
            "call_id": call["id"],
            "name": call["function"]["name"],
            "arguments": call["function"]["arguments"],
        }
        for number, call in enumerate(message.tool_calls or ())
    ]
    if calls and not message.content:
        return calls
    kind = "output_text" if message.role == "assistant" else "input_text"
    text: Json = {"type": kind, "text": message.content}
    if kind == "output_text":
        text |= {"annotations": []}
    content = [text]
    if message.artifacts:
        content = [*map(_image_json, message.artifacts), *(content if message.content else ())]
    said = {**common, "type": "message", "id": f"msg_{offset}", "role": message.role, "content": content}
    return [said, *calls]


def _image_json(artifact: ArtifactRef) -> Json:
    """An image of a message of either role: OpenAI's protocol has one type for it."""
    return {
        "type": "input_image",
        "image_url": f"/v1/artifacts/{artifact.artifact_id}/content",
        "detail": "auto",
        "artifact_id": artifact.artifact_id,
        "media_type": artifact.media_type,
    }
