"""Conversations over HTTP in OpenAI's shapes: create, change, retrieve, list, delete; and the replay of the records."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any, Concatenate, ParamSpec, TypeVar

from fastapi import APIRouter, Header, Query, Request

from penstock.common.clock import now_ms
from penstock.common.conversations import ConversationRecord
from penstock.gateway.context import context_of, service_of
from penstock.gateway.conversations.lineage import About
from penstock.gateway.limits.callers import caller_of
from penstock.gateway.limits.retention import last_active_ms
from penstock.gateway.routes.conversation_answers import ConversationChange, NewConversation
from penstock.gateway.routes.multipart import BodyRoute
from penstock.gateway.routes.paging import After, Limit, Order, read_part
from penstock.gateway.service.submitting import keyed_id
from penstock.schemas.errors import BrokerUnavailable, NotFound
from penstock.schemas.ids import check_conversation_id
from penstock.schemas.records import ConversationFacts, ConversationFork, SummarizePolicy
from penstock.schemas.times import rfc3339

router = APIRouter(prefix="/v1/conversations", tags=["conversations"], route_class=BodyRoute)

P = ParamSpec("P")
T = TypeVar("T")

IdempotencyKey = Annotated[str | None, Header(alias="Idempotency-Key")]
REPLAY_RECORDS = 1_000
KNOWN_WITHIN_S = 10.0


def conversation_json(
    conversation_id: str,
    created_ms: int | None = None,
    facts: ConversationFacts | None = None,
    last_active_ms: int | None = None,
    forked_from: ConversationFork | None = None,
    expires_ms: int | None = None,
) -> dict[str, Any]:
    """OpenAI's shape: times in seconds since the epoch; `created_at` is null where only the topic itself could tell."""
    policy = None if facts is None else facts.summarize
    made = {
        "object": "conversation",
        "id": conversation_id,
        "created_at": _seconds(created_ms),
        "title": None if facts is None else facts.title,
        "metadata": {} if facts is None else facts.metadata,
        "summarize": None if policy is None else policy.to_dict(),
        "last_active_at": _seconds(last_active_ms),
        "expires_at": _seconds(expires_ms),
    }
    if forked_from is None:
        return made
    return {
        **made,
        "forked_from": {"conversation_id": forked_from.conversation_id, "through": forked_from.through},
    }


def _seconds(time_ms: int | None) -> int | None:
    return None if time_ms is None else time_ms // 1000


def new_id(tenant: str, idempotency_key: str | None) -> str:
    """Of a conversation that its caller gives none: the same for a repeat. Raises InvalidRequest for a wrong key."""
    if idempotency_key is None:
        return f"conv_{uuid.uuid4().hex}"
    return f"conv_{keyed_id(tenant, 'conversation', idempotency_key).replace('-', '')}"


async def claim_key(request: Request, idempotency_key: str | None, content: dict[str, Any]) -> None:
    """Claim a key for one conversation: all that a call has in it. Raises as `Submitter.claim_key`."""
    if idempotency_key is not None:
        tenant = caller_of(request).tenant
        await service_of(request).submitting.claim_key(tenant, "conversation", idempotency_key, content)


async def create_conversation(
    request: Request, conversation_id: str, asked: NewConversation, idempotency_key: str | None
) -> dict[str, Any]:
    """Make the topic of a conversation, unless it is there.

    Raises TenantLimit, InsufficientCapacity, and as `claim_key`.
    """
    caller, service, allowances = caller_of(request), service_of(request), context_of(request).allowances
    allowances.check_conversation(caller, conversation_id)
    await claim_key(request, idempotency_key, asked.model_dump(exclude_unset=True))
    await service.forking.create(caller.tenant, conversation_id)
    allowances.tenants.conversation_began(caller.tenant, conversation_id, time.time())
    about = await about_new(request, conversation_id)
    facts = await _changed(request, conversation_id, about.topic_id, asked)
    return conversation_about(request, conversation_id, replace(about, created_ms=about.created_ms or now_ms()), facts)


async def about_new(request: Request, conversation_id: str) -> About:
    """Of one that was made just now. A broker may hear of its topic later than the one that has made it."""
    give_up = time.monotonic() + KNOWN_WITHIN_S
    while True:
        try:
            return await read_conversation(request, service_of(request).conversations.about, conversation_id)
        except NotFound as error:
            if time.monotonic() > give_up:
                raise BrokerUnavailable(
                    f"conversation {conversation_id} was made, and not all brokers know it yet", retry_after_s=1
                ) from error
        await asyncio.sleep(0.05)


@router.post("/{conversation_id}", summary="Change a conversation's title, metadata or policy of summaries")
async def update(request: Request, conversation_id: str, body: ConversationChange) -> dict[str, Any]:
    about = await read_conversation(request, service_of(request).conversations.about, conversation_id)
    facts = await _changed(request, conversation_id, about.topic_id, body)
    return conversation_about(request, conversation_id, about, facts)


def conversation_about(
    request: Request, conversation_id: str, about: About, facts: ConversationFacts | None
) -> dict[str, Any]:
    """A conversation as callers see it."""
    expires_ms = _expires_ms(request, about.last_active_ms, facts)
    return conversation_json(
        conversation_id, about.created_ms, facts, about.last_active_ms, about.forked_from, expires_ms
    )


