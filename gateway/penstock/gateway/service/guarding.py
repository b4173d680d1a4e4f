"""The service as one caller may use it: submissions and cancels are held against its limits before they are done."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from penstock.gateway.limits.allowances import Allowances
from penstock.gateway.limits.callers import Caller
from penstock.gateway.service.models import find_model
from penstock.gateway.service.service import Controls, GatewayService, Submits
from penstock.gateway.service.submitting import Accepted
from penstock.gateway.view.entries import Entry
from penstock.schemas.errors import ModelNotFound
from penstock.schemas.records import InferenceRequest


def guarded(
    service: GatewayService, allowances: Allowances, caller: Caller, traceparent: str | None = None
) -> GatewayService:
    """The service with those parts guarded that write to the log; what is submitted belongs to the caller's trace."""
    return dataclasses.replace(
        service,
        submitting=GuardedSubmitter(service, allowances, caller, traceparent),
        control=GuardedControl(service.control, allowances, caller),
    )


class GuardedSubmitter:
    """`Submitter.submit` for one caller."""

    __slots__ = ("_allowances", "_caller", "_service", "_traceparent")

    def __init__(
        self, service: GatewayService, allowances: Allowances, caller: Caller, traceparent: str | None
    ) -> None:
        self._traceparent = traceparent
        self._service = service
        self._allowances = allowances
        self._caller = caller

    async def submit(
        self, request: InferenceRequest, *, idempotency_key: str | None = None, traceparent: str | None = None
    ) -> Accepted:
        """Raises Forbidden, TenantLimit and what `Facts.routed` raises, beside what the submitter raises."""
        request = self._service.facts.routed(request)
        self._allowances.check(self._caller, request, lambda: self._model(request))
        with self._allowances.outstanding(self._caller):
            return await self._submitter.submit(
                request, idempotency_key=idempotency_key, traceparent=traceparent or self._traceparent
            )

    async def check(self, request: InferenceRequest) -> None:
        """Refuse what `submit` would refuse now. Nothing is counted."""
        self._allowances.check(self._caller, request, lambda: self._model(request))
        with self._allowances.outstanding(self._caller):
            await self._submitter.check(request)

    @property
    def _submitter(self) -> Submits:
        return self._service.submitting

    def _model(self, request: InferenceRequest) -> str | None:
        """The id behind the request's model, where there is one."""
        try:
            return find_model(self._service.facts.models(), request.task, request.model, request.pool)
        except ModelNotFound:
            return None


class GuardedControl:
    """`Control` for one caller: what it cancels is counted.

    Erasing, deleting a conversation and the gateway's own cancels are not counted.
    """

    __slots__ = ("_allowances", "_caller", "_control")

    def __init__(self, control: Controls, allowances: Allowances, caller: Caller) -> None:
        self._control = control
        self._allowances = allowances
        self._caller = caller

    async def cancel(self, tenant: str, request_id: str, reason: str | None = None) -> tuple[Entry, bool]:
        """Raises TenantLimit beside what `Control.cancel` raises."""
        if reason is None:  # callers give none: a reason is the gateway's, for a client that went away
            self._allowances.cancel(self._caller)
        return await self._control.cancel(tenant, request_id, reason)

    async def cancel_ids(self, tenant: str, request_ids: Sequence[str]) -> list[str]:
        self._allowances.cancel(self._caller)
        return self._counted(await self._control.cancel_ids(tenant, request_ids))

    async def cancel_where(self, tenant: str, *, status: str | None, conversation_id: str | None) -> list[str]:
        self._allowances.cancel(self._caller)
        return self._counted(await self._control.cancel_where(tenant, status=status, conversation_id=conversation_id))

    async def erase(self, tenant: str, request_id: str) -> None:
        await self._control.erase(tenant, request_id)

    async def has_turns(self, tenant: str, conversation_id: str) -> bool:
        return await self._control.has_turns(tenant, conversation_id)

    async def end_turns(self, tenant: str, conversation_id: str) -> None:
        await self._control.end_turns(tenant, conversation_id)

    def _counted(self, cancelled: list[str]) -> list[str]:
        self._allowances.cancelled_more(self._caller, len(cancelled) - 1)
        return cancelled
