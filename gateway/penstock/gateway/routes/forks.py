"""Forks of conversations: another continuation from any message, for edits and new answers."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import APIRouter, Request

from penstock.gateway.context import context_of, service_of
from penstock.gateway.conversations.lineage import About
from penstock.gateway.conversations.trees import Branch
from penstock.gateway.limits.callers import caller_of
from penstock.gateway.routes.conversations import (
    IdempotencyKey,
    about_new,
    claim_key,
    conversation_about,
    conversation_json,
    new_id,
    read_conversation,
)
from penstock.gateway.routes.item_ids import offset_of
from penstock.gateway.routes.multipart import read_json
from penstock.gateway.routes.paging import After, Limit, Order, page, read_part
from penstock.gateway.service.submitting import key_reused
from penstock.schemas.errors import Conflict, InvalidRequest, UnsupportedParameter
from penstock.schemas.ids import check_conversation_id
from penstock.schemas.records import ConversationFacts

router = APIRouter(prefix="/v1/conversations", tags=["conversations"])


@router.post(
    "/{conversation_id}/fork", status_code=201, summary="A conversation that goes on from a message of this one"
)
async def fork(request: Request, conversation_id: str, idempotency_key: IdempotencyKey = None) -> dict[str, Any]:
    """Body: {"through": …, "id": …}. `through` is an item or its offset: the last message that both have, a question
    without its answer too. `id` is that of the fork; repeated with the same body, the call makes no second one. Nor
    does it without an `id`, with the same `Idempotency-Key`.

    Nothing is copied. What is erased here is gone in the fork. The fork outlives this conversation.
    """
    body: Any = await read_json(request)
    if not isinstance(body, dict):
        raise InvalidRequest("the body must be a JSON object")
    for name in body:
        if name not in ("through", "id"):
            raise UnsupportedParameter(f"{name[:100]} is not supported", param=name[:100])
    through = through_of(body.get("through"))
    given = body.get("id")
    caller, service = caller_of(request), service_of(request)
    fork_id = new_id(caller.tenant, idempotency_key) if given is None else check_conversation_id(given)
    allowances, parent_id = context_of(request).allowances, check_conversation_id(conversation_id)
    allowances.check_conversation(caller, fork_id)
    claimed = partial(claim_key, request, idempotency_key, {**body, "fork_of": parent_id})
    try:
        made_of = await service.forking.fork(caller.tenant, parent_id, through, fork_id, claimed)
    except Conflict as error:
        if given is None and idempotency_key is not None and error.param == "id":  # the id follows from the key
            raise key_reused() from error
        raise
    allowances.tenants.conversation_began(caller.tenant, fork_id, time.time())
    about = await about_new(request, fork_id)
    facts = await service.conversation_facts.of(caller.tenant, fork_id, about.topic_id, newest=False)
    return conversation_about(request, fork_id, replace(about, forked_from=made_of), facts)


def through_of(given: Any) -> int:
    """The offset that an item's id or a number stands for. Raises InvalidRequest."""
    if isinstance(given, str):
        return offset_of(given, "through")
    if type(given) is not int or given < 0:
        raise InvalidRequest("through must be the id of an item, or an offset", param="through")
    return given


@router.get("/{conversation_id}/forks", summary="The conversations that go on from a message of this one")
async def list_forks(
    request: Request, conversation_id: str, after: After = None, limit: Limit = 20, order: Order = "asc"
) -> dict[str, Any]:
    """By id. A fork through a message that this one inherited is a fork of the conversation that holds it."""
    service = service_of(request)

    async def read(after: str | None, limit: int, newest_first: bool) -> list[tuple[str, About]]:
        forks = service.conversations.forks
        return await read_conversation(request, forks, conversation_id, limit, after=after, newest_first=newest_first)

    part = await read_part(read, lambda fork: fork[0], after, limit, order)
    facts = await service.conversation_facts.of_many(
        caller_of(request).tenant, {one: about.topic_id for one, about in part.items}
    )
    return part.page([conversation_about(request, one, about, facts.get(one)) for one, about in part.items])


@router.get("/{conversation_id}/tree", summary="All conversations of the tree in which this one stands")
async def tree(request: Request, conversation_id: str) -> dict[str, Any]:
    """The conversation that is no fork, and all that go on from it, each before those that go on from it.

    `depth` says how many others one goes on from, `messages` how many it adds to what it inherits. A deleted one is
    there while others go on from it.
    """
    service, tenant = service_of(request), caller_of(request).tenant
    found = await read_conversation(request, service.conversations.tree, conversation_id)
    threads = service.threads.conversations
    active = await threads.run_for(tenant, service.conversations.trees.newest_ms, found)
    facts = await service.conversation_facts.of_many(
        tenant, {one.conversation_id: one.topic_id for one in found if not one.is_deleted}
    )
    shown = [_branch_json(one, facts.get(one.conversation_id), active.get(one.conversation_id)) for one in found]
    return page(shown, has_more=False)


def _branch_json(branch: Branch, facts: ConversationFacts | None, last_active_ms: int | None) -> dict[str, Any]:
    name = branch.conversation_id
    return {
        **conversation_json(name, branch.created_ms, facts, last_active_ms, branch.forked_from),
        "depth": branch.depth,
        "messages": branch.messages,
        "deleted": branch.is_deleted,
    }
