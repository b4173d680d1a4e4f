"""One call that several requests answer: a list of prompts, or several answers in a stream.

Each prompt is a request of its own: it has its place in the queue, its share and its retries, and may run at any
worker. docs/decisions/0064 tells why. The call is all or nothing: if one fails, the call fails and the others end.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from penstock.common.tasks import end_all
from penstock.gateway.edge.event_stream import KEEPALIVE, KEEPALIVE_S
from penstock.gateway.openai.chat_answers import ChunkWriter, choices_of
from penstock.gateway.openai.chat_bodies import ChatCompletionBody, CompletionBody, prompts_of
from penstock.gateway.openai.exchange import Pulse
from penstock.schemas.errors import InvalidRequest, PenstockError

Json = dict[str, Any]
TextBody = ChatCompletionBody | CompletionBody
T = TypeVar("T")

MOST_REQUESTS = 128
"""Of one call."""
PART = "penstock_part"
"""The entry of `metadata` that says which part of its call a request is."""


def bodies_of(body: TextBody, *, may_split_answers: bool) -> Sequence[TextBody]:
    """A body for each request. Raises InvalidRequest for too many.

    `may_split_answers`: whether several answers of a stream may be requests of their own.
    """
    prompts: Sequence[Any] = prompts_of(body) if isinstance(body, CompletionBody) else [None]
    answers = body.n or 1
    in_conversation = body.penstock is not None and body.penstock.conversation_id is not None
    splits = bool(may_split_answers and body.stream and answers > 1 and not in_conversation)
    copies = answers if splits else 1
    count = len(prompts) * copies
    if count == 1:
        return [body]
    if count > MOST_REQUESTS:
        param = "prompt" if len(prompts) > MOST_REQUESTS else "n"
        raise InvalidRequest(f"{count} prompts and answers: a call may have {MOST_REQUESTS}", param=param)
    made: list[TextBody] = []
    for prompt in prompts:
        for copy in range(copies):
            update: Json = {"metadata": {**(body.metadata or {}), PART: f"{len(made) + 1}/{count}"}}
            if isinstance(body, CompletionBody):
                update["prompt"] = prompt
            if splits:
                update |= {"n": 1, "seed": None if body.seed is None else body.seed + copy}
            made.append(body.model_copy(update=update))
    return made


def at_prompt(error: PenstockError, place: int) -> PenstockError:
    """The refusal of one prompt of a list, named by its place."""
    if error.param is None or not error.param.startswith("prompt"):
        return error
    message = error.message.replace("prompt", f"prompt[{place}]", 1)
    return type(error)(message, param=f"prompt[{place}]", details=error.details, retry_after_s=error.retry_after_s)


def merged(results: Sequence[Json], answers: int) -> Json:
    choices = [
        {"prompt_logprobs": result.get("prompt_logprobs"), **choice, "index": place * answers + choice["index"]}
        for place, result in enumerate(results)
        for choice in choices_of(result)
    ]
    usage = UsageSum()
    for result in results:
        usage.add(result.get("usage") or {})
    return {"model": results[0].get("model"), "choices": choices, "usage": usage.counts}


class UsageSum:
    """The tokens of a call."""

    def __init__(self) -> None:
        self.counts: Json = {}

    def add(self, usage: Json, *, counts_prompt: bool = True) -> None:
        """Of one request. A prompt counts once, whatever the number of its answers."""
        for name in ("completion_tokens", *(("prompt_tokens", "cached_tokens") if counts_prompt else ())):
            if usage.get(name) is not None:
                self.counts[name] = self.counts.get(name, 0) + int(usage[name])


async def all_or_nothing(works: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of all; the first failure ends the others."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await end_all(tasks)


class PartWriter:
    """The writer of one request of several: its stream neither says the usage nor ends the whole."""

    last = b""

    def __init__(self, inner: ChunkWriter, usage: UsageSum, *, counts_prompt: bool) -> None:
        self._inner = inner
        self._usage = usage
        self._counts_prompt = counts_prompt
        self.encoded, self.failure, self.opening = inner.encoded, inner.failure, inner.opening
        self.text, self.calls = inner.text, inner.calls

    def ending(self, result: Json) -> list[Json]:
        self._usage.add(self._inner.usage_of(result), counts_prompt=self._counts_prompt)
        return [event for event in self._inner.ending(result) if event["choices"]]


async def merged_events(
    streams: Sequence[AsyncGenerator[bytes]], last: Callable[[], bytes], keepalive_s: float = KEEPALIVE_S
) -> AsyncGenerator[bytes]:
    """The events of all streams as they come, then `last`. The first failure ends all."""
    queue: asyncio.Queue[bytes | BaseException | None] = asyncio.Queue(len(streams))

    async def pump(stream: AsyncGenerator[bytes]) -> None:
        try:
            async with aclosing(stream):
                async for event in stream:
                    await queue.put(event)
            await queue.put(None)
        except Exception as error:
            await queue.put(error)

    tasks = [asyncio.ensure_future(pump(stream)) for stream in streams]
    pulse, left = Pulse(keepalive_s / 2), len(tasks)
    try:
        while left:
            event = await queue.get()
            if isinstance(event, BaseException):
                raise event
            if event is None:
                left -= 1
            elif event != KEEPALIVE or pulse.is_due():  # each stream says that it waits: one word of it is enough
                yield event
                pulse.told()
        yield last()
    finally:
        await end_all(tasks)
