"""Stored responses, found by their ids at any gateway."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.gateway.openai.responses_answers import Asked
from penstock.gateway.openai.stored_responses import asked_of, request_id_of
from penstock.gateway.service.service import GatewayService
from penstock.gateway.view.entries import Entry
from penstock.schemas.errors import Gone, NotFound
from penstock.schemas.records import InferenceRequest


@dataclass(frozen=True, slots=True)
class Found:
    """A stored response: its request as the view has it, the request's record, and what of it is repeated."""

    entry: Entry
    request: InferenceRequest
    asked: Asked


async def find_response(service: GatewayService, tenant: str, response_id: str) -> Found:
    """Raises NotFound for one that is unknown, foreign, not stored, deleted or too old; as `RequestRecords.of`."""
    request_id = request_id_of(response_id)
    try:
        entry = await service.lookups.find(tenant, request_id)
        if entry.first_record is None:  # the broker did not say where it stands; its topic does
            await service.lookups.catch_up()
            entry = await service.lookups.find(tenant, request_id)
        request = await service.records.of(entry)
    except NotFound:
        raise NotFound("there is no such response") from None
    except Gone as error:
        raise NotFound(f"{error.message}: there is no such response") from None
    return Found(entry, request, asked_of(request, entry.accepted_ms, entry.model))
