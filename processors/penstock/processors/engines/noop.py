"""The no-op engine: a scripted text in place of a model, for benchmarks and tests of everything around it.

Options: tokens (4), delay_ms between tokens (0), first_delay_ms (0), load_ms that its load takes (0), slots (256),
chars (the least length of a token's text), echo (false; true: answer with the context it was given, so that tests see
it), hold (the path of a file: while it exists no load ends, and no run that has delays).
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.common.tasks import set_within
from penstock.processors.core.work.published_prefix import PublishedPrefix
from penstock.processors.engines.base import (
    Delta,
    Engine,
    EngineInfo,
    EngineState,
    Finished,
    Limits,
    Message,
    Prepared,
    RunFailed,
    RunSpec,
    Sink,
    refuse_images,
    refuse_unsupported,
    usage_of,
)
from penstock.processors.engines.context import build_context
from penstock.processors.engines.sinks import GuardedSink
from penstock.processors.engines.stops import StopMatcher
from penstock.schemas.errors import EngineFailed, InternalError
from penstock.schemas.texts import encodable

logger = logging.getLogger(__name__)

WINDOW = 100_000
HELD_LOOK_S = 0.05


class NoopEngine(Engine):
    """Runs on the event loop itself; without a delay a run is over before `run` returns."""

    prepares_inline = True

    def __init__(self, model: str, options: Mapping[str, Any]) -> None:
        self.model = model
        self._tokens = int(options.get("tokens", 4))
        self._delay_s = float(options.get("delay_ms", 0)) / 1000
        self._first_delay_s = float(options.get("first_delay_ms", 0)) / 1000
        self._load_s = float(options.get("load_ms", 0)) / 1000
        self._slots = int(options.get("slots", 256))
        self._hold = Path(options["hold"]) if "hold" in options else None
        self._echo = bool(options.get("echo", False))
        self._chars = int(options.get("chars", 0))
        self._window = int(options.get("window", WINDOW))
        self._running: dict[str, tuple[asyncio.TimerHandle, GuardedSink]] = {}
        self._stopping = asyncio.Event()

    async def start(self) -> None:
        """Raises EngineFailed if `stop` is called before the load has ended."""
        self._state = EngineState.STARTING
        wait_s = self._load_s
        while wait_s or self._is_held():
            if await set_within(self._stopping, wait_s or HELD_LOOK_S):
                raise EngineFailed(f"{self.model} was stopped while it was loaded")
            wait_s = 0.0
        self._state = EngineState.READY

    async def prepare(self, spec: RunSpec) -> Prepared:
        # Never awaits: the worker relies on `prepares_inline`.
        refuse_images(spec)
        refuse_unsupported(spec)
        limit = int(spec.params.get("max_tokens", self._tokens))
        if spec.messages is None:
            tokens = _words(spec.prompt or "".join(spec.inputs or []))
            return self._goes_on(spec, Prepared(run_id=spec.run_id, prompt_tokens=tokens, need_tokens=0))
        context = build_context(
            spec.history,
            spec.messages,
            window_tokens=self._window,
            max_output_tokens=min(limit, self._window // 2),
            limits=spec.context,
            count=_count,
        )
        prepared = Prepared(
            run_id=spec.run_id,
            prompt_tokens=context.prompt_tokens,
            need_tokens=0,
            held=context.held,
            messages=context.messages,
        )
        return self._goes_on(spec, prepared)

    def _goes_on(self, spec: RunSpec, prepared: Prepared) -> Prepared:
        """Whether the script begins with what was published."""
        if spec.published is None:
            return prepared
        pieces = self._pieces(spec, prepared)
        goes_on = "".join(pieces[: len(spec.published.token_ids)]) == spec.published.text and not spec.params.get(
            "stop"
        )
        return replace(prepared, goes_on=goes_on)

    def run(self, spec: RunSpec, prepared: Prepared, sink: Sink) -> None:
        script = _Script(spec, prepared, GuardedSink(spec.run_id, sink), self._pieces(spec, prepared), echo=self._echo)
        if prepared.goes_on and spec.published is not None:
            script.go_on_from(spec.published)
        if not self._delay_s and not self._first_delay_s:
            script.show_all()
            script.end()
            return
        first_delay_s = self._first_delay_s or self._delay_s
        if script.is_shown_at_end:  # nobody sees the tokens come: one timer for all of them
            self._later(script, first_delay_s + script.waits * self._delay_s)
        else:
            self._later(script, first_delay_s)

    def _later(self, script: _Script, delay_s: float) -> None:
        timer = asyncio.get_running_loop().call_later(delay_s, self._step, script)
        self._running[script.run_id] = (timer, script.sink)

    def _is_held(self) -> bool:
        return self._hold is not None and self._hold.exists()

    def _step(self, script: _Script) -> None:
        if script.ends_next and self._is_held():
            self._later(script, HELD_LOOK_S)
            return
        try:
            if script.is_shown_at_end:
                script.show_all()
                script.end()
            elif not script.show_next():
                script.end()
        except Exception as error:  # in a timer nobody hears it
            logger.exception("noop.failed run=%s", script.run_id)
            failure = InternalError(f"{type(error).__name__} in the script")
            script.sink.failed(RunFailed(run_id=script.run_id, error=failure, retryable_here=False))
        if script.sink.over:
            self._running.pop(script.run_id, None)
        else:
            self._later(script, self._delay_s)

    def _pieces(self, spec: RunSpec, prepared: Prepared) -> list[str]:
        limit = int(spec.params.get("max_tokens", 1 << 30))
        if self._echo:
            text = json.dumps(prepared.messages) if prepared.messages is not None else encodable(spec.prompt or "")
            return [text[at : at + 16] for at in range(0, len(text), 16)]
        return [f"word{number} ".ljust(self._chars) for number in range(min(self._tokens, limit))]

    def cancel(self, run_id: str) -> None:
        running = self._running.pop(run_id, None)
        if running is not None:
            timer, sink = running
            timer.cancel()
            sink.close()

    def limits(self) -> Limits:
        return Limits(slots=self._slots)

    async def stop(self) -> None:
        self._stopping.set()
        for run_id in list(self._running):
            self.cancel(run_id)
        self._state = EngineState.STOPPED

    def measured_memory(self) -> int | None:
        return 0

    def peak_memory(self) -> int | None:
        return 0

    def info(self) -> EngineInfo:
        return EngineInfo(context_window=self._window, max_output_tokens=self._window, dimensions=2)


class _Script:
    """One run: its pieces, shown one at a time or all at once."""

    def __init__(self, spec: RunSpec, prepared: Prepared, sink: GuardedSink, pieces: list[str], *, echo: bool) -> None:
        self.sink = sink
        self._spec, self._prepared, self._pieces, self._echo = spec, prepared, pieces, echo
        self._matcher = StopMatcher(spec.params.get("stop") or ())
        self._at = 0
        self._text: list[str] = []

    @property
    def run_id(self) -> str:
        return self._spec.run_id

    @property
    def is_shown_at_end(self) -> bool:
        """Whether its tokens are seen only together: nothing is streamed, and no stop text can end it early."""
        return not self._spec.stream and not self._spec.params.get("stop")

    @property
    def ends_next(self) -> bool:
        """Whether its next step is its last one."""
        return self.is_shown_at_end or self._at >= len(self._pieces) - 1

    @property
    def waits(self) -> int:
        """Delays between its tokens."""
        return max(0, len(self._pieces) - 1)

    def go_on_from(self, published: PublishedPrefix) -> None:
        self._at, self._text = len(published.token_ids), [published.text]

    def show_all(self) -> None:
        at = self._at
        shown = self._matcher.feed("".join(self._pieces[at:]))
        self._at = len(self._pieces)
        self._show(shown + self._matcher.flush(), list(range(at, self._at)), at)

    def show_next(self) -> bool:
        """False when that was all."""
        at = self._at
        if at < len(self._pieces):
            self._at += 1
            self._show(self._matcher.feed(self._pieces[at]), [at], at)
        if not self._matcher.stopped and self._at < len(self._pieces):
            return True
        self._show(self._matcher.flush(), [], self._at)
        return False

    def _show(self, text: str, ids: list[int], index: int) -> None:
        if text:
            self._text.append(text)
            if self._spec.stream:
                delta = Delta(run_id=self.run_id, text=text, token_ids=ids, first_token_index=index)
                self.sink.delta(delta)

    def end(self) -> None:
        limit = int(self._spec.params.get("max_tokens", 1 << 30))
        stopped = self._matcher.stopped or self._echo or self._at < limit
        output: dict[str, Any] = {"text": "".join(self._text)}
        if self._spec.task == "embedding":
            output = {"embeddings": [[1.0, 0.0] for _ in self._spec.inputs or []], "dimensions": 2}
        self.sink.finished(
            Finished(
                run_id=self.run_id,
                output=output,
                finish_reason="stop" if stopped else "length",
                usage=usage_of(self._prepared.prompt_tokens, self._at),
            )
        )


def _words(text: str) -> int:
    return len(text.split())


def _count(messages: Any) -> int:
    listed: list[Message] = list(messages)
    return sum(_words(message["content"]) + 1 for message in listed)