def _expires_ms(request: Request, record_ms: int | None, facts: ConversationFacts | None) -> int | None:
    """When it is deleted if nobody touches it before."""
    changed_ms = facts.updated_at if facts is not None and facts.updated_at else None
    return service_of(request).retention.expires_ms(caller_of(request).tenant, last_active_ms(record_ms, changed_ms))


async def _changed(
    request: Request, conversation_id: str, topic_id: str, change: ConversationChange
) -> ConversationFacts:
    """The facts with what the caller named of them changed. Raises NotFound when it is deleted, BrokerUnavailable."""
    tenant, service = caller_of(request).tenant, service_of(request)
    kept, named = service.conversation_facts, change.model_fields_set & {"title", "metadata", "summarize"}
    if not named:
        return await kept.of(tenant, conversation_id, topic_id, newest=False)
    async with kept.changing(tenant, conversation_id):
        facts = await kept.of(tenant, conversation_id, topic_id)
        policy = None if change.summarize is None else SummarizePolicy(**change.summarize.model_dump())
        given: dict[str, Any] = {"title": change.title, "metadata": change.metadata or {}, "summarize": policy}
        facts = replace(facts, updated_at=now_ms(), topic_id=topic_id, **{name: given[name] for name in named})
        await kept.put(facts)
        try:  # a deletion takes away what stands there when the conversation is gone
            await read_conversation(request, service.conversations.about, conversation_id)
        except NotFound:
            await kept.take_away(tenant, conversation_id)
            raise
    return facts


@router.get("", summary="The caller's conversations")
async def list_conversations(
    request: Request, after: After = None, limit: Limit = 20, order: Order = "asc"
) -> dict[str, Any]:
    caller = caller_of(request)
    service = service_of(request)
    threads = service.threads.conversations
    known = await threads.run_for(caller.tenant, service.layout.ids, caller.tenant)

    async def read(after: str | None, limit: int, newest_first: bool) -> list[str]:
        ids = sorted(known, reverse=newest_first)
        if after is not None:  # by comparison: the one that it names may have been deleted meanwhile
            ids = [one for one in ids if (one < after if newest_first else one > after)]
        chosen: list[str] = []
        while ids and len(chosen) < limit:
            some, ids = ids[:limit], ids[limit:]
            deleted = await threads.run_for(caller.tenant, service.conversations.deleted, caller.tenant, some)
            chosen += [one for one in some if one not in deleted]
        return chosen[:limit]

    part = await read_part(read, str, after, limit, order)
    chosen = list(part.items)
    facts = await service.conversation_facts.of_some(caller.tenant, chosen)
    topics = {service.kafka.names.conversation(caller.tenant, one): one for one in chosen}
    newest = await threads.run_for(caller.tenant, service.layout.newest_times, list(topics))
    active = {topics[topic]: time_ms for topic, time_ms in newest.items()}
    shown = [
        conversation_json(
            one,
            None,
            facts.get(one),
            active.get(one),
            expires_ms=_expires_ms(request, active.get(one), facts.get(one)),
        )
        for one in chosen
    ]
    return part.page(shown)


@router.get("/{conversation_id}", summary="One conversation")
async def retrieve(request: Request, conversation_id: str) -> dict[str, Any]:
    service = service_of(request)
    about = await read_conversation(request, service.conversations.about, conversation_id)
    tenant, kept = caller_of(request).tenant, service.conversation_facts
    facts = await kept.of(tenant, conversation_id, about.topic_id, newest=False)
    return conversation_about(request, conversation_id, about, facts)


@router.delete("/{conversation_id}", summary="Delete a conversation with all its turns")
async def delete(request: Request, conversation_id: str) -> dict[str, Any]:
    """Its turns that wait or run end as cancelled. A turn that is sent after the answer begins it anew, empty.

    Its forks keep what they inherited.
    """
    await service_of(request).deleting.delete(caller_of(request).tenant, check_conversation_id(conversation_id))
    return {"object": "conversation.deleted", "id": conversation_id, "deleted": True}


@router.get("/{conversation_id}/replay", summary="Every record of the conversation, with its offset")
async def replay(
    request: Request,
    conversation_id: str,
    from_offset: Annotated[int, Query(ge=0)] = 0,
    after: Annotated[
        str | None,
        Query(pattern=r"^\d{1,18}@\d{1,18}$", description="The `last_id` of the page before, which carries the end."),
    ] = None,
    limit: Annotated[int, Query(ge=1, le=REPLAY_RECORDS)] = REPLAY_RECORDS,
) -> dict[str, Any]:
    """Also what does not count (a later epoch's repeat): for audits. Go on with `after` = `last_id` while
    `has_more`: it carries the end that the conversation had at the first page.

    A fork begins with the records that it inherited.
    Of what was erased only the place is shown, also while the log still has it.
    """
    conversations = service_of(request).conversations
    if after is None:
        end_offset = await read_conversation(request, conversations.end, conversation_id)
    else:
        last, end_offset = map(int, after.split("@"))
        from_offset = last + 1
    records = await read_conversation(
        request, conversations.records, conversation_id, limit + 1, from_offset=from_offset, end=end_offset
    )
    chosen = records[:limit]
    return {
        "object": "list",
        "data": [_record_json(record) for record in chosen],
        "has_more": len(records) > limit,
        "first_id": str(chosen[0].offset) if chosen else None,
        "last_id": f"{chosen[-1].offset}@{end_offset}" if chosen else None,
        "next_offset": chosen[-1].offset + 1 if chosen else from_offset,
        "end_offset": end_offset,
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
