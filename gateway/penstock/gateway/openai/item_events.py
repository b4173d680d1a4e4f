"""A conversation as it goes on, as server-sent events: each item when it is appended, for all who take part."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request
from starlette.responses import StreamingResponse

from penstock.common.conversations import Turn
from penstock.common.shards.addresses import is_shared
from penstock.common.tasks import set_within
from penstock.gateway.context import service_of
from penstock.gateway.conversations.tails import TopicEnd
from penstock.gateway.edge.event_stream import KEEPALIVE, KEEPALIVE_S, server_sent
from penstock.gateway.limits.callers import caller_of
from penstock.gateway.openai.conversation_items import items_of_turn
from penstock.gateway.routes.conversations import read_conversation
from penstock.gateway.service.conversation_feeds import Ended, Feeds
from penstock.schemas.errors import InvalidCursor, NotFound, PenstockError

router = APIRouter(prefix="/v1/conversations", tags=["conversations"])


@dataclass(frozen=True, slots=True)
class Position:
    """What comes next: the message at `offset` or the first behind it, without its first `skipped` items."""

    offset: int
    skipped: int = 0

    @classmethod
    def after(cls, event_id: str, place: TopicEnd) -> Position:
        """Behind an event of the conversation that stands at `place`. Raises InvalidCursor.

        In the shared topic it may end before the event: compaction takes tombstones at its end away, and a gateway that
        read them has told of offsets behind those of one that reads anew. Records to come stand behind either.
        """
        found = re.fullmatch(r"(-1|\d{1,18})(?:\.(\d{1,4}))?", event_id)
        if found is None:
            raise InvalidCursor("after must be the id of an event, or -1 for the beginning", param="after")
        offset = int(found[1])
        if offset >= place.end and not is_shared(place.topic_id):
            text = f"the conversation ends before {offset}: it was deleted and made anew, or its log lost records"
            raise InvalidCursor(text, param="after")
        return cls(offset + 1) if found[2] is None else cls(offset, int(found[2]))

    @property
    def event_id(self) -> str:
        """The id of the event before."""
        return f"{self.offset}.{self.skipped}" if self.skipped else f"{self.offset - 1}"


@router.get("/{conversation_id}/events", summary="A conversation as it goes on, as server-sent events")
async def stream_items(
    request: Request,
    conversation_id: str,
    after: Annotated[
        str | None, Query(description="The id of an event, as Last-Event-ID; -1: from the beginning.")
    ] = None,
    last_event_id: Annotated[str | None, Header(alias="Last-Event-ID")] = None,
) -> StreamingResponse:
    """Each item that is appended, in the order of the log, from now on or behind an event. All who follow see the same
    order. The first event, `following`, has the id to resume at where no item has come yet. After `deleted` nothing
    comes.
    """
    tenant, service = caller_of(request).tenant, service_of(request)
    place = await read_conversation(request, service.conversations.place, conversation_id)
    event_id = last_event_id or after
    begin = Position(place.end) if event_id is None else Position.after(event_id, place)
    headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
    content = item_events(service.feeds, tenant, conversation_id, place, begin)
    return StreamingResponse(content, media_type="text/event-stream", headers=headers)


async def item_events(
    feeds: Feeds,
    tenant: str,
    conversation_id: str,
    place: TopicEnd,
    begin: Position,
    keepalive_s: float = KEEPALIVE_S,
) -> AsyncGenerator[bytes]:
    """The stream's bytes. A client that does not read is given nothing more, and holds nothing up."""
    yield _event("following", begin.event_id, conversation_id, log_id=place.topic_id)
    at = begin
    try:
        async with feeds.following(tenant, conversation_id, place) as feed:
            while True:
                changed = feed.changed
                if at.offset < feed.newest.end:
                    part = await feeds.part(feed, at.offset)
                    for turn in part.turns:
                        yield b"".join(_events_of(turn, conversation_id, at))
                    at = Position(part.end)
                elif feed.ended is not None:
                    if feed.ended is Ended.DELETED:
                        yield _event("deleted", None, conversation_id)
                    return
                else:
                    if not await set_within(changed, keepalive_s):
                        yield KEEPALIVE
    except NotFound:
        yield _event("deleted", None, conversation_id)
    except PenstockError:  # it comes again, and hears why
        return


def _events_of(turn: Turn, conversation_id: str, at: Position) -> Iterator[bytes]:
    """An event for each item of a message, but for those that were sent before."""
    items = items_of_turn(turn)
    for number, item in enumerate(items):
        if turn.offset == at.offset and number < at.skipped:
            continue
        is_last = number == len(items) - 1
        behind = Position(turn.offset + 1) if is_last else Position(turn.offset, number + 1)
        yield _event("item", behind.event_id, conversation_id, item=item)


def _event(kind: str, event_id: str | None, conversation_id: str, **more: Any) -> bytes:
    data = {"type": kind, "conversation_id": conversation_id, **more, "cursor": event_id}
    return server_sent(json.dumps(data, ensure_ascii=False, separators=(",", ":")), kind, event_id)
