"""The worker's side of an engine process: starts it, speaks to it, notices its death, starts it again."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
from collections.abc import Callable, Mapping
from functools import cache
from multiprocessing.connection import Connection
from typing import Any

from penstock.processors.engines import child
from penstock.processors.engines.base import (
    Capacity,
    EngineInfo,
    EngineState,
    Prepared,
    RunFailed,
    RunSpec,
    Sink,
)
from penstock.schemas.errors import EngineFailed, PenstockError

logger = logging.getLogger(__name__)

BACKOFF_S = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0)


@cache
def fork_context() -> Any:
    """One fork server per worker, with the heavy modules imported before the first engine is forked from it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["penstock.processors.engines.preload"])
    return context


class ChildEngine:
    """An Engine whose model lives in a child process. Its death fails its own runs only."""

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
        on_died: Callable[[int | None], None] = lambda _: None,
        start_timeout_s: float = 300,
    ) -> None:
        self.model = model
        self._kind, self._source, self._options = kind, source, dict(options)
        self._memory_need = memory_need_bytes
        self._slots = slots
        self._on_died = on_died
        self._start_timeout_s = start_timeout_s
        self._state = EngineState.NEW
        self._process: Any = None
        self._conn: Connection | None = None
        self._info = EngineInfo()
        self._measured: int | None = None
        self._cache_tokens: int | None = None
        self._started: asyncio.Future[None] | None = None
        self._sinks: dict[str, tuple[Sink, int]] = {}
        self._preparing: dict[int, asyncio.Future[Prepared]] = {}
        self._number = 0
        self._used_tokens = 0
        self._deaths = 0
        self._restart: asyncio.Task[None] | None = None

    @property
    def state(self) -> EngineState:
        return self._state

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Fork and load. Raises EngineFailed when the model cannot be loaded."""
        loop = asyncio.get_running_loop()
        self._state = EngineState.STARTING
        self._started = loop.create_future()
        # The first start imports torch in the fork server: seconds, which must not hold up the loop.
        await asyncio.to_thread(self._spawn)
        assert self._conn is not None
        loop.add_reader(self._conn.fileno(), self._on_readable)
        try:
            await asyncio.wait_for(asyncio.shield(self._started), self._start_timeout_s)
        except TimeoutError as error:
            await self.stop()
            raise EngineFailed(f"{self.model} was not loaded within {self._start_timeout_s:g} s") from error

    def _spawn(self) -> None:
        ours, theirs = multiprocessing.Pipe()
        process = fork_context().Process(
            target=child.main, args=(theirs, self._kind, self._source, self._options), name=f"engine-{self.model}"
        )
        process.start()
        theirs.close()
        self._process, self._conn = process, ours

    async def prepare(self, spec: RunSpec) -> Prepared:
        self._number += 1
        number = self._number
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
        """End the process: asked first, then made to."""
        self._state = EngineState.STOPPED
        if self._restart is not None:
            self._restart.cancel()
        if self._process is None:
            return
        try:
            if self._conn is not None:
                asyncio.get_running_loop().remove_reader(self._conn.fileno())
                self._conn.send(("stop",))
        except OSError:
            logger.debug("engine.gone_already model=%s", self.model)
        await asyncio.to_thread(self._reap, 3.0)

    def _reap(self, patience_s: float) -> None:
        process = self._process
        process.join(patience_s)
        if process.is_alive():
            process.kill()
            process.join(5)
        if self._conn is not None:
            self._conn.close()
            self._conn = None

    def memory_need(self) -> int:
        return self._memory_need

    def measured_memory(self) -> int | None:
        return self._measured

    def info(self) -> EngineInfo:
        return self._info

    # -- the pipe

    def _send(self, message: tuple[Any, ...]) -> None:
        if self._conn is None or self._state is not EngineState.READY:
            raise EngineFailed(f"the engine of {self.model} is {self._state}", retry_after_s=0.5)
        try:
            self._conn.send(message)
        except OSError as error:
            raise EngineFailed(f"the engine of {self.model} is gone") from error

    def _on_readable(self) -> None:
        conn = self._conn
        if conn is None:
            return
        try:
            while conn.poll():
                for event in conn.recv():
                    self._handle(event)
        except (EOFError, OSError):
            self._died()

    def _handle(self, event: tuple[Any, ...]) -> None:
        match event:
            case ("delta", delta):
                found = self._sinks.get(delta.run_id)
                if found is not None:
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
        self._info, self._measured = info, measured
        self._cache_tokens = self._options.get("cache_tokens") if self._kind == "text" else None
        self._state = EngineState.READY
        if self._started is not None and not self._started.done():
            self._started.set_result(None)

    def _end(self, run_id: str) -> Sink | None:
        found = self._sinks.pop(run_id, None)
        if found is None:
            return None
        self._used_tokens -= found[1]
        return found[0]

    # -- death

    def _died(self) -> None:
        """The process ended unasked: its runs fail (the worker runs them again), and it is started again."""
        if self._conn is not None:
            asyncio.get_running_loop().remove_reader(self._conn.fileno())
            self._conn.close()
            self._conn = None
        if self._state is EngineState.STOPPED:
            return
        was_ready = self._state is EngineState.READY
        self._state = EngineState.DEAD
        self._process.join(1)
        code = self._process.exitcode
        logger.error("engine.died model=%s exitcode=%s runs=%d", self.model, code, len(self._sinks))
        error = EngineFailed(f"the engine of {self.model} died (exit code {code})")
        if self._started is not None and not self._started.done():
            self._started.set_exception(error)
        for future in list(self._preparing.values()):
            if not future.done():
                future.set_exception(error)
        sinks, self._sinks, self._used_tokens = self._sinks, {}, 0
        if was_ready:
            self._deaths += 1
            self._restart = asyncio.get_running_loop().create_task(self._start_again())
        for run_id, (sink, _) in sinks.items():
            sink.on_failed(RunFailed(run_id=run_id, error=error, retryable_here=True))
        self._on_died(code)

    async def _start_again(self) -> None:
        for delay_s in (*BACKOFF_S[min(self._deaths - 1, len(BACKOFF_S) - 1) :], *(BACKOFF_S[-1:] * 1000)):
            await asyncio.sleep(delay_s)
            try:
                await self.start()
            except PenstockError as error:
                logger.error("engine.restart_failed model=%s error=%s", self.model, error)
                continue
            logger.info("engine.restarted model=%s deaths=%d", self.model, self._deaths)
            return
