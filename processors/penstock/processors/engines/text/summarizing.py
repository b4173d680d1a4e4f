"""Summaries by a text engine: texts longer than its window too, by several runs of it inside one run.

The text is cut into parts that fit; each part is summed up (map); the summaries are put together and summed up again
until one is left (reduce). Whatever engine makes text can do it, in a process or behind a server, for the parts are
ordinary runs of it. The worker sees one run: one slot, and tokens for as many parts as are under way together. What it
was granted is never exceeded: a part that turns out larger is cut in two.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from penstock.common.background import BackgroundTasks
from penstock.common.tasks import end_all
from penstock.processors.engines.base import (
    Delta,
    Engine,
    EngineGone,
    EngineInfo,
    EngineState,
    Finished,
    Limits,
    Prepared,
    Preview,
    RunFailed,
    RunSpec,
    Sink,
    StepProgress,
    usage_of,
)
from penstock.processors.engines.sinks import GuardedSink
from penstock.processors.engines.text.summary_parts import (
    Sizes,
    map_prompt,
    packed,
    reduce_prompt,
    sizes_for,
    split,
    text_of,
    whole_prompt,
)
from penstock.schemas.errors import ContextLengthExceeded, EngineFailed, InternalError, PenstockError


class PartRun:
    """`outcome` is set once, with the engine's answer."""

    def __init__(self, run_id: str, sink: GuardedSink) -> None:
        self.outcome: asyncio.Future[Finished | RunFailed] = asyncio.get_running_loop().create_future()
        self._run_id = run_id
        self._sink = sink

    def on_delta(self, delta: Delta) -> None:
        self._sink.delta(replace(delta, run_id=self._run_id))

    def on_progress(self, progress: StepProgress) -> None:
        """A part's own steps are not those of the summary."""

    def on_preview(self, preview: Preview) -> None:
        """Text has none."""

    def on_finished(self, finished: Finished) -> None:
        if not self.outcome.done():
            self.outcome.set_result(finished)

    def on_failed(self, failed: RunFailed) -> None:
        if not self.outcome.done():
            self.outcome.set_result(failed)


logger = logging.getLogger(__name__)

TASK = "summarization"
LEVELS = 4
"""How often smaller parts are tried when the summaries together do not fit."""
PARALLEL = 4
"""Parts that are summed up together, where the engine's tokens allow it."""


