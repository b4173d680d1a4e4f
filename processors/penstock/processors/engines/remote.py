"""The remote engine: an OpenAI-compatible server behind the same admission, with a count of slots in place of memory.

Options: slots (8), api_key_env (name of the variable that holds the key), remote_model (its name there; default: our
id), timeout_s (600), window, patience_s (60). It needs no torch.

A server that is busy (429, 503) or cannot be reached has not begun the run: it is asked again after the time it names,
for patience_s in all, and `on_busy` says for how long the engine should get no other runs. What breaks later fails the
attempt. What a server says may be of any shape: texts are made encodable, and whatever is wrong fails the run.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping
from email.utils import parsedate_to_datetime
from typing import Any

import httpx

from penstock.processors.core.context import build_context
from penstock.processors.engines.base import (
    Delta,
    EngineGone,
    EngineInfo,
    EngineState,
    Finished,
    Limits,
    Prepared,
    RunFailed,
    RunSpec,
    Sink,
)
from penstock.processors.engines.remote_wire import (
    Answer,
    as_event,
    check_passable,
    counts,
    embedding_body,
    text_body,
)
from penstock.processors.engines.sinks import GuardedSink
from penstock.processors.engines.texts import encodable
from penstock.schemas.errors import (
    ContextLengthExceeded,
    EngineFailed,
    InternalError,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    PenstockError,
)
from penstock.schemas.sse import DONE, SseLines, field_value
from penstock.schemas.texts import shortened

logger = logging.getLogger(__name__)

DEFAULT_WINDOW = 1_000_000
FIRST_DELAY_S = 0.25
CHARS_PER_TOKEN = 4
"""Only for fitting a conversation, the server's tokenizer being unknown; `window` should leave room for its error."""


