"""One line of a batch: its request is submitted, its outcome awaited, and its answer made as the endpoint makes it."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urljoin

from pydantic import ValidationError
from pydantic_core import PydanticSerializationError, to_json

from penstock.common.clock import now_ms
from penstock.gateway.batches.checking import parse_line
from penstock.gateway.batches.records import NOT_RUN, Batch, Counts, Stop
from penstock.gateway.edge.errors import FinalFailure, invalid_from_validation
from penstock.gateway.limits.allowances import Allowances
from penstock.gateway.limits.callers import Caller
from penstock.gateway.openai import endpoints
from penstock.gateway.openai.chat_bodies import in_openai_words
from penstock.gateway.openai.endpoints import Endpoint, Made
from penstock.gateway.openai.exchange import outcome
from penstock.gateway.openai.large_answers import is_large, whole_result
from penstock.gateway.routes.line_reader import Line
from penstock.gateway.service.brought_images import BroughtImage, keeper_of
from penstock.gateway.service.service import GatewayService
from penstock.gateway.service.subscriptions import Stopping
from penstock.gateway.view.outputs import on_output_thread
from penstock.schemas.errors import (
    Cancelled,
    Expired,
    IdempotencyKeyReused,
    InternalError,
    InvalidRequest,
    PenstockError,
    UnsupportedParameter,
    error_body,
)
from penstock.schemas.ids import idempotent_request_id
from penstock.schemas.records import InferenceRequest

logger = logging.getLogger(__name__)

Json = dict[str, Any]

ENDPOINTS: dict[str, Endpoint] = {
    "/v1/chat/completions": endpoints.CHAT,
    "/v1/completions": endpoints.COMPLETION,
    "/v1/embeddings": endpoints.EMBEDDING,
    "/v1/responses": endpoints.RESPONSE,
    "/v1/images/generations": endpoints.IMAGE,
}
LOW_PRIORITY = 8
REFUSED_AT_ONCE = 50
"""Lines that ask again at once, of those that were refused for now."""
LARGE_AT_ONCE = 4
"""Answers with images or large outputs that are in memory at once."""
RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class LineEnd:
    """What a line adds to a file: to that of answers if it completed, else to that of errors."""

    completed: bool
    content: bytes
    counts: Counts


class LineRuns:
    """The lines of one batch."""

    def __init__(
        self,
        batch: Batch,
        service: GatewayService,
        allowances: Allowances,
        caller: Callable[[], Caller],
        stop: Callable[[], Stop | None],
        *,
        resumed: bool,
    ) -> None:
        """`stop`: why no more lines are submitted. `resumed`: somebody may have submitted some already."""
        self._resumed = resumed
        self._batch = batch
        self._endpoint = ENDPOINTS[batch.endpoint]
        self._service = service
        self._allowances = allowances
        self._caller = caller
        self._stop = stop
        self._refused = asyncio.Semaphore(REFUSED_AT_ONCE)
        self._large = asyncio.Semaphore(LARGE_AT_ONCE)
        self.refusal: PenstockError | None = None
        """Why lines cannot be submitted now."""
        self.flying: dict[str, None] = {}
        """Requests that were submitted and have not ended, the oldest first."""

    async def run(self, line: Line) -> LineEnd:
        """Raises Stopping when the gateway stops."""
        asked = parse_line(line.content, self._batch.endpoint)
        request_id = idempotent_request_id(self._batch.tenant, self._batch.line_key(line.number))
        try:
            return await self._completed(asked, line.number, request_id)
        except _NotRun as stopped:
            return self._not_run(asked, request_id, stopped.stop)
        except FinalFailure as failure:
            error = failure.error
            stop = self._stop()
            if (isinstance(error, Cancelled) and stop in (Stop.CANCELLED, Stop.REVOKED)) or (
                isinstance(error, Expired) and now_ms() >= self._batch.expires_at * 1000
            ):
                return self._not_run(asked, request_id, stop or Stop.EXPIRED)
        except Stopping:
            raise
        except PenstockError as refused:
            error = refused
        except OSError:  # this machine's, not the line's
            raise
        except Exception:  # a line that failed its batch would fail it again whenever it is run
            logger.exception("batch.line_failed batch=%s line=%d", self._batch.batch_id, line.number)
            error = InternalError("the line could not be run")
        response = _response(error.http_status, request_id, error_body(error, request_id))
        return LineEnd(False, _encoded_error(asked, request_id, response, None), Counts(failed=1))

    async def _completed(self, asked: Json, number: int, request_id: str) -> LineEnd:
        """Raises FinalFailure, _NotRun, and PenstockError for a line that cannot be run."""
        known = self._resumed and self._service.lookups.peek(self._batch.tenant, request_id) is not None
        if not known and (stop := self._stop()) is not None:
            raise _NotRun(stop)
        await _next_step()
        body, request, images = self._request_of(asked.pop("body"), request_id)
        await _next_step()
        model = request.model or "default"
        if not known:
            await self._submit(request, images, self._batch.line_key(number))
        del request, images  # the answer needs neither, and may come hours later
        self.flying[request_id] = None
        try:
            result = await self._outcome(request_id)
        finally:
            self.flying.pop(request_id, None)
        made = Made(request_id, int(time.time()), model)
        await _next_step()
        content = await self._content(asked, body, made, result)
        return LineEnd(True, content, _counts(result.get("usage") or {}))

    def _request_of(self, given: Json, request_id: str) -> tuple[Any, InferenceRequest, Sequence[BroughtImage]]:
        """(the body, its request as low work, the images that it brings). Raises as the endpoint."""
        caller = self._caller()
        try:
            body = self._endpoint.body.model_validate(given)
        except ValidationError as error:
            raise invalid_from_validation(error) from None
        images = self._endpoint.images(body, caller)
        request = self._endpoint.ask(body, caller, now_ms())
        if request.stream:
            raise UnsupportedParameter("stream is not supported in a batch", param="stream")
        left_ms = max(1, self._batch.expires_at * 1000 - now_ms())
        ttl_ms = left_ms if request.ttl_ms is None else min(request.ttl_ms, left_ms)
        priority = max(request.priority, LOW_PRIORITY)
        return body, replace(request, request_id=request_id, priority=priority, ttl_ms=ttl_ms), images

    async def _submit(self, request: InferenceRequest, images: Sequence[BroughtImage], key: str) -> None:
        """Waits while it is refused for now. Raises _NotRun when the batch stops meanwhile, and what refuses it."""
        if await self._is_submitted(request, images, key, first=not self._resumed):
            return
        async with self._refused:
            while (stop := self._stop()) is None:
                refusal = self.refusal
                await asyncio.sleep((refusal and refusal.retry_after_s) or RETRY_S)
                if await self._is_submitted(request, images, key, first=False):
                    return
        raise _NotRun(stop)

    async def _is_submitted(
        self, request: InferenceRequest, images: Sequence[BroughtImage], key: str, *, first: bool
    ) -> bool:
        """False if it is refused for now."""
        submitting, caller = self._service.submitting, self._caller()
        try:
            checked = await submitting.check(caller, request)
            keep = keeper_of(images, caller, self._allowances, self._service)
            if first:
                await submitting.submit_first(checked, keep)
            else:
                await submitting.submit(checked, idempotency_key=key, keep=keep)
        except InvalidRequest as error:
            raise in_openai_words(error, words=self._endpoint.words) from None
        except IdempotencyKeyReused:  # the line as an earlier release read it: its outcome counts
            return True
        except PenstockError as error:
            if not is_for_now(error):
                raise
            self.refusal = error
            return False
        self.refusal = None
        return True

    async def _outcome(self, request_id: str) -> Json:
        """Raises FinalFailure, Stopping, Gone when the outcome was erased."""
        tenant = self._batch.tenant
        while True:
            frames = self._service.subscriptions.await_outcome(tenant, request_id)
            try:
                result = await outcome(frames, self._endpoint.words)
                if "artifact" not in result:
                    return result
                async with self._large:
                    return await whole_result(self._service, tenant, result)
            except Stopping:
                raise
            except PenstockError as error:
                if not is_for_now(error):
                    raise
                await asyncio.sleep(error.retry_after_s or RETRY_S)
            finally:
                frames.close()

    async def _content(self, asked: Json, body: Any, made: Made, result: Json) -> bytes:
        """The line of the file of answers."""

        def content(made: Made = made) -> bytes:
            answer = _response(200, made.request_id, self._endpoint.answer(body, made, result))
            return _encoded(_line(asked, made.request_id, answer, None))

        if self._endpoint is endpoints.IMAGE:
            made = replace(made, url_of=self._url_of)
            async with self._large:
                if body.response_format != "url":
                    images = await self._patient_images(result)
                    made = replace(made, images=images)
                return await on_output_thread(lambda: content(made))
        if is_large(result):
            async with self._large:
                return await on_output_thread(content)
        return content()

    def _url_of(self, image: Mapping[str, Any]) -> str:
        """Without a ticket, which would be over before the batch is: it needs a key."""
        return urljoin(self._batch.base_url, image["url"])

    async def _patient_images(self, result: Json) -> list[bytes]:
        while True:
            try:
                return await endpoints.image_contents(self._service, self._batch.tenant, result)
            except PenstockError as error:
                if not is_for_now(error):
                    raise
                await asyncio.sleep(error.retry_after_s or RETRY_S)

    def _not_run(self, asked: Json, request_id: str, stop: Stop) -> LineEnd:
        code, message = NOT_RUN[stop]
        content = _encoded_error(asked, request_id, None, {"code": code, "message": message})
        return LineEnd(False, content, Counts(failed=1))


async def _next_step() -> None:
    """Let the other lines do this step first: the processor's cache keeps its code, which saves a sixth of a line."""
    await asyncio.sleep(0)


