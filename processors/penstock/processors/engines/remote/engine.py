"""The remote engine: an OpenAI-compatible server behind the same admission, with a count of slots in place of memory.

Options: slots (8), tokens_per_minute (no limit), headers (names and texts, or `{env = "NAME"}`), api_key_env (name of
the variable that holds the key), remote_model (its name there; default: our id), timeout_s (600), window, patience_s
(60), continue ("none"; "prefix": a stream goes on behind what was delivered, prefix.py), caller_headers (none),
caption_prompt, image_fields (images.py). It needs no torch.

How many requests the server gets at once follows what it answers, up to `slots` (concurrency.py). What it turns
away (429, 503) or what cannot reach it has not begun: it goes back to the queue as `TurnedAway`, and `on_busy` says for
how long the engine should get none, so that the most urgent is sent when there is room again. Once it has turned all
away for patience_s, each request waits for a next try of its own. What breaks later fails the attempt. What a server
says may be of any shape: texts are made encodable, and whatever is wrong fails the run.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections import deque
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from aiohttp.abc import AbstractResolver

from penstock.common.background import BackgroundTasks
from penstock.processors.engines.base import (
    Engine,
    EngineGone,
    EngineInfo,
    EngineState,
    Finished,
    Limits,
    Message,
    Prepared,
    RunFailed,
    RunSpec,
    Sink,
    TurnedAway,
    usage_of,
)
from penstock.processors.engines.context import build_context
from penstock.processors.engines.image_messages import CAPTION_PROMPT, with_images
from penstock.processors.engines.remote.concurrency import RemoteGate
from penstock.processors.engines.remote.echoed import without_prompt
from penstock.processors.engines.remote.http import (
    RemoteClient,
    json_within,
    lines_of,
    message_of,
    request_headers,
    take_headers,
    unreached,
)
from penstock.processors.engines.remote.images import TASKS as IMAGE_TASKS
from penstock.processors.engines.remote.images import ImageRuns
from penstock.processors.engines.remote.prefix import (
    PREFIX,
    DeliveredText,
    Said,
    behind,
    can_go_on,
    counting,
    delivered,
)
from penstock.processors.engines.remote.shown import Shown
from penstock.processors.engines.remote.trial import PrefixTrial
from penstock.processors.engines.remote.wire import (
    Answer,
    as_event,
    check_passable,
    counts,
    embedding_body,
    text_body,
    with_data_urls,
)
from penstock.processors.engines.sinks import GuardedSink
from penstock.processors.images.decoded import DecodedImage
from penstock.processors.settings import ImagesSection
from penstock.schemas.errors import EngineFailed, InvalidRequest, Overloaded, PenstockError, RetryKind
from penstock.schemas.sse import DONE, field_value

logger = logging.getLogger(__name__)

CAPTION = "image_to_text"
DEFAULT_WINDOW = 1_000_000
CHARS_PER_TOKEN = 4
"""Only for fitting a conversation and for the budget, the server's tokenizer being unknown; `window` should leave room
for its error."""
REFUSED_KEPT = 1_000
"""Number of requests remembered whose prefix the server has refused."""
ANSWER_TOKENS = 256
"""What an answer whose length nobody bounded costs of the budget, until it has ended."""


class RemoteEngine(Engine):
    """Chat, completions, embeddings and images over HTTP, text streamed; a cancelled run closes its connection."""

    prepares_inline = True

    def __init__(
        self,
        model: str,
        url: str,
        options: Mapping[str, Any],
        *,
        resolver: AbstractResolver | None = None,
        images: ImagesSection | None = None,
    ) -> None:
        """`images`: as the worker's settings say, for the images that the server answers with."""
        self.model = model
        self._url = url.rstrip("/")
        if not self._url.endswith("/v1"):
            self._url += "/v1"
        self._name = str(options.get("remote_model", model))
        self._window = int(options.get("window", DEFAULT_WINDOW))
        self._slots = int(options.get("slots", 8))
        self._timeout_s = float(options.get("timeout_s", 600))
        budget = options.get("tokens_per_minute")
        self._gate = RemoteGate(
            self._slots,
            patience_s=float(options.get("patience_s", 60)),
            tokens_per_minute=None if budget is None else float(budget),
        )
        self._images = ImageRuns(model, self._name, self._url, options, images or ImagesSection())
        self._caller_headers = frozenset(str(name).lower() for name in options.get("caller_headers", ()))
        self._reported_limit = self._slots
        self._options = options
        self._resolver = resolver
        self._http: RemoteClient | None = None
        self._tasks: dict[str, tuple[asyncio.Task[None], GuardedSink]] = {}
        self._background = BackgroundTasks()
        ask = partial(self._said, "/chat/completions", headers={})
        self._trial = PrefixTrial(model, self._name, ask) if options.get("continue") == PREFIX else None
        self._refused: deque[str] = deque(maxlen=REFUSED_KEPT)
        """Requests whose prefix the server has refused, the newest."""

    async def start(self) -> None:
        """Raises InvalidRequest; EngineFailed if `stop` is called before the server was tried."""
        headers = request_headers(self.model, self._options)
        if urlsplit(self._url).username and "authorization" in {*headers, *self._caller_headers}:
            raise InvalidRequest(f"{self.model}: its URL has a user beside an authorization header: remove one of them")
        self._http = RemoteClient(
            self._url,
            headers,
            connections=self._slots + 4,
            timeout_s=self._timeout_s,
            resolver=self._resolver,
        )
        if self._trial is not None:
            self._state = EngineState.STARTING
            try:
                await self._trial.start(self._background)
            except BaseException:
                await self.stop()
                raise
            if self._state is not EngineState.STARTING:
                raise EngineFailed(f"{self.model} was stopped while it was loaded")
        self._state = EngineState.READY

    async def prepare(self, spec: RunSpec) -> Prepared:
        # Never awaits: the worker relies on `prepares_inline`.
        spec, _ = self._with_headers(spec)
        check_passable(spec)
        if spec.task in IMAGE_TASKS:
            self._images.check(spec)
            return Prepared(run_id=spec.run_id, prompt_tokens=0, need_tokens=0)
        messages = self._messages(spec)
        if messages is None:
            goes_on = self._goes_on(spec, None)
            return Prepared(run_id=spec.run_id, prompt_tokens=0, need_tokens=0, goes_on=goes_on)
        past = spec.history
        wanted = int(spec.params.get("max_tokens", 0))
        context = build_context(
            None if past is None else replace(past, messages=with_images(past.messages, spec, _as_it_is)),
            messages,
            window_tokens=self._window,
            # If the window is unknown, the server itself refuses what is too long.
            max_output_tokens=0 if self._window == DEFAULT_WINDOW else wanted,
            limits=spec.context,
            count=lambda chosen: sum(len(message["content"]) // CHARS_PER_TOKEN + 4 for message in chosen),
        )
        return Prepared(
            run_id=spec.run_id,
            prompt_tokens=0,
            need_tokens=0,
            held=context.held,
            messages=context.messages,
            goes_on=self._goes_on(spec, context.messages),
        )

    def _messages(self, spec: RunSpec) -> list[Message] | None:
        """The run's own messages with their images; None for a prompt. Raises InvalidRequest."""
        messages = spec.messages
        if spec.task == CAPTION:
            text = spec.prompt or str(self._options.get("caption_prompt") or CAPTION_PROMPT)
            parts = [{"type": "image", "place": "image"}, {"type": "text", "text": text}]
            messages = [{"role": "user", "content": text, "parts": parts}]
        return None if messages is None else with_images(messages, spec, _as_it_is)

    def _with_headers(self, spec: RunSpec) -> tuple[RunSpec, dict[str, str]]:
        """The run without those of `extra` that are headers, and these. Raises InvalidRequest."""
        headers, extra = take_headers(spec.extra, self._caller_headers)
        return (replace(spec, extra=extra) if headers else spec), headers

    def _goes_on(self, spec: RunSpec, messages: list[Message] | None) -> bool:
        works = self._trial is not None and self._trial.works
        return works and spec.request_id not in self._refused and can_go_on(spec, messages)

    def run(self, spec: RunSpec, prepared: Prepared, sink: Sink) -> None:
        guarded = GuardedSink(spec.run_id, sink)
        if self._state is not EngineState.READY:
            error = EngineGone(f"the engine of {self.model} is {self._state}")
            guarded.failed(RunFailed(run_id=spec.run_id, error=error, retryable_here=True))
            return
        now = asyncio.get_running_loop().time()
        if (wait_s := self._gate.wait_s(now)) > 0:
            self.on_busy(wait_s)
            error = TurnedAway(f"the tokens of {self.model} are used up for now", retry_after_s=wait_s)
            guarded.failed(RunFailed(run_id=spec.run_id, error=error, retryable_here=True))
            return
        tokens = _estimated_tokens(spec, prepared)
        self._gate.began(tokens, now)
        if (wait_s := self._gate.wait_s(now)) > 0:
            self.on_busy(wait_s)
        task = self._background.start(self._run(spec, prepared, guarded, tokens), f"run {spec.run_id}")
        self._tasks[spec.run_id] = (task, guarded)

    async def _run(self, spec: RunSpec, prepared: Prepared, sink: GuardedSink, tokens: int) -> None:
        used = 0
        try:
            finished = await self._ask(spec, prepared, sink)
            used = (finished.usage or {}).get("total_tokens", 0) or tokens
        except PenstockError as error:
            again = error.retry_kind is not RetryKind.FINAL
            sink.failed(RunFailed(run_id=spec.run_id, error=error, retryable_here=again))
        except UnicodeEncodeError:
            error = InvalidRequest("the text holds half of a surrogate pair, which is no character", param="payload")
            sink.failed(RunFailed(run_id=spec.run_id, error=error, retryable_here=False))
        except Exception as error:  # broken connections, and answers of any shape
            used = tokens
            logger.warning("remote.run_failed model=%s error=%s", self.model, type(error).__name__)
            failure = EngineFailed(f"the server of {self.model} failed: {type(error).__name__}")
            sink.failed(RunFailed(run_id=spec.run_id, error=failure, retryable_here=True))
        except asyncio.CancelledError:
            used = tokens
            raise
        else:
            sink.finished(finished)
        finally:
            self._tasks.pop(spec.run_id, None)
            self._gate.ended(tokens, used)

    async def _ask(self, spec: RunSpec, prepared: Prepared, sink: GuardedSink) -> Finished:
        """One try, and what it says of the server. Raises TurnedAway for what the server has not begun."""
        loop = asyncio.get_running_loop()
        sent_at = loop.time()
        assert self._http is not None
        spec, headers = self._with_headers(spec)
        try:
            if spec.task == "embedding":
                finished = await self._embed(spec, headers)
            elif spec.task in IMAGE_TASKS:
                finished = await self._images.run(self._http, spec, headers)
            else:
                finished = await self._generate(spec, prepared, sink, headers)
        except Overloaded as error:
            raise self._turned_away(sent_at, error) from error
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            reason = f"the server of {self.model} cannot be reached: {unreached(error)}"
            raise self._turned_away(sent_at, EngineGone(reason)) from error
        except TimeoutError:
            self._gate.timed_out(sent_at, loop.time())
            raise
        except PenstockError as error:
            self._gate.answered(len(self._tasks))
            if prepared.goes_on and isinstance(error, InvalidRequest):
                raise self._begins_anew(spec, error) from error
            raise
        else:
            self._gate.answered(len(self._tasks))
            return finished
        finally:
            self._tell_limit()

    def _turned_away(self, sent_at: float, error: PenstockError) -> PenstockError:
        wait_s = self._gate.turned_away(sent_at, asyncio.get_running_loop().time(), error.retry_after_s)
        if wait_s is None:
            return error
        # Workers that were turned away together do not come back together.
        wait_s *= 1 + 0.2 * random.random()
        self.on_busy(wait_s)
        return TurnedAway(str(error), retry_after_s=wait_s)

    def _begins_anew(self, spec: RunSpec, error: InvalidRequest) -> TurnedAway:
        """The server takes no prefix of this one."""
        logger.warning("remote.prefix_refused model=%s request_id=%s error=%s", self.model, spec.request_id, error.code)
        self._refused.append(spec.request_id)
        return TurnedAway(str(error))

    def _tell_limit(self) -> None:
        limit = self._gate.limit
        if limit != self._reported_limit:
            logger.info("remote.limit model=%s slots=%d of=%d", self.model, limit, self._slots)
            self._reported_limit = limit
            self.on_limits(self.limits())

    async def _generate(
        self, spec: RunSpec, prepared: Prepared, sink: GuardedSink, headers: Mapping[str, str]
    ) -> Finished:
        if spec.images and prepared.messages is not None:
            prepared = replace(prepared, messages=await asyncio.to_thread(with_data_urls, prepared.messages))
        path, body = text_body(spec, prepared, self._name)
        if prepared.goes_on and spec.published is not None:
            before, rest = await self._behind(path, body, spec.published.text, headers)
            if rest is None:
                return Finished(
                    run_id=spec.run_id,
                    output={"text": before.text},
                    finish_reason="length",
                    usage=before.usage({}),
                )
            body = rest
        else:
            before = None
        of_prompt = spec.params.get("prompt_logprobs") is not None
        answer = Answer(chat=prepared.messages is not None, echoes=of_prompt)
        shown = Shown(spec.run_id, sink, holds_space=self._trial is not None)
        async for event in self._events(path, body, headers):
            shown.show(answer.feed(event), answer.take_pieces(), answer.take_logprobs())
        if answer.reason is None:  # the connection ended without saying so; what came is no answer
            raise EngineFailed(f"the server of {self.model} ended its stream without a finish_reason")
        shown.end(answer.flush())
        pieces, output = answer.pieces, answer.output()
        usage = answer.usage or usage_of(0, pieces)
        if of_prompt:
            wanted = bool(spec.params.get("logprobs"))
            output = without_prompt(output, spec.prompt, usage["prompt_tokens"], has_logprobs=wanted)
        if before is not None:
            usage, output["text"] = before.usage(usage), before.text + output["text"]
        return Finished(run_id=spec.run_id, output=output, finish_reason=answer.reason, usage=usage)

    async def _behind(
        self, path: str, body: dict[str, Any], text: str, headers: Mapping[str, str]
    ) -> tuple[DeliveredText, dict[str, Any] | None]:
        """What was delivered, as the server counts it, and the body that asks for the rest; None if nothing is left.

        The log has no tokens of remote models, so the server is asked twice for one token: its prompts are counted.
        """
        longer = behind(body, text)
        said = [await self._said(path, counting(one), headers) for one in (body, longer)]
        alone, with_text = (one.prompt_tokens for one in said)
        before = delivered(text, alone, with_text)
        return before, before.left(longer)

    async def _said(self, path: str, body: dict[str, Any], headers: Mapping[str, str]) -> Said:
        """A short answer that nobody sees."""
        answer = Answer(chat="messages" in body)
        async for event in self._events(path, body, headers):
            answer.feed(event)
        text = answer.output()["text"]
        return Said(text=text, prompt_tokens=answer.usage.get("prompt_tokens"), thinks=answer.thinks)

    async def _events(
        self, path: str, body: dict[str, Any], headers: Mapping[str, str]
    ) -> AsyncIterator[dict[str, Any]]:
        assert self._http is not None
        async with self._http.post(path, body, headers) as answer:
            if answer.content_type == "application/json":
                yield as_event(await json_within(answer))  # a server that does not stream
                return
            async for line in lines_of(answer):
                data = field_value(line, b"data")
                if data is None:
                    continue
                if data == DONE:
                    return
                event = json.loads(data.decode(errors="replace"))
                if event.get("error"):
                    raise EngineFailed(f"the server of {self.model} broke off: {message_of(event)}")
                yield event

    async def _embed(self, spec: RunSpec, headers: Mapping[str, str]) -> Finished:
        assert self._http is not None
        body = embedding_body(spec, self._name)
        async with self._http.post("/embeddings", body, headers) as answer:
            found = await json_within(answer)
        items = sorted(found["data"], key=lambda item: item["index"])
        vectors = [[float(value) for value in item["embedding"]] for item in items]
        return Finished(
            run_id=spec.run_id,
            output={"embeddings": vectors, "dimensions": len(vectors[0])},
            finish_reason=None,
            usage=usage_of(0, 0) | counts(found.get("usage")),
        )

    def cancel(self, run_id: str) -> None:
        found = self._tasks.pop(run_id, None)
        if found is not None:
            task, sink = found
            sink.close()
            task.cancel()

    def limits(self) -> Limits:
        return Limits(slots=self._gate.limit)

    async def stop(self) -> None:
        self._state = EngineState.STOPPED
        tasks = [task for task, _ in self._tasks.values()]
        for run_id in list(self._tasks):
            self.cancel(run_id)
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._background.cancel()
        self._images.close()
        if self._http is not None:
            await self._http.close()

    def info(self) -> EngineInfo:
        window = None if self._window == DEFAULT_WINDOW else self._window
        return EngineInfo(
            context_window=window, device="remote", note=None if self._trial is None else self._trial.note
        )


def _as_it_is(image: DecodedImage) -> DecodedImage:
    return image


def _estimated_tokens(spec: RunSpec, prepared: Prepared) -> int:
    """Of a prompt and its answer, before the server has counted them."""
    texts = [str(message.get("content") or "") for message in prepared.messages or []] + (spec.inputs or [])
    prompt = sum(map(len, [*texts, spec.prompt or ""])) // CHARS_PER_TOKEN
    if spec.task == "embedding":
        return max(1, prompt)
    return prompt + int(spec.params.get("max_tokens") or ANSWER_TOKENS) * int(spec.params.get("n") or 1)
