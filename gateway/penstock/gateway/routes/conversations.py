"""Conversations over HTTP in OpenAI's shapes: create, retrieve, list, delete, items; and the replay of the records."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Annotated, Any, Concatenate, ParamSpec, TypeVar

from fastapi import APIRouter, Query, Request

from penstock.common import admin
from penstock.common.conversations import ConversationRecord
from penstock.gateway.context import context_of, service_of
from penstock.gateway.limits.callers import caller_of
from penstock.gateway.routes.paging import After, Limit, Order, first_page
from penstock.schemas.errors import NotFound
from penstock.schemas.ids import check_conversation_id
from penstock.schemas.records import ConversationFork
from penstock.schemas.times import rfc3339

router = APIRouter(prefix="/v1/conversations", tags=["conversations"])

P = ParamSpec("P")
T = TypeVar("T")

REPLAY_RECORDS = 1_000


def conversation_json(
    conversation_id: str, created_ms: int | None = None, forked_from: ConversationFork | None = None
) -> dict[str, Any]:
    """OpenAI's shape: `created_at` in seconds since the epoch; null where only the topic itself could tell."""
    created_at = None if created_ms is None else created_ms // 1000
    made = {"object": "conversation", "id": conversation_id, "created_at": created_at, "metadata": {}}
    if forked_from is None:
        return made
    return {
        **made,
        "forked_from": {"conversation_id": forked_from.conversation_id, "through": forked_from.through},
    }


async def create_conversation(request: Request, conversation_id: str) -> dict[str, Any]:
    """Make the topic of a conversation, unless it is there. Raises TenantLimit, InsufficientCapacity."""
    caller, service, allowances = caller_of(request), service_of(request), context_of(request).allowances
    allowances.check_conversation(caller, conversation_id)
    await service.forking.create(caller.tenant, conversation_id)
    allowances.tenants.conversation_began(caller.tenant, conversation_id, time.time())
    return conversation_json(conversation_id, time.time_ns() // 1_000_000)


@router.get("", summary="The caller's conversations")
async def list_conversations(
    request: Request, after: After = None, limit: Limit = 20, order: Order = "asc"
) -> dict[str, Any]:
    caller = caller_of(request)
    service = service_of(request)
    kafka = service.kafka
    threads = service.threads.conversations
    topics = await threads.run_for(caller.tenant, admin.partition_counts, kafka)
    parsed = (kafka.names.parse_conversation(topic) for topic in topics)
    ids = sorted((found[1] for found in parsed if found and found[0] == caller.tenant), reverse=order == "desc")
    if after is not None:  # by comparison: the one that it names may have been deleted meanwhile
        ids = [one for one in ids if (one < after if order == "desc" else one > after)]
    shown: list[str] = []
    while ids and len(shown) <= limit:
        some, ids = ids[: limit + 1], ids[limit + 1 :]
        deleted = await threads.run_for(caller.tenant, service.conversations.deleted, caller.tenant, some)
        shown += [one for one in some if one not in deleted]
    return first_page([conversation_json(one) for one in shown], limit=limit)


@router.get("/{conversation_id}", summary="One conversation")
async def retrieve(request: Request, conversation_id: str) -> dict[str, Any]:
    conversations = service_of(request).conversations
    about = await read_conversation(request, conversations.about, conversation_id)
    return conversation_json(conversation_id, about.created_ms, about.forked_from)


@router.delete("/{conversation_id}", summary="Delete a conversation with all its turns")
async def delete(request: Request, conversation_id: str) -> dict[str, Any]:
    """Its turns that wait or run end as cancelled. A turn that is sent after the answer begins it anew, empty.

    Its forks keep what they inherited.
    """
    caller = caller_of(request)
    service = service_of(request)
    control = service.control
    exists = await service.forking.exists(caller.tenant, check_conversation_id(conversation_id))
    if not exists and not await control.has_turns(caller.tenant, conversation_id):
        raise NotFound("there is no such conversation")
    # The command comes first: a worker that sees that the topic is gone can know of the deletion.
    await control.end_turns(caller.tenant, conversation_id)
    await service.forking.delete(caller.tenant, conversation_id)
    context_of(request).allowances.tenants.conversation_gone(caller.tenant, conversation_id)
    return {"object": "conversation.deleted", "id": conversation_id, "deleted": True}


@router.get("/{conversation_id}/replay", summary="Every record of the conversation, with its offset")
async def replay(
    request: Request,
    conversation_id: str,
    from_offset: Annotated[int, Query(ge=0)] = 0,
    limit: Annotated[int, Query(ge=1, le=REPLAY_RECORDS)] = REPLAY_RECORDS,
) -> dict[str, Any]:
    """Also what does not count (a later epoch's repeat): for audits. Go on with `from_offset` = `next_offset`.

    A fork begins with the records that it inherited.
    Of what was erased only the place is shown, also while the log still has it.
    """
    conversations = service_of(request).conversations
    records = await read_conversation(
        request, conversations.records, conversation_id, limit + 1, from_offset=from_offset
    )
    chosen = records[:limit]
    return {
        "object": "list",
        "data": [_record_json(record) for record in chosen],
        "has_more": len(records) > limit,
        "first_id": chosen[0].offset if chosen else None,
        "last_id": chosen[-1].offset if chosen else None,
        "next_offset": chosen[-1].offset + 1 if chosen else from_offset,
    }


def _record_json(record: ConversationRecord) -> dict[str, Any]:
    message = record.message
    told = None if message is None else {**message.to_dict(), "created_at": rfc3339(message.created_at)}
    return {"offset": record.offset, "key": record.key, "time": rfc3339(record.timestamp_ms), "message": told}


async def read_conversation(
    request: Request,
    read: Callable[Concatenate[str, str, P], T],
    conversation_id: str,
    *args: P.args,
    **options: P.kwargs,
) -> T:
    """What `read` finds in the caller's conversation of this id, on one of the tenant's threads.

    Raises NotFound for unknown and foreign alike: the topic's name is made from the caller's own tenant.
    """
    tenant, threads = caller_of(request).tenant, service_of(request).threads.conversations
    return await threads.run_for(tenant, read, tenant, check_conversation_id(conversation_id), *args, **options)