class _NotRun(Exception):
    """The batch stopped before the line was submitted."""

    def __init__(self, stop: Stop) -> None:
        super().__init__(stop)
        self.stop = stop


def is_for_now(error: PenstockError) -> bool:
    """Whether the same may be asked again: a limit, a full gateway, a store or a broker that is away."""
    return error.retryable and error.http_status in (429, 503)


def _response(status: int, request_id: str, body: Json) -> Json:
    return {"status_code": status, "request_id": request_id, "body": body}


def _line(asked: Json, request_id: str, response: Json | None, error: Json | None) -> Json:
    return {
        "id": f"batch_req_{request_id.replace('-', '')}",
        "custom_id": asked["custom_id"],
        "response": response,
        "error": error,
    }


def _encoded(line: Json) -> bytes:
    """pydantic's encoder is the faster one, and takes neither deep nesting nor half a surrogate pair."""
    try:
        return to_json(line) + b"\n"
    except (PydanticSerializationError, ValueError):
        return json.dumps(line, separators=(",", ":")).encode() + b"\n"


def _encoded_error(asked: Json, request_id: str, response: Json | None, error: Json | None) -> bytes:
    # An error may name what the caller sent, half a surrogate pair too, which only JSON's escapes can carry.
    return json.dumps(_line(asked, request_id, response, error), separators=(",", ":")).encode() + b"\n"


def _counts(usage: Json) -> Counts:
    return Counts(
        completed=1,
        input_tokens=int(usage.get("prompt_tokens") or 0),
        cached_tokens=int(usage.get("cached_tokens") or 0),
        output_tokens=int(usage.get("completion_tokens") or 0),
    )