class SummarizingEngine(Engine):
    """An engine of text that serves summarization too; all else is passed on to it."""

    prepares_inline = False
    """A conversation must be read before."""

    def __init__(self, inner: Engine) -> None:
        self.model = inner.model
        self._inner = inner
        inner.on_died = self._died
        inner.on_busy = lambda seconds: self.on_busy(seconds)
        inner.on_limits = lambda limits: self.on_limits(limits)
        inner.on_out_of_memory = lambda: self.on_out_of_memory()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._background = BackgroundTasks()

    @property
    def state(self) -> EngineState:
        return self._inner.state

    @property
    def pid(self) -> int | None:
        return self._inner.pid

    async def start(self) -> None:
        await self._inner.start()

    async def stop(self) -> None:
        self._drop_all()
        await self._inner.stop()

    def limits(self) -> Limits:
        return self._inner.limits()

    def measured_memory(self) -> int | None:
        return self._inner.measured_memory()

    def peak_memory(self) -> int | None:
        return self._inner.peak_memory()

    def info(self) -> EngineInfo:
        return self._inner.info()

    async def prepare(self, spec: RunSpec) -> Prepared:
        if spec.task != TASK:
            return await self._inner.prepare(spec)
        sizes = self._sizes(spec)
        text = text_of(spec)
        # The first part is counted: whether it can be counted at all, and how many characters make a token.
        probe = self._part(spec, "probe", whole_prompt(text[: sizes.part_chars]), sizes.answer_tokens, stream=False)
        try:
            counted = (await self._inner.prepare(probe)).prompt_tokens
        except ContextLengthExceeded:
            counted = sizes.part_tokens  # denser than usual: it will be cut in two
        finally:
            self._inner.cancel(probe.run_id)
        tokens = counted * len(text) // max(1, min(len(text), sizes.part_chars))
        together = min(sizes.together, len(split(text, sizes.part_chars)))
        need = 0 if self._inner.limits().tokens is None else together * sizes.run_tokens
        return Prepared(run_id=spec.run_id, prompt_tokens=tokens, need_tokens=need)

    def run(self, spec: RunSpec, prepared: Prepared, sink: Sink) -> None:
        if spec.task != TASK:
            self._inner.run(spec, prepared, sink)
            return
        task = self._background.start(self._run(spec, GuardedSink(spec.run_id, sink)), spec.run_id)
        self._tasks[spec.run_id] = task
        task.add_done_callback(lambda done: self._tasks.pop(spec.run_id, None))

    def cancel(self, run_id: str) -> None:
        task = self._tasks.pop(run_id, None)
        if task is None:
            self._inner.cancel(run_id)
        else:
            task.cancel()

    def _sizes(self, spec: RunSpec) -> Sizes:
        limits, window = self._inner.limits(), self._inner.info().context_window
        return sizes_for(window, limits.tokens, spec.params.get("max_tokens"), PARALLEL)

    def _died(self, code: int) -> None:
        self._drop_all()
        self.on_died(code)

    def _drop_all(self) -> None:
        """The runs under way end silently: the caller that stops the engine, or hears of its death, knows them."""
        tasks, self._tasks = self._tasks, {}
        for task in tasks.values():
            task.cancel()

    async def _run(self, spec: RunSpec, sink: GuardedSink) -> None:
        summary = _Summary(self._inner, spec, self._sizes(spec), sink, self._part)
        try:
            sink.finished(await summary.make())
        except EngineGone as error:
            if self._inner.state is EngineState.READY:  # else `on_died` reports it
                sink.failed(RunFailed(run_id=spec.run_id, error=error, retryable_here=True))
        except PenstockError as error:
            sink.failed(RunFailed(run_id=spec.run_id, error=error, retryable_here=error.retryable))
        except _PartFailed as failed:
            sink.failed(RunFailed(run_id=spec.run_id, error=failed.error, retryable_here=failed.retryable_here))
        except Exception as error:
            logger.exception("engine.summary_failed run=%s", spec.run_id)
            failure = InternalError(f"{type(error).__name__} while the summary was made")
            sink.failed(RunFailed(run_id=spec.run_id, error=failure, retryable_here=False))

    def _part(self, spec: RunSpec, name: str, prompt: str, max_tokens: int, *, stream: bool) -> RunSpec:
        return replace(
            spec,
            run_id=f"{spec.run_id}/{name}",
            task="text_generation",
            messages=[{"role": "user", "content": prompt}],
            history=None,
            payload={},
            params={"max_tokens": max_tokens, "temperature": 0},
            defaulted=frozenset(),
            context=None,
            stream=stream,
            published=None,
        )


def _covers(spec: RunSpec) -> dict[str, int]:
    """Of a conversation: up to which record its summary is."""
    through = spec.payload.get("covers_through")
    return {} if through is None else {"covers_through": through}


class _PartFailed(Exception):
    """A run inside failed, in the engine's words."""

    def __init__(self, failed: RunFailed) -> None:
        super().__init__(str(failed.error))
        self.error = failed.error
        self.retryable_here = failed.retryable_here


