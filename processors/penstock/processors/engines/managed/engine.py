"""The managed engine: a server of the user's choice (vLLM, SGLang, llama.cpp's, …) that Penstock starts and ends.

It gets its grant in its command, is waited for until its health is good, and is spoken to in OpenAI's protocol, as
remote servers are (`remote`); slots are its admission, as it has a queue of its own. Unloading ends its whole tree of
processes. What it says goes to a log file, and its last line to the worker's log while it loads.

Options: command (or the model's source), env, health (/health), port (a free one), devices (1: so many, with a grant on
each), load_timeout_s (600), grace_s (5), silent_s (60), and those of remote models (slots, remote_model, window,
timeout_s, headers, api_key_env).
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

from penstock.common.background import BackgroundTasks
from penstock.common.tasks import awake_timeout
from penstock.processors.core.fleet.ledger import CannotLoad
from penstock.processors.engines.base import (
    Engine,
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
from penstock.processors.engines.managed.options import (
    HOST,
    ManagedOptions,
    fill,
    memory_fraction,
    read_options,
    server_environment,
)
from penstock.processors.engines.managed.server_process import ServerProcess, free_port
from penstock.processors.engines.remote.engine import RemoteEngine
from penstock.processors.settings import ImagesSection
from penstock.schemas.errors import EngineFailed, InvalidRequest

logger = logging.getLogger(__name__)

LOOK_S = (0.05, 1.0)
"""How often a server that loads is asked for its health: at first, and later on."""
TOLD_S = 5.0
"""Interval at which the server's output is reported while it loads."""
CHECK_S = 5.0
"""How often its health and its memory are looked at when it is ready."""
PROBE_TIMEOUT_S = 5.0
DEATH_S = 1.0
"""So long a run that broke off waits to hear whether the server has died: then the run is not at fault."""
NOT_EXECUTABLE = 127


