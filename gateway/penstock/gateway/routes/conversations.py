"""Conversations over HTTP in OpenAI's shapes: create, retrieve, list, delete, items; and the replay of the records."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Annotated, Any, Concatenate, ParamSpec, TypeVar

from fastapi import APIRouter, Query, Request

from penstock.common import admin
from penstock.common.conversations import ConversationRecord
from penstock.common.settings import KafkaSettings
from penstock.gateway.context import context_of, service_of
from penstock.gateway.limits.callers import caller_of
from penstock.gateway.routes.paging import After, Limit, Order, first_page
from penstock.gateway.settings import GatewaySettings
from penstock.schemas.errors import (
    BrokerUnavailable,
    InsufficientCapacity,
    NotFound,
    PenstockError,
)
from penstock.schemas.ids import check_conversation_id
from penstock.schemas.times import rfc3339

logger = logging.getLogger(__name__)
router = APIRouter(prefix="/v1/conversations", tags=["conversations"])

P = ParamSpec("P")
T = TypeVar("T")

REPLAY_RECORDS = 1_000
GONE_S = 10.0
"""A broker knows of a topic's deletion some milliseconds after it."""


def conversation_json(conversation_id: str, created_ms: int | None = None) -> dict[str, Any]:
    """OpenAI's shape: `created_at` in seconds since the epoch; null where only the topic itself could tell."""
    created_at = None if created_ms is None else created_ms // 1000
    return {"object": "conversation", "id": conversation_id, "created_at": created_at, "metadata": {}}


async def create_conversation(request: Request, conversation_id: str) -> dict[str, Any]:
    """Make the topic of a conversation, unless it is there. Raises TenantLimit, InsufficientCapacity."""
    caller, service, allowances = caller_of(request), service_of(request), context_of(request).allowances
    allowances.check_conversation(caller, conversation_id)
    threads = service.threads.conversations
    await threads.run_for(caller.tenant, _create, service.settings, caller.tenant, conversation_id)
    allowances.tenants.conversation_began(caller.tenant, conversation_id, time.time())
    return conversation_json(conversation_id, time.time_ns() // 1_000_000)


def _create(settings: GatewaySettings, tenant: str, conversation_id: str) -> None:
    kafka, limit = settings.kafka_settings(), settings.conversations.max_topics
    topic = kafka.names.conversation(tenant, conversation_id)
    if admin.topic_id(kafka, topic) is None:
        count = admin.count_conversations(kafka)
        if count >= limit:
            raise InsufficientCapacity(
                f"there are {count} conversations; {limit} are allowed",
                details={"need": count + 1, "capacity": limit},
            )
        admin.create_conversation_topic(kafka, topic, durability=settings.topics.durability)


@router.get("", summary="The caller's conversations")
async def list_conversations(
    request: Request, after: After = None, limit: Limit = 20, order: Order = "asc"
) -> dict[str, Any]:
    caller = caller_of(request)
    service = service_of(request)
    kafka = service.kafka
    topics = await service.threads.conversations.run_for(caller.tenant, admin.partition_counts, kafka)
    parsed = (kafka.names.parse_conversation(topic) for topic in topics)
    ids = sorted((found[1] for found in parsed if found and found[0] == caller.tenant), reverse=order == "desc")
    if after is not None:  # by comparison: the one that it names may have been deleted meanwhile
        ids = [one for one in ids if (one < after if order == "desc" else one > after)]
    return first_page([conversation_json(one) for one in ids], limit=limit)


@router.get("/{conversation_id}", summary="One conversation")
async def retrieve(request: Request, conversation_id: str) -> dict[str, Any]:
    conversations = service_of(request).conversations
    created_ms = await read_conversation(request, conversations.created_ms, conversation_id)
    return conversation_json(conversation_id, created_ms)


@router.delete("/{conversation_id}", summary="Delete a conversation with all its turns")
async def delete(request: Request, conversation_id: str) -> dict[str, Any]:
    """Its turns that wait or run end as cancelled. A turn that is sent after the answer begins it anew, empty."""
    caller = caller_of(request)
    service = service_of(request)
    kafka, threads, control = service.kafka, service.threads.conversations, service.control
    topic = kafka.names.conversation(caller.tenant, check_conversation_id(conversation_id))
    exists = await threads.run_for(caller.tenant, admin.topic_id, kafka, topic) is not None
    if not exists and not await control.has_turns(caller.tenant, conversation_id):
        raise NotFound("there is no such conversation")
    # The command comes first: a worker that sees that the topic is gone can know of the deletion.
    await control.end_turns(caller.tenant, conversation_id)
    await threads.run_for(caller.tenant, _remove, kafka, topic)
    service.feeds.wake(caller.tenant, conversation_id)
    context_of(request).allowances.tenants.conversation_gone(caller.tenant, conversation_id)
    await _release_artifacts(request, caller.tenant, conversation_id)
    return {"object": "conversation.deleted", "id": conversation_id, "deleted": True}


def _remove(kafka: KafkaSettings, topic: str) -> None:
    """Delete the topic and wait until a broker says that it is gone: the next turn must not find it."""
    topic_id = admin.topic_id(kafka, topic)
    admin.delete_topic(kafka, topic)
    give_up = time.monotonic() + GONE_S
    while topic_id is not None and admin.topic_id(kafka, topic) == topic_id:
        if time.monotonic() > give_up:
            raise BrokerUnavailable(f"{topic} is still there; delete the conversation again", retry_after_s=1)
        time.sleep(0.01)


async def _release_artifacts(request: Request, tenant: str, conversation_id: str) -> None:
    """What its turns referred to is held no more, what they made goes. The conversation is gone in any case: the
    sweeper comes after."""
    service = service_of(request)
    try:
        await service.stored(tenant, lambda store: store.conversation_gone(tenant, conversation_id))
    except PenstockError as error:
        logger.warning("conversation.artifacts_still_held error=%s", error.code)


@router.get("/{conversation_id}/replay", summary="Every record of the topic, with its offset")
async def replay(
    request: Request,
    conversation_id: str,
    from_offset: Annotated[int, Query(ge=0)] = 0,
    limit: Annotated[int, Query(ge=1, le=REPLAY_RECORDS)] = REPLAY_RECORDS,
) -> dict[str, Any]:
    """Also what does not count (a later epoch's repeat): for audits. Go on with `from_offset` = `next_offset`.

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
