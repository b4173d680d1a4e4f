"""The worker's side of an engine whose model lives in a process: sends runs, receives events, reports its death."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from penstock.common.background import BackgroundTasks, reporting
from penstock.common.tasks import awake_timeout
from penstock.processors.engines.base import (
    Delta,
    Engine,
    EngineGone,
    EngineInfo,
    EngineState,
    Limits,
    Prepared,
    RunFailed,
    RunSpec,
    Sink,
)
from penstock.processors.engines.context import recent_past
from penstock.processors.engines.process.engine_process import EngineProcess
from penstock.processors.engines.sinks import GuardedSink
from penstock.schemas.errors import EngineFailed, PenstockError

logger = logging.getLogger(__name__)

STOP_PATIENCE_S = 2.0
HELD_UP_S = 2.0
CHARS_PER_TOKEN_AT_MOST = 32
"""No tokenizer puts more text than this into a token, on an average over a window: what lies beyond is not sent."""


class ChildEngine(Engine):
    """An Engine in a process of its own.

    A process without a sign of life for `silent_s` counts as stuck and is killed. Signs come from the thread that
    computes, or say that it has nothing to do. While it loads, its signs are processor time and reads.
    """

    prepares_inline = False

    def __init__(
        self,
        model: str,
        backend: str,
        source: str,
        options: Mapping[str, Any],
        *,
        limits: Limits,
        load_timeout_s: float = 300,
        silent_s: float = 60,
    ) -> None:
        self.model = model
        self._backend, self._source, self._options = backend, source, dict(options)
        self._limits = limits
        self._load_timeout_s = load_timeout_s
        self._silent_s = silent_s
        self._process: EngineProcess | None = None
        self._started: asyncio.Future[None] | None = None
        self._info = EngineInfo()
        self._measured: int | None = None
        self._peak: int | None = None
        self._runs: dict[str, tuple[RunSpec, GuardedSink]] = {}
        self._preparing: dict[int, asyncio.Future[Prepared]] = {}
        self._number = 0
        self._last_beat = 0.0
        self._silence: asyncio.TimerHandle | None = None
        self._death: asyncio.Task[None] | None = None
        self._tasks = BackgroundTasks()

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def left_pid(self) -> int | None:
        return None if self._process is None or not self._process.left else self._process.pid

    async def start(self) -> None:
        """Fork and load. Raises EngineFailed, or what loading raised. Cancelled, it kills the process at once."""
        if self._state is not EngineState.NEW:
            raise RuntimeError(f"the engine of {self.model} is {self._state}: it starts once")
        self._state = EngineState.STARTING
        self._started = asyncio.get_running_loop().create_future()
        self._process = EngineProcess(self.model, reporting(self._on_events), reporting(self._lost))
        try:
            async with awake_timeout(self._load_timeout_s):
                await self._process.start(self._backend, self._source, self._options, self._silent_s)
                self._last_beat = asyncio.get_running_loop().time()
                self._listen(self._silent_s)
                await self._started
        except TimeoutError as error:
            raise EngineFailed(f"{self.model} was not loaded within {self._load_timeout_s:g} s") from error
        except (OSError, EOFError) as error:
            why = str(error) or type(error).__name__
            raise EngineFailed(f"no process could be started for {self.model}: {why}") from error
        finally:
            if not self._started.done() or self._started.cancelled() or self._started.exception() is not None:
                self._started.cancel()  # nobody waits for it any more
                self._process.kill()

    async def stop(self) -> None:
        """What still runs on it ends silently; preparations on it fail with EngineGone."""
        ready = self._state is EngineState.READY
        self._state = EngineState.STOPPED
        if self._silence is not None:
            self._silence.cancel()
        if self._death is not None:
            self._death.cancel()
        if self._started is not None and not self._started.done():
            self._started.set_exception(EngineGone(f"the engine of {self.model} was stopped"))
            self._started.exception()  # retrieved here: perhaps nobody waits for it
        self._drop_all(f"the engine of {self.model} was stopped")
        if self._process is not None:
            # One that still loads has nothing to finish.
            await self._process.end(STOP_PATIENCE_S if ready else 0.0)

    def limits(self) -> Limits:
        return self._limits

    def measured_memory(self) -> int | None:
        return self._measured

    def peak_memory(self) -> int | None:
        return self._peak

    def info(self) -> EngineInfo:
        return self._info

    async def prepare(self, spec: RunSpec) -> Prepared:
        process = self._alive()
        spec = self._without_far_history(spec)
        self._number += 1
        number = self._number
        future: asyncio.Future[Prepared] = asyncio.get_running_loop().create_future()
        self._preparing[number] = future
        try:
            process.send(("prepare", number, spec))
            return await future
        except asyncio.CancelledError:
            process.send(("cancel", spec.run_id))
            raise
        finally:
            self._preparing.pop(number, None)

    def _without_far_history(self, spec: RunSpec) -> RunSpec:
        """The spec with what may fit of its history: a long conversation costs its window, here and in the process."""
        window = self._info.context_window
        if spec.history is None or window is None:
            return spec
        return replace(spec, history=recent_past(spec.history, chars=window * CHARS_PER_TOKEN_AT_MOST))

    def run(self, spec: RunSpec, prepared: Prepared, sink: Sink) -> None:
        if self._state is EngineState.DEAD and self._death is not None:
            return  # `on_died` is about to tell
        guarded = GuardedSink(spec.run_id, sink)
        try:
            process = self._alive()
        except EngineGone as error:
            guarded.failed(RunFailed(run_id=spec.run_id, error=error, retryable_here=True))
            return
        # What is prepared again because it was forgotten must come out alike.
        spec = spec if prepared.goes_on or spec.published is None else replace(spec, published=None)
        self._runs[spec.run_id] = (spec, guarded)
        process.send(("run", spec.run_id))

    def cancel(self, run_id: str) -> None:
        """A run, or what was only prepared."""
        run = self._runs.pop(run_id, None)
        if run is not None:
            run[1].close()
        if self._state is EngineState.READY and self._process is not None:
            self._process.send(("cancel", run_id))

    def _alive(self) -> EngineProcess:
        if self._process is None or self._state is not EngineState.READY:
            raise EngineGone(f"the engine of {self.model} is {self._state}", retry_after_s=0.5)
        return self._process

    def _on_events(self, events: list[tuple[Any, ...]]) -> None:
        for event in events:
            self._handle(event)

    def _handle(self, event: tuple[Any, ...]) -> None:
        match event:
            case ("delta", run_id, text, token_ids, first, calls, logprobs):  # a plain tuple: they are many
                run = self._runs.get(run_id)
                delta = Delta(
                    run_id=run_id,
                    text=text,
                    token_ids=token_ids,
                    first_token_index=first,
                    calls=calls,
                    logprobs=logprobs,
                )
                if run is not None and not run[1].delta(delta):
                    self.cancel(run_id)
            case ("progress", progress):
                run = self._runs.get(progress.run_id)
                if run is not None and not run[1].progress(progress):
                    self.cancel(progress.run_id)
            case ("preview", preview):
                run = self._runs.get(preview.run_id)
                if run is not None and not run[1].preview(preview):
                    self.cancel(preview.run_id)
            case ("finished", finished):
                run = self._runs.pop(finished.run_id, None)
                if run is not None:
                    run[1].finished(finished)
            case ("failed", failed):
                run = self._runs.pop(failed.run_id, None)
                if run is not None:
                    run[1].failed(failed)
            case ("prepared", number, answer):
                self._prepared(number, answer)
            case ("forgotten", run_id):
                run = self._runs.get(run_id)
                if run is not None and self._process is not None:
                    self._process.send(("run_anew", self._without_far_history(run[0])))
            case ("loading",):
                self._last_beat = asyncio.get_running_loop().time()
            case ("beat", measured, peak):
                self._last_beat, self._measured, self._peak = asyncio.get_running_loop().time(), measured, peak
            case ("out_of_memory", slots):
                logger.warning("engine.out_of_memory model=%s: its batches are smaller now", self.model)
                self.on_out_of_memory()
                if slots is not None:
                    self._limited(slots)
            case ("limits", slots):
                self._limited(slots)
            case ("batches", most):
                self._tell_batches(most)
            case ("ready", info, measured, peak):
                self._peak = peak
                self._ready(info, measured)
            case ("refused", error):
                if self._started is not None and not self._started.done():
                    self._started.set_exception(error)
            case _:
                logger.warning("engine.unknown_event model=%s kind=%s", self.model, event[:1])

    def _prepared(self, number: int, answer: Prepared | PenstockError) -> None:
        future = self._preparing.get(number)
        if future is None or future.done():
            return
        if isinstance(answer, PenstockError):
            future.set_exception(answer)
        else:
            future.set_result(answer)

    def _ready(self, info: EngineInfo, measured: int) -> None:
        if self._state is not EngineState.STARTING or self._started is None or self._started.done():
            return
        self._info, self._measured = info, measured
        self._state = EngineState.READY
        self._listen(self._silent_s)
        self._started.set_result(None)

    def _limited(self, slots: int) -> None:
        """It takes so many runs at once from now on."""
        if slots != self._limits.slots:
            self._tell_batches(slots)
            self._limits = replace(self._limits, slots=slots)
            self.on_limits(self._limits)

    def _tell_batches(self, most: int) -> None:
        """Operators see in the log that batches became smaller, and that they have grown back."""
        logger.info("engine.batches model=%s most=%d", self.model, most)

    def _check_silence(self) -> None:
        """Kill a process that gives no sign of life. It counts as dead from then on: SIGKILL may not end it soon."""
        if self._state not in (EngineState.STARTING, EngineState.READY) or self._process is None:
            return
        now = asyncio.get_running_loop().time()
        if self._silence is not None and now - self._silence.when() > HELD_UP_S:
            self._listen(self._silent_s)  # this process was stopped itself, and perhaps the engine with it
        elif now < self._last_beat + self._silent_s:
            self._listen(self._last_beat + self._silent_s - now)
        else:
            logger.error(
                "engine.silent model=%s state=%s seconds=%g runs=%d",
                self.model, self._state, self._silent_s, len(self._runs),
            )  # fmt: skip
            self._process.kill()
            self._lost(f"gave no sign of life for {self._silent_s:g} s")

    def _listen(self, seconds: float) -> None:
        if self._silence is not None:
            self._silence.cancel()
        self._silence = asyncio.get_running_loop().call_later(seconds, self._check_silence)

    def _lost(self, how: str = "ended") -> None:
        """The process is ending unasked. It takes no more runs; `on_died` follows once it has ended, or is left."""
        if self._state is EngineState.STARTING and self._started is not None and not self._started.done():
            self._started.set_exception(EngineFailed(f"the process of {self.model} {how} while it loaded"))
        if self._state is not EngineState.READY:
            return
        logger.error("engine.died model=%s runs=%d", self.model, len(self._runs))
        self._state = EngineState.DEAD
        self._measured = None
        if self._silence is not None:
            self._silence.cancel()
        self._drop_all(f"the engine of {self.model} died")
        self._death = self._tasks.start(self._tell_death(), f"death of {self.model}")

    async def _tell_death(self) -> None:
        assert self._process is not None
        code = await self._process.killed()
        logger.info("engine.exited model=%s exitcode=%s", self.model, code)
        self._death = None
        self.on_died(-1 if code is None else code)

    def _drop_all(self, reason: str) -> None:
        for future in self._preparing.values():
            if not future.done():
                future.set_exception(EngineGone(reason))
        runs, self._runs = self._runs, {}
        for _, sink in runs.values():
            sink.close()
