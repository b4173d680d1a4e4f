"""Bodies of requests: JSON, or multipart with the JSON in a part `request` and files that it names beside it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from typing import Any

from fastapi.routing import APIRoute
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from penstock.gateway.context import context_of
from penstock.gateway.edge.bodies import is_multipart, too_large
from penstock.gateway.edge.errors import EdgeRefusal
from penstock.gateway.limits.callers import caller_of
from penstock.schemas.errors import InvalidRequest
from penstock.schemas.finite_json import read_body

MAX_FILES = 64
MAX_FIELDS = 64
REQUEST_PART = "request"


async def read_json(request: Request, *, history: bool = True) -> Any:
    """The body as JSON. Raises as `read_body`."""
    return read_body(await request.body(), history=history)


class BodyRoute(APIRoute):
    """A route whose body the framework reads, by the one reader of all bodies."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(_BodyRequest(request.scope, request.receive))

        return handle


class _BodyRequest(Request):
    async def json(self) -> Any:
        """Raises EdgeRefusal with InvalidRequest."""
        try:
            return await read_json(self)
        except InvalidRequest as error:
            raise EdgeRefusal(error) from None


@asynccontextmanager
async def form_of(request: Request) -> AsyncGenerator[FormData]:
    """The parts of a multipart body, its files on the disk if they are large; one of the transfers at a time.

    Raises InvalidRequest, TenantLimit, Overloaded.
    """
    give_back = context_of(request).allowances.open_transfer(caller_of(request))
    try:
        try:
            form = await request.form(max_files=MAX_FILES, max_fields=MAX_FIELDS)
        except EdgeRefusal:
            raise
        except HTTPException as error:  # as starlette says that a body is malformed
            raise InvalidRequest(f"the multipart body cannot be read: {error.detail}"[:300]) from error
        try:
            yield form
        finally:
            await form.close()
    finally:
        give_back()


@asynccontextmanager
async def submitted_body(request: Request) -> AsyncGenerator[tuple[Any, Mapping[str, bytes] | None]]:
    """(the JSON of a request, the files beside it by the names of their parts; None if the body is JSON alone).

    Raises InvalidRequest, TooLarge, TenantLimit, Overloaded.
    """
    if not is_multipart(request.scope):
        yield await read_json(request), None
        return
    async with form_of(request) as form:
        body: bytes | None = None
        files: dict[str, bytes] = {}
        for name, part in form.multi_items():
            if name == REQUEST_PART:
                body = await _part(part, context_of(request).settings.gateway.max_body_bytes)
            elif name in files:
                raise InvalidRequest(f"the part {name[:100]} is there twice", param=name[:100])
            else:
                files[name] = await _part(part)
        if body is None:
            raise InvalidRequest("a multipart body needs a part `request`, the request as JSON", param=REQUEST_PART)
        yield read_body(body, f"the part `{REQUEST_PART}`", whole=REQUEST_PART), files


async def _part(part: UploadFile | str, most_bytes: int | None = None) -> bytes:
    """What a part holds. Raises TooLarge, before it is read: JSON is parsed on the event loop."""
    content = part.encode() if isinstance(part, str) else b""
    size = len(content) if isinstance(part, str) else part.size or 0
    if most_bytes is not None and size > most_bytes:
        raise too_large(most_bytes, f"the part `{REQUEST_PART}`")
    return content if isinstance(part, str) else await part.read()
