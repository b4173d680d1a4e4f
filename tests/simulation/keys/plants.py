"""Known defects of claims, as small patches. Each must be found."""

# pyright: reportPrivateUsage=false, reportUnknownLambdaType=false

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from penstock.common.outgoing import claim_record
from penstock.gateway.service.submitting import Submitter
from penstock.gateway.view.claims import Claims
from penstock.schemas.records import KeyClaim


async def claims_nothing(*_: Any) -> None:
    return None


async def does_not_read_its_claim(self: Submitter, tenant: str, claimed_id: str, content: str, _: Any) -> str | None:
    """Whatever was read until its claim is acknowledged decides."""
    claim = KeyClaim(request_id=claimed_id, tenant=tenant, content=content, created_at=1)
    await self._send(claim_record(claim, self._names, self._codec, source="planted"))
    first = self._view.claims.content((tenant, claimed_id))
    return None if first in (None, claim.content) else first


def takes_the_newest(self: Claims, claim: KeyClaim, append_time_ms: int) -> None:
    self._first[(claim.tenant, claim.request_id)] = (claim.content, append_time_ms)


PLANTS: dict[str, tuple[list[tuple[Any, str, Any]], str]] = {
    "claims_nothing": ([(Submitter, "_claim", claims_nothing)], "two_bodies"),
    "does_not_read_its_claim": ([(Submitter, "_claim", does_not_read_its_claim)], "two_bodies"),
    "takes_the_newest_claim": ([(Claims, "take", takes_the_newest)], "two_bodies"),
    "answers_for_another_body": (
        [(Submitter, "_check_same", staticmethod(lambda content, request: None))],
        "other_body",
    ),
}
"""The patches, and the promise that does not hold then."""


@contextmanager
def planted(name: str | None) -> Generator[None]:
    with ExitStack() as stack:
        for where, attribute, value in PLANTS[name][0] if name else []:
            stack.enter_context(patch.object(where, attribute, value))
        yield
