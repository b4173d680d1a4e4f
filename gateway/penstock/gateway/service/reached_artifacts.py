"""Which artifacts the ticket of a narrowed caller reaches."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress

from penstock.common.artifacts import Artifact, ArtifactStore
from penstock.common.artifacts.digests import missing
from penstock.gateway.limits.callers import Caller, Grant
from penstock.gateway.service.lookups import PEEKED_AT_ONCE
from penstock.gateway.service.service import GatewayService
from penstock.schemas.errors import NotFound, Overloaded


async def check_artifact(service: GatewayService, caller: Caller, artifact_id: str) -> None:
    """Outputs and inputs of requests within the ticket, images of its conversation, and uploads with such a ticket.

    Raises NotFound for anything else, as for an artifact of another tenant.
    """

    def look(store: ArtifactStore) -> tuple[Artifact, list[str], list[str]]:
        artifact = store.describe(caller.tenant, artifact_id)
        named = caller.tenant, artifact_id
        return artifact, store.request_holds.of(*named), store.holds.of(*named)

    artifact, inputs_of, held_by = await service.stored(caller.tenant, look)
    upload = Grant(
        scopes=frozenset(), conversation_id=artifact.uploader_conversation_id, user_id=artifact.uploader_user_id
    )
    if caller.reaches(upload) or any(map(caller.reaches_conversation, held_by)):
        return
    made_by = [] if artifact.request_id is None else [artifact.request_id]
    if not await _reaches_any(service, caller, [*made_by, *inputs_of]):
        raise missing(artifact_id)


async def _reaches_any(service: GatewayService, caller: Caller, request_ids: Iterable[str]) -> bool:
    with suppress(Overloaded):
        await service.lookups.catch_up()
    for number, request_id in enumerate(request_ids, start=1):
        entry = service.lookups.peek(caller.tenant, request_id)
        if entry is not None and not entry.erased and caller.reaches(entry):
            return True
        if number % PEEKED_AT_ONCE == 0:
            await asyncio.sleep(0)  # others have their turn on the loop
    service.lookups.check_whole()
    return False


async def check_references(service: GatewayService, caller: Caller, references: dict[str, str]) -> None:
    """`references`: the artifacts that a request names, and where. Raises as `check_artifact`."""
    for artifact_id, param in references.items():
        try:
            await check_artifact(service, caller, artifact_id)
        except NotFound as error:
            raise NotFound(error.message, param=param) from None