class ManagedEngine(Engine):
    """A server in a tree of processes of its own. `on_progress` gets the lines that it prints while it loads."""

    prepares_inline = True

    def __init__(
        self,
        model: str,
        source: str,
        options: Mapping[str, Any],
        *,
        devices: Sequence[str] = ("cpu",),
        granted_bytes: int = 0,
        total_bytes: int = 0,
        addresses: Sequence[str] | None = None,
        logs: Path = Path("logs"),
        images: ImagesSection | None = None,
    ) -> None:
        """`granted_bytes` is the grant on each of `devices`, `total_bytes` what the smallest of them has.

        `addresses`: what CUDA_VISIBLE_DEVICES lists for them; nothing where they are no cards.

        Raises InvalidRequest.
        """
        self.model = model
        self.on_progress: Callable[[str], None] = lambda line: None
        self._conf: ManagedOptions = read_options(model, source, options)
        if len(devices) != self._conf.devices:
            raise InvalidRequest(
                f"{model} takes {self._conf.devices} devices and was granted {len(devices)}", param="models"
            )
        self._options = dict(options)
        self._devices, self._granted_bytes, self._total_bytes = tuple(devices), granted_bytes, total_bytes
        self._addresses = addresses
        self._images = images
        self._on_card = devices[0].startswith("cuda") if addresses is None else bool(addresses)
        self._log = logs / f"{_file_name(model)}.log"
        self._process: ServerProcess | None = None
        self._remote: RemoteEngine | None = None
        self._url = ""
        self._measured: int | None = None
        self._peak: int | None = None
        self._exited: asyncio.Future[int] | None = None
        self._checks: asyncio.Task[None] | None = None
        self._tasks = BackgroundTasks()
        self._runs: dict[str, _RunSink] = {}

    @property
    def pid(self) -> int | None:
        """The root of its tree of processes."""
        return None if self._process is None else self._process.pid

    @property
    def left_pid(self) -> int | None:
        return None if self._process is None or not self._process.left else self._process.pid

    async def start(self) -> None:
        """Start the server, wait until it is healthy. Raises CannotLoad, EngineFailed. Cancelled, it ends the tree."""
        if self._state is not EngineState.NEW:
            raise RuntimeError(f"the engine of {self.model} is {self._state}: it starts once")
        self._state = EngineState.STARTING
        self._exited = asyncio.get_running_loop().create_future()
        try:
            port = self._free_port()
            await self._launch(port)
            async with awake_timeout(self._conf.load_timeout_s):
                await self._until_healthy(port)
            self._remote = await self._connect()
        except TimeoutError as error:
            raise self._load_failed(f"was not healthy within {self._conf.load_timeout_s:g} s") from error
        finally:
            if self._remote is None and self._process is not None:
                await asyncio.shield(self._process.end(orderly=False))
        if self._state is EngineState.STARTING:  # else it was stopped meanwhile
            self._state = EngineState.READY
            self._checks = self._tasks.start(self._check_forever(), f"checks of {self.model}")

    def _free_port(self) -> int:
        try:
            return free_port(HOST, self._conf.port)
        except OSError as error:
            raise EngineFailed(
                f"the port {self._conf.port} of {self.model} is taken: another program listens on it"
            ) from error

    async def _launch(self, port: int) -> None:
        command = [self._filled(part, port) for part in self._conf.command]
        own = {name: self._filled(value, port) for name, value in self._conf.env.items()}
        env = server_environment(os.environ, self._devices, own, self._addresses)
        if shutil.which(command[0], path=env.get("PATH")) is None:
            raise CannotLoad(f"the program {command[0]} of {self.model} is not there, or cannot be executed")
        self._url = f"http://{HOST}:{port}"
        self._process = ServerProcess(self._log, self._on_exit, grace_s=self._conf.grace_s)
        logger.info("managed.starting model=%s program=%s port=%d log=%s", self.model, command[0], port, self._log)
        try:
            await self._process.start(command, env)
        except OSError as error:
            raise EngineFailed(f"no process could be started for {self.model}: {error.strerror}") from error

    def _filled(self, text: str, port: int) -> str:
        values = {
            "memory_fraction": memory_fraction(self._granted_bytes, self._total_bytes),
            "memory_bytes": str(self._granted_bytes),
            "port": str(port),
            "host": HOST,
            # Its own cards are all that it sees, so they begin at 0.
            "device": "cuda:0" if self._on_card else "cpu",
            "devices": str(len(self._devices)),
            "model": self._conf.model,
            "id": self.model,
            "slots": str(self.limits().slots),
            "threads": str(self._options.get("threads", 1)),
        }
        return fill(self.model, text, values)

    async def _until_healthy(self, port: int) -> None:
        """Raises EngineFailed when it ends, when it hangs, or when somebody else answers on its port."""
        assert self._process is not None
        looks = self._looks_while_loading()
        is_healthy = False
        while not is_healthy:
            try:
                async with awake_timeout(self._conf.silent_s):
                    is_healthy = await anext(looks)
            except TimeoutError as error:
                logger.error(
                    "engine.silent model=%s state=%s seconds=%g runs=0", self.model, self._state, self._conf.silent_s
                )
                raise self._load_failed(f"gave no sign of life for {self._conf.silent_s:g} s") from error
        await looks.aclose()
        await self._wait_for_exit(0)
        await self._measure()
        if not await self._process.listens(port):
            raise self._load_failed(f"does not listen on its port {port}: another program answers there")

    async def _looks_while_loading(self) -> AsyncGenerator[bool]:
        """Yields at each sign of life whether it is healthy.

        A server that loads large weights may answer nobody and say nothing for minutes, but it computes or reads. So
        each of these is a sign: an answer on its port, whatever its status; output; processor time or reads of any
        process of its tree. One that sleeps or is stopped shows none of them.
        """
        assert self._process is not None
        loop = asyncio.get_running_loop()
        wait_s, told_at, told, before = LOOK_S[0], loop.time(), "", None
        async with httpx.AsyncClient(timeout=PROBE_TIMEOUT_S, trust_env=False) as http:
            while True:
                status = await self._status(http)
                await self._measure()
                signs = await self._process.signs_of_life()
                if status is not None or signs != before:
                    before = signs
                    yield status is not None and httpx.codes.is_success(status)
                if loop.time() - told_at >= TOLD_S:
                    line, told_at = self._process.last_line(), loop.time()
                    if line != told:
                        told = line
                        logger.info("managed.loading model=%s says=%s", self.model, line)
                        self.on_progress(line)
                await self._wait_for_exit(wait_s)
                wait_s = min(LOOK_S[1], wait_s * 1.2)

    async def _wait_for_exit(self, seconds: float) -> None:
        """Raises what it means that a server has ended that should load."""
        assert self._exited is not None
        await asyncio.wait([self._exited], timeout=seconds)
        if self._exited.done():
            code = self._exited.result()
            kind = CannotLoad if code == NOT_EXECUTABLE else EngineFailed
            raise self._load_failed(f"ended with exit code {code} before it was healthy", kind)

    def _load_failed(self, what: str, kind: type[EngineFailed] = EngineFailed) -> EngineFailed:
        """No error quotes its log, which may name paths of this machine. The worker's log has it."""
        said = "" if self._process is None else self._process.last_line()
        logger.error("managed.load_failed model=%s: it %s log=%s last=%s", self.model, what, self._log, said)
        return kind(f"the server of {self.model} {what}; the worker's log says what it said")

    async def _healthy(self, http: httpx.AsyncClient) -> bool:
        status = await self._status(http)
        return status is not None and httpx.codes.is_success(status)

    async def _status(self, http: httpx.AsyncClient) -> int | None:
        """Of its answer about its health; None if it does not answer."""
        try:
            return (await http.get(self._url + self._conf.health)).status_code
        except httpx.HTTPError:
            return None

    async def _connect(self) -> RemoteEngine:
        """The engine that speaks to it. A server that knows its one model by another name is asked by that name."""
        options = {"patience_s": 10, **self._options}
        if "remote_model" not in options:
            names = await self._served_names()
            if len(names) == 1 and self.model not in names:
                options["remote_model"] = names[0]
        remote = RemoteEngine(self.model, self._url, options, images=self._images)
        remote.on_busy = lambda seconds: self.on_busy(seconds)
        remote.on_limits = lambda limits: self.on_limits(limits)
        await remote.start()
        return remote

    async def _served_names(self) -> list[str]:
        try:
            async with httpx.AsyncClient(timeout=PROBE_TIMEOUT_S, trust_env=False) as http:
                listed = (await http.get(self._url + "/v1/models")).json()
            return [str(entry["id"]) for entry in listed["data"]]
        except (httpx.HTTPError, ValueError, KeyError, TypeError):
            return []

    async def _check_forever(self) -> None:
        """Measure it, and end one that is sick for too long; its death takes the usual way."""
        assert self._process is not None
        try:
            async with httpx.AsyncClient(timeout=PROBE_TIMEOUT_S, trust_env=False) as http:
                while self._state is EngineState.READY:
                    async with awake_timeout(self._conf.silent_s):
                        await self._until_well(http)
                    await asyncio.sleep(CHECK_S)
        except TimeoutError:
            logger.error("managed.sick model=%s seconds=%g: it is ended", self.model, self._conf.silent_s)
            await self._process.end(orderly=False)
            if self._process.left:  # it counts as dead: nothing else would tell
                self._on_exit(-1)

    async def _until_well(self, http: httpx.AsyncClient) -> None:
        """Until it is healthy, or no longer ready."""
        while self._state is EngineState.READY:
            await self._measure()
            if await self._healthy(http):
                return
            await asyncio.sleep(CHECK_S)

    async def _measure(self) -> None:
        """What the tree holds of main memory; of a card the driver says it, not its processes."""
        assert self._process is not None
        used_bytes = await self._process.look()
        self._measured = used_bytes if self._devices[0] == "cpu" else None
        if self._measured is not None:
            self._peak = max(self._peak or 0, self._measured)

    def _on_exit(self, code: int) -> None:
        """Its tree has ended, asked or not, or is left."""
        if self._exited is not None and not self._exited.done():
            self._exited.set_result(code)
        if self._state is not EngineState.READY:
            return
        said = "" if self._process is None else self._process.last_line()
        logger.error("managed.died model=%s exitcode=%d runs=%d last=%s", self.model, code, len(self._runs), said)
        self._state, self._measured = EngineState.DEAD, None
        self._drop_runs()
        self.on_died(code)

    async def stop(self) -> None:
        """What still runs on it ends silently."""
        ready = self._state is EngineState.READY
        self._state = EngineState.STOPPED
        if self._checks is not None:
            self._checks.cancel()
        self._drop_runs()
        if self._remote is not None:
            await self._remote.stop()
        if self._process is not None:
            # One that still loads has nothing to finish.
            await self._process.end(orderly=ready)

    async def prepare(self, spec: RunSpec) -> Prepared:
        # Never awaits: the worker relies on `prepares_inline`.
        return await self._alive().prepare(spec)

    def run(self, spec: RunSpec, prepared: Prepared, sink: Sink) -> None:
        if self._state is EngineState.DEAD:
            return  # `on_died` has reported it, or is about to
        held = self._runs[spec.run_id] = _RunSink(self, spec.run_id, sink)
        try:
            self._alive().run(spec, prepared, held)
        except EngineGone as error:
            held.on_failed(RunFailed(run_id=spec.run_id, error=error, retryable_here=True))

    def cancel(self, run_id: str) -> None:
        self._runs.pop(run_id, None)
        if self._remote is not None:
            self._remote.cancel(run_id)

    def _alive(self) -> RemoteEngine:
        if self._remote is None or self._state is not EngineState.READY:
            raise EngineGone(f"the engine of {self.model} is {self._state}", retry_after_s=0.5)
        return self._remote

    def _drop_runs(self) -> None:
        """They end without an event: the caller ends the engine, or `on_died` reports its death."""
        for run_id in list(self._runs):
            self.cancel(run_id)

    def over(self, run_id: str) -> bool:
        """Take a run off the books; False when nobody waits for it any more."""
        return self._runs.pop(run_id, None) is not None

    def limits(self) -> Limits:
        if self._remote is not None:
            return self._remote.limits()
        return Limits(slots=int(self._options.get("slots", 8)))

    def measured_memory(self) -> int | None:
        return self._measured

    def peak_memory(self) -> int | None:
        """The largest measured value: the server does not report what it held in between."""
        return self._peak

    def info(self) -> EngineInfo:
        known = EngineInfo() if self._remote is None else self._remote.info()
        return replace(known, device=self._devices[0])


class _RunSink:
    """Passes a run's events on; of a run that broke off it first waits whether the server has died of something."""

    def __init__(self, engine: ManagedEngine, run_id: str, sink: Sink) -> None:
        self._engine, self._run_id, self._sink = engine, run_id, sink
        self.on_delta, self.on_progress, self.on_preview = sink.on_delta, sink.on_progress, sink.on_preview

    def on_finished(self, finished: Finished) -> None:
        if self._engine.over(self._run_id):
            self._sink.on_finished(finished)

    def on_failed(self, failed: RunFailed) -> None:
        if isinstance(failed.error, EngineFailed) and not isinstance(failed.error, EngineGone):
            asyncio.get_running_loop().call_later(DEATH_S, self._tell, failed)
        else:
            self._tell(failed)

    def _tell(self, failed: RunFailed) -> None:
        if self._engine.over(self._run_id):
            self._sink.on_failed(failed)


def _file_name(model: str) -> str:
    """A model's id as the name of a file."""
    name = "".join(char if char.isalnum() or char in "-_." else "_" for char in model)[:100]
    return f"server-{name.strip('.') or 'model'}"
