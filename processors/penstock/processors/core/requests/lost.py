"""A request whose record is gone from its topic: what is known of it from the command that asks for its end."""

from __future__ import annotations

from penstock.processors.core.requests.work import Body, Work, WorkKey
from penstock.schemas.records import ControlCommand, InferenceRequest, Origin
from penstock.schemas.tasks import takes_turn
from penstock.schemas.topics import conversation_key


def key_of_lost(command: ControlCommand) -> WorkKey | None:
    """Where the record stood: the owner of this partition ends the request. None when the command does not say."""
    place = command.place or command.origin
    return None if place is None else (place.topic, place.partition, place.offset)


def lost_work(command: ControlCommand, key: WorkKey, origin: Origin, *, epoch: int, seq: int, now: float) -> Work:
    """The request as work that can only end: its payload is unknown."""
    conversation_id = command.conversation_id
    request = InferenceRequest(
        request_id=command.request_id,
        tenant=command.tenant,
        task=command.task or "UNKNOWN",
        conversation_id=conversation_id,
        created_at=origin.append_time_ms,
    )
    line = None
    if conversation_id is not None and takes_turn(request.task):
        line = conversation_key(command.tenant, conversation_id)
    return Work(
        key=key,
        request_id=command.request_id,
        tenant=command.tenant,
        task=request.task,
        line=line,
        conversation_id=conversation_id,
        arrived_at=now,
        seq=seq,
        attempt=1,
        max_attempts=1,
        epoch=epoch,
        first_place=origin,
        body=Body(request, b"", (), None),
    )
