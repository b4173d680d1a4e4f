"""The worker's side of an engine process: starts it, speaks to it, notices its death, starts it again."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import socket
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from penstock.processors.engines import child
from penstock.processors.engines.base import (
    Capacity,
    Delta,
    EngineInfo,
    EngineState,
    Prepared,
    RunFailed,
    RunSpec,
    Sink,
)
from penstock.processors.engines.channel import Channel
from penstock.schemas.errors import EngineFailed, PenstockError

logger = logging.getLogger(__name__)

BACKOFF_S = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0)
HEALTHY_AFTER_S = 60.0
"""An engine that lived so long had no trouble starting: the next backoff begins anew."""


@cache
def fork_context() -> Any:
    """One fork server per worker, with the heavy modules imported before the first engine is forked from it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["penstock.processors.engines.preload"])
    return context


class _Died(EngineFailed):
    """The process ended unasked while it worked on this."""


class ChildEngine:
    """An Engine whose model lives in a child process. Its death fails its own runs only.

    `on_died` gets the exit code after each death that nobody asked for. An engine that says nothing for `silent_s` is
    taken for stuck and killed.
    """

    prepares_inline = False

    def __init__(
        self,
        model: str,
        kind: str,
        source: str,
        options: Mapping[str, Any],
        *,
        memory_need_bytes: int,
        slots: int,
        start_timeout_s: float = 300,
        silent_s: float = 60,
    ) -> None:
        self.model = model
        self._kind, self._source, self._options = kind, source, dict(options)
        self._memory_need = memory_need_bytes
        self._slots = slots
        self.on_died: Callable[[int | None], None] = lambda _: None
        self._start_timeout_s = start_timeout_s
        self._silent_s = silent_s
        self._state = EngineState.NEW
        self._process: Any = None
        self._channel: Channel | None = None
        self._info = EngineInfo()
        self._measured: int | None = None
        self._cache_tokens: int | None = None
        self._started: asyncio.Future[None] | None = None
        self._sinks: dict[str, tuple[Sink, int]] = {}
        self._preparing: dict[int, asyncio.Future[Prepared]] = {}
        self._number = 0
        self._used_tokens = 0
        self._deaths = 0
        self._ready_at = 0.0
        self._heard = False
        self._silence: asyncio.TimerHandle | None = None
        self._restart: asyncio.Task[None] | None = None
        self._usable = asyncio.Event()

    @property
    def state(self) -> EngineState:
        return self._state

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Fork and load. Raises EngineFailed, or what loading raised, when the model cannot be loaded."""
        self._state = EngineState.STARTING
        self._started = asyncio.get_running_loop().create_future()
        self._started.add_done_callback(_retrieve)
        ours, theirs = socket.socketpair()
        try:
            # The first start imports torch in the fork server: seconds, which must not hold up the loop.
            await asyncio.to_thread(self._spawn, theirs)
            self._channel = await Channel.open(ours, self._on_events, self._lost)
            await asyncio.wait_for(asyncio.shield(self._started), self._start_timeout_s)
        except TimeoutError as error:
            self._kill()
            raise EngineFailed(f"{self.model} was not loaded within {self._start_timeout_s:g} s") from error
        except (OSError, EOFError) as error:
            raise EngineFailed(f"no process could be started for {self.model}: {type(error).__name__}") from error
        finally:
            theirs.close()
            if self._channel is None:
                ours.close()  # a process that was started all the same sees this and ends

    def _spawn(self, theirs: socket.socket) -> None:
        process = fork_context().Process(
            target=child.main, args=(theirs, self._kind, self._source, self._options), name=f"engine-{self.model}"
        )
        process.start()
        self._process = process

    async def prepare(self, spec: RunSpec) -> Prepared:
        try:
            return await self._prepare(spec)
        except _Died:  # somebody else's fault, most likely: to fail now would cost the request an attempt
            return await self._prepare(spec)

    async def _prepare(self, spec: RunSpec) -> Prepared:
        self._number += 1
        number = self._number
        if self._state in (EngineState.STARTING, EngineState.DEAD):
            try:
                await asyncio.wait_for(self._usable.wait(), self._start_timeout_s)
            except TimeoutError as error:
                raise EngineFailed(f"the engine of {self.model} does not come back") from error
        future: asyncio.Future[Prepared] = asyncio.get_running_loop().create_future()
        self._preparing[number] = future
        try:
            self._send(("prepare", number, spec))
            return await future
        finally:
            self._preparing.pop(number, None)

    def run(self, spec: RunSpec, prepared: Prepared, sink: Sink) -> None:
        self._sinks[spec.run_id] = (sink, prepared.need_tokens)
        self._used_tokens += prepared.need_tokens
        try:
            self._send(("run", spec))
        except EngineFailed as error:
            self._end(spec.run_id)
            sink.on_failed(RunFailed(run_id=spec.run_id, error=error, retryable_here=True))

    def cancel(self, run_id: str) -> None:
        if self._end(run_id) is not None and self._state is EngineState.READY:
            self._send(("cancel", run_id))

    def capacity(self) -> Capacity:
        if self._state is not EngineState.READY:
            return Capacity(free_slots=0, free_tokens=None)
        free = None if self._cache_tokens is None else self._cache_tokens - self._used_tokens
        return Capacity(free_slots=self._slots - len(self._sinks), free_tokens=free)

    async def stop(self) -> None:
        """End the process: asked first, then made to. What still runs on it fails."""
        self._state = EngineState.STOPPED
        self._usable.set()
        if self._silence is not None:
            self._silence.cancel()
        if self._restart is not None:
            self._restart.cancel()
        if self._channel is not None:
            self._channel.send(("stop",))
        self._fail_all(EngineFailed(f"the engine of {self.model} was stopped"))
        await asyncio.to_thread(self._reap, 2.0)
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _reap(self, patience_s: float) -> int | None:
        """Wait for the process, then end it by force; its exit code."""
        process = self._process
        if process is None:
            return None
        for insist in (lambda: None, process.terminate, process.kill):
            insist()
            process.join(patience_s)
            if process.exitcode is not None:
                break
        return process.exitcode

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    def memory_need(self) -> int:
        return self._memory_need

    def measured_memory(self) -> int | None:
        return self._measured

    def info(self) -> EngineInfo:
        return self._info

    # -- the channel

    def _send(self, message: tuple[Any, ...]) -> None:
        if self._channel is None or self._state is not EngineState.READY:
            raise EngineFailed(f"the engine of {self.model} is {self._state}", retry_after_s=0.5)
        self._channel.send(message)

    def _on_events(self, events: list[tuple[Any, ...]]) -> None:
        self._heard = True
        for event in events:
            self._handle(event)

    def _handle(self, event: tuple[Any, ...]) -> None:
        match event:
            case ("delta", run_id, text, token_ids, first):  # a plain tuple: it is sent for each token
                found = self._sinks.get(run_id)
                if found is not None:
                    delta = Delta(run_id=run_id, text=text, token_ids=token_ids, first_token_index=first)
                    found[0].on_delta(delta)
            case ("finished", finished):
                sink = self._end(finished.run_id)
                if sink is not None:
                    sink.on_finished(finished)
            case ("failed", failed):
                sink = self._end(failed.run_id)
                if sink is not None:
                    sink.on_failed(failed)
            case ("prepared", number, answer):
                future = self._preparing.get(number)
                if future is not None and not future.done():
                    if isinstance(answer, PenstockError):
                        future.set_exception(answer)
                    else:
                        future.set_result(answer)
            case ("ready", info, measured):
                self._ready(info, measured)
            case ("refused", error):
                if self._started is not None and not self._started.done():
                    self._started.set_exception(error)
            case ("memory", measured):
                self._measured = measured
            case _:
                logger.warning("engine.unknown_event model=%s kind=%s", self.model, event[:1])

    def _ready(self, info: EngineInfo, measured: int) -> None:
        if self._state is not EngineState.STARTING:
            return
        loop = asyncio.get_running_loop()
        self._info, self._measured = info, measured
        self._cache_tokens = self._options.get("cache_tokens") if self._kind == "text" else None
        self._state = EngineState.READY
        self._ready_at = loop.time()
        self._silence = loop.call_later(self._silent_s, self._check_silence)
        self._usable.set()
        if self._started is not None and not self._started.done():
            self._started.set_result(None)

    def _end(self, run_id: str) -> Sink | None:
        found = self._sinks.pop(run_id, None)
        if found is None:
            return None
        self._used_tokens -= found[1]
        return found[0]

    # -- death

    def _check_silence(self) -> None:
        """Kill a process that is alive but stuck; its death takes the usual way."""
        if self._state is not EngineState.READY:
            return
        if not self._heard:
            logger.error("engine.silent model=%s seconds=%g", self.model, self._silent_s)
            self._kill()
            return
        self._heard = False
        self._silence = asyncio.get_running_loop().call_later(self._silent_s, self._check_silence)

    def _lost(self) -> None:
        """The process ended unasked: its runs fail (the worker runs them again), and it is started again."""
        self._channel = None
        if self._state is EngineState.STOPPED:
            return
        loop = asyncio.get_running_loop()
        was_ready = self._state is EngineState.READY
        self._state = EngineState.DEAD
        self._measured = None  # all of it came back
        self._usable.clear()
        if self._silence is not None:
            self._silence.cancel()
        error = _Died(f"the engine process of {self.model} died")
        if self._started is not None and not self._started.done():
            self._started.set_exception(error)
        if was_ready:
            self._deaths = 1 if loop.time() - self._ready_at > HEALTHY_AFTER_S else self._deaths + 1
            logger.error("engine.died model=%s runs=%d deaths=%d", self.model, len(self._sinks), self._deaths)
            self._restart = loop.create_task(self._start_again(), name=f"restart {self.model}")
        self._fail_all(error)

    def _fail_all(self, error: EngineFailed) -> None:
        for future in list(self._preparing.values()):
            if not future.done():
                future.set_exception(error)
        sinks, self._sinks, self._used_tokens = self._sinks, {}, 0
        for run_id, (sink, _) in sinks.items():
            sink.on_failed(RunFailed(run_id=run_id, error=error, retryable_here=True))

    async def _start_again(self) -> None:
        while True:
            code = await asyncio.to_thread(self._reap, 1.0)
            logger.info("engine.exited model=%s exitcode=%s", self.model, code)
            self.on_died(code)
            await asyncio.sleep(BACKOFF_S[min(self._deaths, len(BACKOFF_S)) - 1])
            try:
                await self.start()
            except PenstockError as error:
                logger.error("engine.restart_failed model=%s error=%s", self.model, error)
                self._deaths += 1
            else:
                logger.info("engine.restarted model=%s deaths=%d", self.model, self._deaths)
                return


def _retrieve(future: asyncio.Future[None]) -> None:
    """A start that nobody waits for any more may fail without a complaint from asyncio."""
    if not future.cancelled():
        future.exception()