class RemoteEngine:
    """Chat, completions and embeddings over HTTP, streamed; a cancelled run closes its connection."""

    prepares_inline = True

    def __init__(
        self,
        model: str,
        url: str,
        options: Mapping[str, Any],
        *,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.model = model
        self._url = url.rstrip("/")
        if not self._url.endswith("/v1"):
            self._url += "/v1"
        self._name = str(options.get("remote_model", model))
        self._window = int(options.get("window", DEFAULT_WINDOW))
        self.on_died: Callable[[int], None] = lambda code: None
        self.on_busy: Callable[[float], None] = lambda seconds: None
        self._slots = int(options.get("slots", 8))
        self._timeout_s = float(options.get("timeout_s", 600))
        self._patience_s = float(options.get("patience_s", 60))
        self._key_name = options.get("api_key_env")
        self._transport = transport
        self._http: httpx.AsyncClient | None = None
        self._tasks: dict[str, tuple[asyncio.Task[None], GuardedSink]] = {}
        self._state = EngineState.NEW

    @property
    def state(self) -> EngineState:
        return self._state

    async def start(self) -> None:
        key = os.environ.get(str(self._key_name), "") if self._key_name else ""
        if self._key_name and not key:
            raise InvalidRequest(f"{self.model}: the variable {self._key_name}, which should hold the key, is not set")
        headers = {"authorization": f"Bearer {key}"} if key else {}
        timeout = httpx.Timeout(self._timeout_s, connect=10)
        limits = httpx.Limits(max_connections=self._slots + 4)
        self._http = httpx.AsyncClient(
            headers=headers, timeout=timeout, limits=limits, transport=self._transport, trust_env=False
        )
        self._state = EngineState.READY

    async def prepare(self, spec: RunSpec) -> Prepared:
        # Never awaits: the worker relies on `prepares_inline`.
        check_passable(spec)
        if spec.messages is None:
            return Prepared(run_id=spec.run_id, prompt_tokens=0, need_tokens=0)
        wanted = int(spec.params.get("max_tokens", 0))
        context = build_context(
            spec.history or [],
            spec.messages,
            window_tokens=self._window,
            # Of a window that nobody told the server itself says what is too long.
            max_output_tokens=0 if self._window == DEFAULT_WINDOW else wanted,
            limits=spec.context,
            count=lambda chosen: sum(len(message["content"]) // CHARS_PER_TOKEN + 4 for message in chosen),
        )
        return Prepared(
            run_id=spec.run_id,
            prompt_tokens=0,
            need_tokens=0,
            context_messages=len(context.messages),
            dropped_turns=context.dropped_turns,
            messages=context.messages,
        )

    def run(self, spec: RunSpec, prepared: Prepared, sink: Sink) -> None:
        guarded = GuardedSink(spec.run_id, sink)
        if self._state is not EngineState.READY:
            error = EngineGone(f"the engine of {self.model} is {self._state}")
            guarded.failed(RunFailed(run_id=spec.run_id, error=error, retryable_here=True))
            return
        task = asyncio.get_running_loop().create_task(self._run(spec, prepared, guarded), name=f"run {spec.run_id}")
        self._tasks[spec.run_id] = (task, guarded)

    async def _run(self, spec: RunSpec, prepared: Prepared, sink: GuardedSink) -> None:
        try:
            finished = await self._ask(spec, prepared, sink)
        except PenstockError as error:
            again = error.retryable or isinstance(error, EngineFailed)
            sink.failed(RunFailed(run_id=spec.run_id, error=error, retryable_here=again))
        except UnicodeEncodeError:
            error = InvalidRequest("the text holds half of a surrogate pair, which is no character", param="payload")
            sink.failed(RunFailed(run_id=spec.run_id, error=error, retryable_here=False))
        except Exception as error:  # broken connections, and answers of any shape
            logger.warning("remote.run_failed model=%s error=%s", self.model, type(error).__name__)
            failure = EngineFailed(f"the server of {self.model} failed: {type(error).__name__}")
            sink.failed(RunFailed(run_id=spec.run_id, error=failure, retryable_here=True))
        else:
            sink.finished(finished)
        finally:
            self._tasks.pop(spec.run_id, None)

    async def _ask(self, spec: RunSpec, prepared: Prepared, sink: GuardedSink) -> Finished:
        """Once the server has begun, once only; until then again and again within the patience."""
        loop = asyncio.get_running_loop()
        give_up = loop.time() + self._patience_s
        delay_s = FIRST_DELAY_S
        while True:
            try:
                if spec.task == "embedding":
                    return await self._embed(spec)
                return await self._generate(spec, prepared, sink)
            except Overloaded as error:
                wait_s = max(delay_s, error.retry_after_s or 0.0)
                if loop.time() + wait_s > give_up:
                    raise
            except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout) as error:
                wait_s = delay_s
                if loop.time() + wait_s > give_up:
                    reason = shortened(f"the server of {self.model} cannot be reached: {error}", 300)
                    raise EngineFailed(reason) from error
            self.on_busy(wait_s)
            # Runs that were turned away together do not come back together.
            await asyncio.sleep(wait_s * (1 + 0.2 * random.random()))
            delay_s = min(2 * delay_s, 10.0)

    async def _generate(self, spec: RunSpec, prepared: Prepared, sink: GuardedSink) -> Finished:
        path, body = text_body(spec, prepared, self._name)
        answer = Answer(chat=prepared.messages is not None)
        shown = _Shown(spec.run_id, sink)
        async for event in self._events(path, body):
            shown.show(answer.feed(event))
        if answer.reason is None:  # the connection ended without saying so; what came is no answer
            raise EngineFailed(f"the server of {self.model} ended its stream without a finish_reason")
        shown.show(answer.flush())
        pieces = answer.pieces
        usage = answer.usage or {"prompt_tokens": 0, "completion_tokens": pieces, "total_tokens": pieces}
        return Finished(
            run_id=spec.run_id,
            output=answer.output(),
            finish_reason=answer.reason,
            usage=usage,
            prompt_tokens=int(usage.get("prompt_tokens", 0)),
            completion_tokens=int(usage.get("completion_tokens", 0)),
        )

    async def _events(self, path: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        assert self._http is not None
        async with self._http.stream("POST", self._url + path, json=body) as answer:
            if answer.is_error:
                await answer.aread()
                raise _typed(answer)
            if answer.headers.get("content-type", "").startswith("application/json"):
                await answer.aread()  # a server that does not stream
                yield as_event(answer.json())
                return
            async for line in _lines(answer):
                data = field_value(line, b"data")
                if data is None:
                    continue
                if data == DONE:
                    return
                event = json.loads(data.decode(errors="replace"))
                if event.get("error"):
                    raise EngineFailed(f"the server of {self.model} broke off: {_message(event)}")
                yield event

    async def _embed(self, spec: RunSpec) -> Finished:
        assert self._http is not None
        answer = await self._http.post(self._url + "/embeddings", json=embedding_body(spec, self._name))
        if answer.is_error:
            raise _typed(answer)
        found = answer.json()
        items = sorted(found["data"], key=lambda item: item["index"])
        vectors = [[float(value) for value in item["embedding"]] for item in items]
        usage = counts(found.get("usage"))
        return Finished(
            run_id=spec.run_id,
            output={"embeddings": vectors, "dimensions": len(vectors[0])},
            finish_reason=None,
            usage={"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0} | usage,
            prompt_tokens=usage.get("prompt_tokens", 0),
        )

    def cancel(self, run_id: str) -> None:
        found = self._tasks.pop(run_id, None)
        if found is not None:
            task, sink = found
            sink.close()
            task.cancel()

    def limits(self) -> Limits:
        return Limits(slots=self._slots)

    async def stop(self) -> None:
        self._state = EngineState.STOPPED
        tasks = [task for task, _ in self._tasks.values()]
        for run_id in list(self._tasks):
            self.cancel(run_id)
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._http is not None:
            await self._http.aclose()

    def measured_memory(self) -> int | None:
        return None

    def info(self) -> EngineInfo:
        return EngineInfo(context_window=None if self._window == DEFAULT_WINDOW else self._window, device="remote")


class _Shown:
    """Text on its way to the sink, with its place."""

    def __init__(self, run_id: str, sink: GuardedSink) -> None:
        self._run_id, self._sink = run_id, sink
        self._pieces = 0

    def show(self, text: str) -> None:
        if not text:
            return
        delta = Delta(run_id=self._run_id, text=text, token_ids=[], first_token_index=self._pieces)
        self._pieces += 1
        if not self._sink.delta(delta):
            raise InternalError("what the engine gave could not be taken")  # the sink knows; this closes the stream


async def _lines(answer: httpx.Response) -> AsyncIterator[bytes]:
    lines = SseLines()
    async for piece in answer.aiter_bytes():
        for line in lines.feed(piece):
            yield line
    yield lines.rest()


def _message(body: Any) -> str:
    error = body.get("error") if isinstance(body, dict) else None
    text = error.get("message") if isinstance(error, dict) else error
    return encodable(shortened(str(text or "no reason given"), 300))


def _typed(answer: httpx.Response) -> PenstockError:
    """The typed error of a refusal."""
    try:
        body: Any = answer.json()
    except ValueError:
        body = {}
    if answer.status_code in (401, 403):  # some servers quote a part of the key
        return EngineFailed(f"the remote server refused our credentials ({answer.status_code})")
    message = f"the remote server said {answer.status_code}: {_message(body)}"
    error: Any = body.get("error") if isinstance(body, dict) else None
    code = error.get("code") if isinstance(error, dict) else None
    if answer.status_code in (429, 503):
        return Overloaded(message, retry_after_s=_retry_after(answer))
    if code == "context_length_exceeded":
        return ContextLengthExceeded(message)
    if answer.status_code == 404:
        return ModelNotFound(message, param="model")
    if 400 <= answer.status_code < 500 and answer.status_code != 408:
        return InvalidRequest(message)
    return EngineFailed(message)


def _retry_after(answer: httpx.Response) -> float | None:
    """Seconds, from either form of the header; at most a minute. None when it says nothing."""
    value = answer.headers.get("retry-after", "")
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(value).timestamp() - time.time()
        except (ValueError, TypeError):
            return None
    return max(0.0, min(60.0, seconds))
