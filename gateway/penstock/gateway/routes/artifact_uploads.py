"""An upload on its way into the store: its bytes count against the tenant's limit from the moment they are expected."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Annotated

from fastapi import Depends, Request

from penstock.gateway.context import context_of, service_of
from penstock.gateway.edge.bodies import declared_length
from penstock.gateway.limits.callers import Caller, caller_of
from penstock.schemas.errors import InvalidRequest


async def transfers(request: Request) -> AsyncGenerator[Callable[[], None]]:
    """A function that takes a slot, until the answer is sent. It raises TenantLimit, Overloaded."""
    with ExitStack() as held:

        def open_transfer() -> None:
            held.callback(context_of(request).allowances.open_transfer(caller_of(request)))

        yield open_transfer


async def transfer(open_transfer: Annotated[Callable[[], None], Depends(transfers)]) -> None:
    """A slot until the answer is sent. Raises TenantLimit, Overloaded."""
    open_transfer()


async def check_room(request: Request, caller: Caller, more_bytes: int) -> None:
    """As of now, up to the next await. Raises TenantLimit."""
    allowances = context_of(request).allowances
    if allowances.limits_artifacts(caller):
        service, tenant = service_of(request), caller.tenant
        used = await allowances.artifacts.used(
            tenant, lambda: service.stored(tenant, lambda store: store.used_bytes(tenant))
        )
        allowances.artifact_room(caller, used, more_bytes)


class Upload:
    """The body of one upload. What it takes stays counted unless an exception ends it."""

    def __init__(self, request: Request, caller: Caller) -> None:
        self._request = request
        self._caller = caller
        self._counted = ExitStack()

    async def __aenter__(self) -> Upload:
        self._counted.__enter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._counted.__exit__(kind, error, trace)

    async def pieces(self) -> AsyncGenerator[bytes]:
        """The bytes as they come. Raises InvalidRequest when there are none, TenantLimit when there is no more room."""
        expected = declared_length(self._request.scope) or 0
        await self._take(expected)
        came = 0
        body: AsyncIterator[bytes] = self._request.stream()
        async for piece in body:
            if not piece:
                continue
            came += len(piece)
            if came > expected:  # nothing was declared
                await self._take(came - expected)
                expected = came
            yield piece
        if not came:
            raise InvalidRequest("the body is empty: send the artifact's bytes")

    async def _take(self, more_bytes: int) -> None:
        if more_bytes:
            await check_room(self._request, self._caller, more_bytes)
            adding = context_of(self._request).allowances.artifacts.adding(self._caller.tenant, more_bytes)
            self._counted.enter_context(adding)
