"""The lines of a batch: requests are submitted, outcomes taken, and answers made as the endpoint makes them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urljoin

from pydantic_core import to_json

from penstock.common.clock import now_ms
from penstock.gateway.batches.checking import parse_line
from penstock.gateway.batches.records import NOT_RUN, Batch, Counts, Stop, batch_name
from penstock.gateway.edge.errors import FinalFailure
from penstock.gateway.edge.validation import validated
from penstock.gateway.limits.allowances import Allowances
from penstock.gateway.limits.callers import Caller
from penstock.gateway.openai import endpoints
from penstock.gateway.openai.chat_bodies import in_openai_words
from penstock.gateway.openai.endpoints import Endpoint, Made
from penstock.gateway.openai.exchange import completed
from penstock.gateway.routes.line_reader import Line
from penstock.gateway.service.brought_images import BroughtImage, with_inputs
from penstock.gateway.service.large_answers import is_large, whole_result
from penstock.gateway.service.service import GatewayService
from penstock.gateway.service.submitting import Checked
from penstock.gateway.service.subscriptions import Stopping
from penstock.gateway.view.frames import FailureFrame, Frame, ResultFrame
from penstock.gateway.view.outputs import on_output_thread
from penstock.schemas.errors import (
    Cancelled,
    Expired,
    InternalError,
    InvalidRequest,
    PenstockError,
    Unauthenticated,
    UnsupportedParameter,
    error_body,
)
from penstock.schemas.finite_json import checked_value
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
LARGE_AT_ONCE = 4
"""Answers with images or large outputs that are in memory at once."""
OUTCOMES_AT_ONCE = 50
"""Outcomes that are answered before others have their turn on the loop."""
RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class LineEnd:
    """What a line adds to a file: to that of answers if it completed, else to that of errors."""

    completed: bool
    content: bytes
    counts: Counts


OnEnd = Callable[[Line, LineEnd], None]


@dataclass(slots=True)
class _Run:
    """A line on its way to its end."""

    line: Line
    on_end: OnEnd
    asked: Json
    request_id: str
    body: Any = None
    model: str = ""
    request: InferenceRequest | None = None
    """Until it is submitted."""
    images: Sequence[BroughtImage] = ()


class LineRuns:
    """The lines of one batch: they are submitted in groups, and one subscription brings their outcomes."""

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
        self._asking_again = asyncio.Lock()
        self._large = asyncio.Semaphore(LARGE_AT_ONCE)
        self._outcomes = service.subscriptions.open(most_frames=service.settings.gateway.batch_lines)
        self.refusal: PenstockError | None = None
        """Why lines cannot be submitted now."""
        self.flying: dict[str, _Run] = {}
        """Requests that were submitted and have not ended, the oldest first."""

    def close(self) -> None:
        self._outcomes.close()

    # -- submitting

    async def submit(self, lines: Sequence[Line], on_end: OnEnd) -> None:
        """Submit them together, and again those that are refused for now; `on_end` hears of the end of each."""
        runs = [self._begun(line, on_end) for line in lines]
        # A step of all at once: the processor's cache keeps its code.
        for step in (self._check_stop, self._read, self._ask):
            runs = self._each(runs, step)
        runs = await self._submitted(runs, first=not self._resumed)
        if not runs:
            return
        async with self._asking_again:
            while runs:
                if (refusal := self.refusal) is not None:
                    await asyncio.sleep(refusal.retry_after_s or RETRY_S)
                runs = self._each(runs, self._check_stop)
                runs = await self._submitted(runs, first=False)

    def _begun(self, line: Line, on_end: OnEnd) -> _Run:
        asked = parse_line(line.content, self._batch.endpoint)
        return _Run(line, on_end, asked, idempotent_request_id(self._batch.tenant, self._batch.line_key(line.number)))

    def _check_stop(self, run: _Run) -> None:
        """Raises _NotRun for one that is still to be submitted."""
        if (stop := self._stop()) is not None and not (self._resumed and self._is_known(run)):
            raise _NotRun(stop)

    def _is_known(self, run: _Run) -> bool:
        return self._service.lookups.peek(self._batch.tenant, run.request_id) is not None

    def _read(self, run: _Run) -> None:
        """Its body, and the images that it brings. Raises as the endpoint."""
        run.body = validated(self._endpoint.body, checked_value(run.asked.pop("body"), "the body"))
        self._endpoint.set_aside(run.body, self._service.settings.gateway.unknown_fields)
        run.images = self._endpoint.images(run.body, self._caller())

    def _ask(self, run: _Run) -> None:
        """Its request, as low work. Raises as the endpoint."""
        request = self._endpoint.ask(run.body, self._caller(), now_ms())
        if request.stream:
            raise UnsupportedParameter("stream is not supported in a batch", param="stream")
        if getattr(run.body, "background", None):
            raise UnsupportedParameter("background is not supported in a batch", param="background")
        left_ms = max(1, self._batch.expires_at * 1000 - now_ms())
        ttl_ms = left_ms if request.ttl_ms is None else min(request.ttl_ms, left_ms)
        priority = max(request.priority, LOW_PRIORITY)
        run.request = replace(request, request_id=run.request_id, priority=priority, ttl_ms=ttl_ms)
        run.model = request.model or "default"

    async def _submitted(self, runs: list[_Run], *, first: bool) -> list[_Run]:
        """Submit them and follow them. Those that are refused for now; others that are refused have ended.

        `first`: nobody can have submitted them before.
        """
        if not first:
            try:
                await self._service.lookups.catch_up()
            except PenstockError as error:
                return [run for run in runs if self._may_ask_again(run, error)]
            known = [run for run in runs if self._is_known(run)]
            for run in known:
                self._follow(run)
            runs = [run for run in runs if run.request is not None]
        if any(run.images for run in runs):  # each waits for the store
            checked = await asyncio.gather(*map(self._checked, runs))
        else:
            checked = [await self._checked(run) for run in runs]
        refused = [(run, one) for run, one in zip(runs, checked, strict=True) if isinstance(one, Exception)]
        sent = [(run, one) for run, one in zip(runs, checked, strict=True) if isinstance(one, Checked)]
        refusals = await self._service.submitting.submit_together([one for _, one in sent], self._batch.batch_id)
        for (run, _), error in zip(sent, refusals, strict=True):
            if error is None:
                self.refusal = None
                self._follow(run)
            else:
                refused.append((run, error))
        return [run for run, error in refused if self._may_ask_again(run, error)]

    async def _checked(self, run: _Run) -> Checked | Exception:
        """What may be submitted, its images stored; or why not."""
        submitting, caller = self._service.submitting, self._caller()
        assert run.request is not None
        try:
            checked = await submitting.check(caller, run.request)
            checked, keep = with_inputs(checked, run.images, self._allowances, self._service)
            if keep is not None:  # only what will be sent is stored
                submitting.check_room(checked)
                await keep(run.request_id)
        except Exception as error:
            return error
        return checked

    def _may_ask_again(self, run: _Run, error: Exception) -> bool:
        """Whether it may be asked for again; if not, it has ended."""
        if isinstance(error, PenstockError) and is_for_now(error):
            self.refusal = error
            return True
        self._fail(
            run, in_openai_words(error, words=self._endpoint.words) if isinstance(error, InvalidRequest) else error
        )
        return False

    # -- outcomes

    async def follow(self) -> None:
        """Take outcomes until this is cancelled. Raises Stopping when the gateway stops."""
        async with asyncio.TaskGroup() as others:
            while True:
                for number, frame in enumerate(await self._outcomes.take_all(), 1):
                    self._on_frame(frame, others)
                    if not number % OUTCOMES_AT_ONCE:
                        await asyncio.sleep(0)

    def _follow(self, run: _Run) -> None:
        run.request, run.images = None, ()  # the answer needs neither, and may come hours later
        self.flying[run.request_id] = run
        try:
            self._service.subscriptions.follow_outcome(self._outcomes, self._batch.tenant, run.request_id)
        except PenstockError as error:  # erased
            self._fail(run, error)

    def _on_frame(self, frame: Frame, others: asyncio.TaskGroup) -> None:
        run = self.flying.get(frame.request_id)
        if run is None:
            return
        self._service.subscriptions.unfollow_outcome(self._outcomes, self._batch.tenant, run.request_id)
        if not isinstance(frame, ResultFrame) or frame.large is not None or self._takes_long(frame.result or {}):
            others.create_task(self._finish(run, frame))
            return
        try:
            result = completed(frame, self._endpoint.words)
            content = self._content(run, self._made(run), result)
        except Exception as error:
            self._fail(run, error)
        else:
            self._end(run, LineEnd(True, content, _counts(result)))

    def _takes_long(self, result: Json) -> bool:
        return self._endpoint is endpoints.IMAGE or is_large(result)

    async def _finish(self, run: _Run, frame: Frame) -> None:
        """End a line whose answer is large, is to be fetched, or could not be read."""
        try:
            async with self._large:
                if isinstance(frame, FailureFrame):
                    raise frame.error
                assert isinstance(frame, ResultFrame)
                await frame.ready()
                result = await whole_result(self._service, self._batch.tenant, completed(frame, self._endpoint.words))
                made = await self._made_with_images(run, result)
                content = await on_output_thread(lambda: self._content(run, made, result))
        except Exception as error:
            if not (isinstance(error, PenstockError) and is_for_now(error)):
                self._fail(run, error)
                return
            await asyncio.sleep(error.retry_after_s or RETRY_S)
            self._follow(run)
        else:
            self._end(run, LineEnd(True, content, _counts(result)))

    def _made(self, run: _Run) -> Made:
        return Made(run.request_id, int(time.time()), run.model)

    async def _made_with_images(self, run: _Run, result: Json) -> Made:
        """With images as the body asks for them. Raises as `ArtifactStore.get`."""
        made = replace(self._made(run), url_of=self._url_of)
        if self._endpoint is not endpoints.IMAGE or run.body.response_format == "url":
            return made
        return replace(made, images=await endpoints.image_contents(self._service, self._batch.tenant, result))

    def _url_of(self, image: Mapping[str, Any]) -> str:
        """Without a ticket, which would be over before the batch is: it needs a key."""
        return urljoin(self._batch.base_url, image["url"])

    def _content(self, run: _Run, made: Made, result: Json) -> bytes:
        """The line of the file of answers."""
        answer = _response(200, run.request_id, self._endpoint.answer(run.body, made, result))
        return _encoded(run.asked, run.request_id, answer, None)

    # -- ends

    def _each(self, runs: list[_Run], step: Callable[[_Run], None]) -> list[_Run]:
        """Take a step with each; those that it ended are left out."""
        left: list[_Run] = []
        for run in runs:
            try:
                step(run)
            except Exception as error:
                self._fail(run, error)
            else:
                left.append(run)
        return left

    def _end(self, run: _Run, end: LineEnd) -> None:
        self.flying.pop(run.request_id, None)
        run.on_end(run.line, end)

    def _fail(self, run: _Run, error: Exception) -> None:
        """End it with its error. Raises an error that is not the line's: this machine's, or that the gateway stops."""
        if isinstance(error, OSError | Stopping):
            raise error
        request_id, stop = run.request_id, self._stop()
        if isinstance(error, FinalFailure):
            error = error.error
            if (isinstance(error, Cancelled) and stop in (Stop.CANCELLED, Stop.REVOKED)) or (
                isinstance(error, Expired) and now_ms() >= self._batch.expires_at * 1000
            ):
                error = _NotRun(stop or Stop.EXPIRED)
        response, told = None, None
        if isinstance(error, Unauthenticated) and stop is Stop.REVOKED:
            error = _NotRun(stop)
        if isinstance(error, _NotRun):
            code, message = NOT_RUN[error.stop]
            told = {"code": code, "message": message}
        else:
            if not isinstance(error, PenstockError):  # failing the batch for it would fail it again whenever it is run
                text = "batch.line_failed batch=%s line=%d"
                logger.error(text, batch_name(self._batch.batch_id), run.line.number, exc_info=error)
                error = InternalError("the line could not be run")
            response = _response(error.http_status, request_id, error_body(error, request_id))
        self._end(run, LineEnd(False, _encoded(run.asked, request_id, response, told), Counts(failed=1)))


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


def _encoded(asked: Json, request_id: str, response: Json | None, error: Json | None) -> bytes:
    return to_json(_line(asked, request_id, response, error)) + b"\n"


def _counts(result: Json) -> Counts:
    usage = result.get("usage") or {}
    return Counts(
        completed=1,
        input_tokens=int(usage.get("prompt_tokens") or 0),
        cached_tokens=int(usage.get("cached_tokens") or 0),
        output_tokens=int(usage.get("completion_tokens") or 0),
    )