class _Summary:
    """One summary under way: its parts, how many steps are done, and what they took."""

    def __init__(
        self, inner: Engine, spec: RunSpec, sizes: Sizes, sink: GuardedSink, part: Callable[..., RunSpec]
    ) -> None:
        self._inner, self._spec, self._sizes, self._sink, self._part = inner, spec, sizes, sink, part
        self._places = asyncio.Semaphore(sizes.together)
        self._number = 0
        self._step = 0
        self._steps = 0
        self._prompt_tokens = 0
        self._completion_tokens = 0

    async def make(self) -> Finished:
        """Raises PenstockError, _PartFailed."""
        text = text_of(self._spec)
        parts = split(text, self._sizes.part_chars)
        if len(parts) == 1:
            with suppress(ContextLengthExceeded):
                return await self._last(whole_prompt(text))
            parts = split(text, len(text) // 2 + 1)
        self._steps = len(parts) + 1
        prompts = [map_prompt(part, number, len(parts)) for number, part in enumerate(parts, 1)]
        summaries = await self._all(prompts, parts)
        chars = self._sizes.part_chars
        for _ in range(LEVELS):
            while len(groups := packed(summaries, chars)) > 1:
                self._steps += len(groups)
                joined = ["\n\n".join(group) for group in groups]
                summaries = await self._all([reduce_prompt(one) for one in joined], joined)
            with suppress(ContextLengthExceeded):  # of summaries whose tokens are short
                return await self._last(reduce_prompt("\n\n".join(summaries)))
            summaries, chars = split("\n\n".join(summaries), chars // 2), chars // 2
        raise EngineFailed("the summaries of the parts do not become shorter")

    async def _all(self, prompts: list[str], texts: list[str]) -> list[str]:
        """The answers, in order; when one fails the others are given up."""
        pairs = zip(prompts, texts, strict=True)
        tasks = [asyncio.create_task(self._mapped(prompt, text)) for prompt, text in pairs]
        try:
            return list(await asyncio.gather(*tasks))
        except BaseException:
            await end_all(tasks)
            raise

    async def _mapped(self, prompt: str, text: str) -> str:
        try:
            async with self._places:
                answer = await self._answer(prompt, self._sizes.answer_tokens)
        except ContextLengthExceeded:
            halves = split(text, len(text) // 2 + 1)
            if len(text) < 2 or len(halves) < 2:
                raise
            self._steps += len(halves) - 1
            found = [await self._mapped(map_prompt(half, n, len(halves)), half) for n, half in enumerate(halves, 1)]
            return "\n\n".join(found)
        self._done()
        return str(answer.output["text"])

    async def _last(self, prompt: str) -> Finished:
        """The run whose answer is the summary: it streams."""
        self._steps = max(self._steps, 1)
        answer = await self._answer(prompt, self._sizes.summary_tokens, stream=self._spec.stream)
        self._done()
        return Finished(
            run_id=self._spec.run_id,
            output={"text": answer.output["text"], **_covers(self._spec)},
            finish_reason=answer.finish_reason,
            usage=usage_of(self._prompt_tokens, self._completion_tokens),
        )

    def _done(self) -> None:
        self._step += 1
        self._sink.progress(StepProgress(run_id=self._spec.run_id, step=self._step, steps=max(self._steps, self._step)))

    async def _answer(self, prompt: str, max_tokens: int, *, stream: bool = False) -> Finished:
        """One run inside. Raises ContextLengthExceeded for a prompt beyond the grant, _PartFailed, PenstockError."""
        self._number += 1
        spec = self._part(self._spec, str(self._number), prompt, max_tokens, stream=stream)
        run = PartRun(self._spec.run_id, self._sink)
        try:
            prepared = await self._inner.prepare(spec)
            if self._inner.limits().tokens is not None and prepared.need_tokens > self._sizes.run_tokens:
                raise ContextLengthExceeded("the part takes more tokens than were granted", param="payload")
            self._inner.run(spec, prepared, run)
            outcome = await run.outcome
        except BaseException:
            self._inner.cancel(spec.run_id)
            raise
        if isinstance(outcome, RunFailed):
            raise _PartFailed(outcome)
        if not isinstance(outcome.output.get("text"), str):
            raise EngineFailed("the engine gave no text")
        self._prompt_tokens += outcome.prompt_tokens
        self._completion_tokens += outcome.completion_tokens
        return outcome
