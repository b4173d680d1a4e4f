"""The no-op engine: a scripted text in place of a model, for benchmarks and tests of everything around it.

Options: tokens (4), delay_ms between tokens (0), first_delay_ms (0), slots (256), chars (the least length of a
token's text), echo (false; true: answer with the context it was given, so that tests see it).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any

from penstock.processors.core.context import build_context
from penstock.processors.core.stops import StopMatcher
from penstock.processors.engines.base import (
    Capacity,
    Delta,
    EngineInfo,
    EngineState,
    Finished,
    Message,
    Prepared,
    RunSpec,
    Sink,
)

WINDOW = 100_000


class NoopEngine:
    """Runs on the event loop itself; without a delay a run is over before `run` returns."""

    prepares_inline = True

    def __init__(self, model: str, options: Mapping[str, Any]) -> None:
        self.model = model
        self._tokens = int(options.get("tokens", 4))
        self._delay_s = float(options.get("delay_ms", 0)) / 1000
        self._first_delay_s = float(options.get("first_delay_ms", 0)) / 1000
        self.on_died: Callable[[int | None], None] = lambda _: None
        self._slots = int(options.get("slots", 256))
        self._echo = bool(options.get("echo", False))
        self._chars = int(options.get("chars", 0))
        self._window = int(options.get("window", WINDOW))
        self._running: dict[str, asyncio.TimerHandle | None] = {}
        self._state = EngineState.NEW

    @property
    def state(self) -> EngineState:
        return self._state

    async def start(self) -> None:
        self._state = EngineState.READY

    async def prepare(self, spec: RunSpec) -> Prepared:
        # Never awaits: the worker relies on `prepares_inline`.
        limit = int(spec.params.get("max_tokens", self._tokens))
        if spec.messages is None:
            tokens = _words(spec.prompt or "".join(spec.inputs or []))
            return Prepared(run_id=spec.run_id, prompt_tokens=tokens, need_tokens=0)
        context = build_context(
            spec.history or [],
            spec.messages,
            window_tokens=self._window,
            max_output_tokens=min(limit, self._window // 2),
            limits=spec.context,
            count=_count,
        )
        return Prepared(
            run_id=spec.run_id,
            prompt_tokens=context.prompt_tokens,
            need_tokens=0,
            context_messages=len(context.messages),
            dropped_turns=context.dropped_turns,
            messages=context.messages,
        )

    def run(self, spec: RunSpec, prepared: Prepared, sink: Sink) -> None:
        self._running[spec.run_id] = None
        pieces = self._pieces(spec, prepared)
        matcher = StopMatcher(spec.params.get("stop") or ())
        if not self._delay_s and not self._first_delay_s:
            self._finish(spec, prepared, sink, pieces, matcher)
            return
        self._later(
            spec.run_id, self._first_delay_s or self._delay_s, _Script(self, spec, prepared, sink, pieces, matcher)
        )

    def _later(self, run_id: str, delay_s: float, step: _Script) -> None:
        self._running[run_id] = asyncio.get_running_loop().call_later(delay_s, step.next)

    def _pieces(self, spec: RunSpec, prepared: Prepared) -> list[str]:
        limit = int(spec.params.get("max_tokens", 1 << 30))
        if self._echo:
            text = json.dumps(prepared.messages) if prepared.messages is not None else spec.prompt or ""
            return [text[at : at + 16] for at in range(0, len(text), 16)]
        return [f"word{number} ".ljust(self._chars) for number in range(min(self._tokens, limit))]

    def _finish(self, spec: RunSpec, prepared: Prepared, sink: Sink, pieces: list[str], matcher: StopMatcher) -> None:
        """The whole script at once."""
        shown = matcher.feed("".join(pieces)) + matcher.flush()
        if spec.stream and shown:
            sink.on_delta(
                Delta(run_id=spec.run_id, text=shown, token_ids=list(range(len(pieces))), first_token_index=0)
            )
        self.end(spec, prepared, sink, shown, len(pieces), stopped=matcher.stopped)

    def end(self, spec: RunSpec, prepared: Prepared, sink: Sink, text: str, tokens: int, *, stopped: bool) -> None:
        if self._running.pop(spec.run_id, self) is self:
            return  # cancelled
        reason = "stop" if stopped or self._echo or tokens < int(spec.params.get("max_tokens", 1 << 30)) else "length"
        usage = {
            "prompt_tokens": prepared.prompt_tokens,
            "completion_tokens": tokens,
            "total_tokens": prepared.prompt_tokens + tokens,
        }
        output: dict[str, Any] = {"text": text}
        if spec.task == "embedding":
            output = {"embeddings": [[1.0, 0.0] for _ in spec.inputs or []], "dimensions": 2}
        sink.on_finished(
            Finished(
                run_id=spec.run_id,
                output=output,
                finish_reason=reason,
                usage=usage,
                prompt_tokens=prepared.prompt_tokens,
                completion_tokens=tokens,
            )
        )

    def cancel(self, run_id: str) -> None:
        timer = self._running.pop(run_id, None)
        if timer is not None:
            timer.cancel()

    def capacity(self) -> Capacity:
        return Capacity(free_slots=self._slots - len(self._running), free_tokens=None)

    async def stop(self) -> None:
        for run_id in list(self._running):
            self.cancel(run_id)
        self._state = EngineState.STOPPED

    def memory_need(self) -> int:
        return 0

    def measured_memory(self) -> int | None:
        return 0

    def info(self) -> EngineInfo:
        return EngineInfo(context_window=self._window, max_output_tokens=self._window, dimensions=2)

    def running(self, run_id: str) -> bool:
        return run_id in self._running

    def schedule(self, run_id: str, step: _Script) -> None:
        self._later(run_id, self._delay_s, step)


class _Script:
    """A delayed run, a piece at a time."""

    def __init__(
        self,
        engine: NoopEngine,
        spec: RunSpec,
        prepared: Prepared,
        sink: Sink,
        pieces: list[str],
        matcher: StopMatcher,
    ) -> None:
        self._engine, self._spec, self._prepared, self._sink = engine, spec, prepared, sink
        self._pieces, self._matcher = pieces, matcher
        self._at = 0
        self._text: list[str] = []

    def next(self) -> None:
        if not self._engine.running(self._spec.run_id):
            return
        at = self._at
        if at < len(self._pieces):
            shown = self._matcher.feed(self._pieces[at])
            self._at += 1
            self._show(shown, at)
            if not self._matcher.stopped and self._at < len(self._pieces):
                self._engine.schedule(self._spec.run_id, self)
                return
        self._show(self._matcher.flush(), self._at)
        text = "".join(self._text)
        self._engine.end(self._spec, self._prepared, self._sink, text, self._at, stopped=self._matcher.stopped)

    def _show(self, text: str, index: int) -> None:
        if not text:
            return
        self._text.append(text)
        if self._spec.stream:
            ids = [index] if index < self._at else []
            self._sink.on_delta(Delta(run_id=self._spec.run_id, text=text, token_ids=ids, first_token_index=index))


def _words(text: str) -> int:
    return len(text.split())


def _count(messages: Any) -> int:
    found: list[Message] = list(messages)
    return sum(_words(message["content"]) + 1 for message in found)
