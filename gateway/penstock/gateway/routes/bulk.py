"""Many native requests in one call: a line for each in, a line for each out."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from typing import Annotated, Any

from fastapi import APIRouter, Header, Request
from starlette.responses import Response, StreamingResponse

from penstock.gateway.context import context_of, service_of
from penstock.gateway.edge.errors import EdgeRefusal
from penstock.gateway.limits.callers import caller_of
from penstock.gateway.routes.line_reader import Line, LineReader
from penstock.gateway.routes.native import submission
from penstock.gateway.routes.window import Window
from penstock.gateway.service.brought_images import with_inputs
from penstock.schemas.aliases import naming
from penstock.schemas.errors import InternalError, InvalidRequest, PenstockError, TenantLimit, TooLarge, error_body
from penstock.schemas.finite_json import read_body

logger = logging.getLogger(__name__)

router = APIRouter(prefix="/v1", tags=["requests"])

MEDIA_TYPE = "application/x-ndjson"
MAX_LINES = 50_000
AT_ONCE = 100
"""Lines that are on their way to the broker at once."""
AT_ONCE_BYTES = 16 * 2**20
"""What they have together; a single one may have more."""
ANSWERED_AT_ONCE = 1_000


@router.post("/requests/bulk", summary="Submit many requests: NDJSON in, NDJSON out")
async def submit_bulk(
    request: Request, idempotency_key: Annotated[str | None, Header(alias="Idempotency-Key")] = None
) -> Response:
    """Each line is the body of `POST /v1/requests`, and may have an `idempotency_key`. Answers `{index, request_id}` or
    `{index, error}` for each, in the order of the lines. With `Idempotency-Key` a line without a key of its own gets
    `{key}/{index}`: the same call again finds the same requests.
    """
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind != MEDIA_TYPE:
        raise InvalidRequest(f"send one request a line, as {MEDIA_TYPE}")
    bulk = _Bulk(request, idempotency_key)
    try:
        async with asyncio.TaskGroup() as group:
            await bulk.begin_all(group)
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    if bulk.refusal is not None:  # not as a stream, which would listen for the client behind a body that has not ended
        bulk.tell(bulk.refusal)
        return Response(b"".join(bulk.answers), media_type=MEDIA_TYPE)
    if not bulk.answers:
        raise InvalidRequest("the body has no lines")
    # Most clients read nothing before they have sent all: an answer that began earlier could hold both up.
    return StreamingResponse(bulk.content(), media_type=MEDIA_TYPE)


class _Bulk:
    """One call. `answers` are the encoded lines, by index."""

    def __init__(self, request: Request, key: str | None) -> None:
        self._request = request
        self._key = key
        self._window = Window(lambda: AT_ONCE, most_bytes=AT_ONCE_BYTES)
        self.answers: list[bytes] = []
        self.refusal: PenstockError | None = None
        """Why the lines that follow are not taken."""

    async def begin_all(self, group: asyncio.TaskGroup) -> None:
        """Raises EdgeRefusal for a body that ends before its first line does."""
        reader = LineReader(context_of(self._request).settings.gateway.max_body_bytes)
        try:
            async for piece in self._request.stream():
                for line in reader.feed(piece):
                    await self._begin(group, line)
        except EdgeRefusal as refused:  # the caller has to hear the ids of the lines that were taken
            if not self.answers:
                raise
            self.refusal = self.refusal or refused.error
            return
        for line in reader.close():
            await self._begin(group, line)

    async def _begin(self, group: asyncio.TaskGroup, line: Line) -> None:
        """Waits for a place, so that what is in memory is bounded. Lines too many are read away."""
        index = len(self.answers)
        if index >= MAX_LINES:
            text = f"more than {MAX_LINES} lines; those before were taken"
            self.refusal = TooLarge(text, details={"limit": MAX_LINES})
            return
        self.answers.append(b"")
        await self._window.take(len(line.content or b""))
        group.create_task(self._submit(index, line))

    async def _submit(self, index: int, line: Line) -> None:
        try:
            answer: dict[str, Any] = {"index": index, "request_id": await self._accepted(index, line)}
        except PenstockError as error:
            answer = {"index": index, **error_body(error, None)}
        except Exception:  # the other lines have to be answered
            logger.exception("bulk.line_failed index=%d", index)
            answer = {"index": index, **error_body(InternalError("the line could not be taken"), None)}
        finally:
            self._window.give(len(line.content or b""))
        self.answers[index] = _encoded(answer)

    async def _accepted(self, index: int, line: Line) -> str:
        """Raises as a single submission does; the rate of submissions is waited for."""
        caller, service = caller_of(self._request), service_of(self._request)
        allowances = context_of(self._request).allowances
        if line.content is None:
            raise TooLarge("the line is longer than the body of a request may be")
        body = read_body(line.content, "the line")
        if not isinstance(body, dict):
            raise InvalidRequest("the line must be a JSON object")
        key = body.pop("idempotency_key", None)
        if key is not None and not isinstance(key, str):
            raise InvalidRequest("idempotency_key must be a text", param="idempotency_key")
        if key is None and self._key is not None:
            key = f"{self._key}/{index}"
        asked, images, given = submission(body, caller)
        with naming(given):
            checked = await service.submitting.check(caller, asked)
        while True:
            try:
                allowances.submission(caller)
                break
            except TenantLimit as error:
                await asyncio.sleep(error.retry_after_s or 1)
        checked, keep = with_inputs(checked, images, allowances, service)
        accepted = await service.submitting.submit(
            checked,
            idempotency_key=key,
            traceparent=self._request.headers.get("traceparent"),
            keep=keep,
        )
        return accepted.request_id

    def tell(self, refusal: PenstockError) -> None:
        """As the last answer, with the index of the first line that was not taken."""
        self.answers.append(_encoded({"index": len(self.answers), **error_body(refusal, None)}))

    def content(self) -> Iterator[bytes]:
        for at in range(0, len(self.answers), ANSWERED_AT_ONCE):
            yield b"".join(self.answers[at : at + ANSWERED_AT_ONCE])


def _encoded(answer: dict[str, Any]) -> bytes:
    return json.dumps(answer, separators=(",", ":")).encode() + b"\n"
