"""The child side of an engine: a process that holds one model and speaks over a channel.

It is forked from a server with torch imported. Messages to it: ("prepare", number, spec), ("run", run_id) for what was
prepared, ("run_anew", spec) for what it has forgotten, ("cancel", run_id), ("stop",). From it come lists of ("ready",
EngineInfo, bytes, peak bytes), ("refused", error), ("prepared", number, Prepared | error), ("forgotten", run_id),
("delta", run_id, text, token_ids, first_token_index, calls, logprobs), ("progress", Progress), ("preview", Preview),
("finished", Finished), ("failed", RunFailed), ("loading",), ("beat", bytes, peak bytes), ("out_of_memory", slots or
None): batches are smaller from now on, ("limits", slots): and larger again, ("batches", most): a batch holds at most so
much from now on.

A beat says that the thread which computes moves, or has nothing to do. It carries the measured memory and its peak.
"loading" says that the load has computed or read since the last one.
"""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import logging
import os
import resource
import signal
import socket
import time
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.common.background import BackgroundTasks
from penstock.common.log_setup import LogConfig, set_up
from penstock.common.threads import in_daemon_thread
from penstock.processors.core.fleet.ledger import OutOfMemory
from penstock.processors.earlier_messages import NO_EARLIER_MESSAGES
from penstock.processors.engines.backend import (
    Backend,
    Emit,
    Event,
    MeasuresPeak,
    PreparesFirst,
    WarmsUp,
    leave,
    load_class,
)
from penstock.processors.engines.base import EngineInfo, Prepared, RunFailed, RunSpec
from penstock.processors.engines.process.causes import cause_of, without_places
from penstock.processors.engines.process.channel import Channel
from penstock.processors.engines.process.openmp import without_openmp
from penstock.processors.engines.process.out_of_memory import is_out_of_memory
from penstock.schemas.errors import EngineFailed, InternalError, InvalidRequest, PenstockError
from penstock.schemas.texts import shortened

logger = logging.getLogger(__name__)

PR_SET_PDEATHSIG = 1
CHECK_EVERY_S = 0.25
BEAT_EVERY = 4
"""In checks: a beat every second."""
MEASURE_EVERY_S, MEASURE_REST = 2.0, 200
"""Memory is measured so often, but at most half a percent of the time: the kernel walks every page of the process."""
INLINE_CHARS = 2000
"""Longer prompts are counted in a thread: tokenizing them takes milliseconds, for which no stream shall wait."""
REMEMBERED_TOKENS = 1 << 20
"""Prompts that were prepared and not run yet, in all. Those beyond are prepared again when they run."""
IMAGE_BYTES_A_TOKEN = 1024
"""What images count among them: so many bytes of pixels as a token."""


def main(sock: socket.socket, backend: str, source: str, options: Mapping[str, Any], log: LogConfig) -> None:
    """Entry point of the process."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # the fork server's end is ours; it ends with the worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the worker decides when we stop
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # Read when CUDA is first touched, which is after this: cards in NVML's order, and an allocator that fragments less.
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    if "address" in options:  # its own card, or slice, is all that it sees; none, when it was granted main memory
        os.environ["CUDA_VISIBLE_DEVICES"] = str(options["address"])
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")  # its warnings quote prompts
    set_up(log)
    try:
        asyncio.run(serve(sock, backend, source, options))
    except BaseException:
        logger.exception("engine.failed source=%s", source)
    leave(1)  # not by return: the interpreter would wait for the threads that compute


async def serve(sock: socket.socket, backend_name: str, source: str, options: Mapping[str, Any]) -> None:
    """Load, then answer messages until the worker asks for the end or is gone."""
    handler: MessageHandler | None = None
    asyncio.get_running_loop().set_exception_handler(_on_fault)

    def on_message(message: Event) -> None:
        # The only message before it is loaded is the one to stop.
        if handler is None or not handler.handle(message):
            leave()

    channel = await Channel.open(sock, on_message, leave)
    outbox = Outbox(channel)
    try:
        tasks = BackgroundTasks()
        tasks.start(_tell_loading(outbox.emit))
        kind = await in_daemon_thread(load_class, backend_name)  # its imports can take long
        backend = kind(source, options, outbox.emit)
        info = await in_daemon_thread(_load, backend)
        await tasks.cancel()
    except BaseException as error:
        # The message names what a folder lacks; a traceback is logged for faults only.
        published = isinstance(error, PenstockError | OSError | ValueError)
        reason = f"{type(error).__name__}: {error}"
        logger.error("engine.load_failed source=%s error=%s", source, reason, exc_info=None if published else error)
        channel.send([("refused", error if isinstance(error, PenstockError) else _load_failure(source, error))])
        while channel.unsent_bytes:
            await asyncio.sleep(0.01)
        leave(1)
    handler = MessageHandler(backend, outbox.emit)
    measured = await asyncio.to_thread(backend.measured_memory)
    outbox.emit(("ready", info, measured, _peak(backend, measured)))
    await _beat(backend, outbox.emit, measured)


def _on_fault(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """What is raised in a callback or a task is caught by nobody: runs whose events are lost would wait for ever.

    So the process ends, which the worker hears.
    """
    error = context.get("exception")
    logger.error("engine.fault: %s", context.get("message"), exc_info=error)
    if error is not None:
        leave(1)


def _load(backend: Backend) -> EngineInfo:
    """In a thread that ends: what the process holds after that is what its largest batch takes.

    A thread that stays would keep the OpenMP threads with which it has loaded. libgomp, which counts those of all
    threads, would then think the processors too few, and have the computing ones sleep at each barrier in place of
    waiting awake for a moment: two threads were no faster than one.
    """
    info = backend.load()
    if isinstance(backend, WarmsUp):
        backend.warm_up()
    return info


async def _tell_loading(emit: Emit) -> None:
    """Until it is cancelled: emit a sign whenever other threads have computed, or the process has read from a disk."""
    last = (-1, -1)
    while True:
        usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        computed_s = sum(one.ru_utime + one.ru_stime for one in usages) - time.thread_time()
        if (now := (round(10 * computed_s), sum(one.ru_majflt + one.ru_inblock for one in usages))) != last:
            emit(("loading",))
        last = now
        await asyncio.sleep(CHECK_EVERY_S)


def _peak(backend: Backend, measured: int) -> int:
    return max(measured, backend.peak_memory()) if isinstance(backend, MeasuresPeak) else measured


async def _beat(backend: Backend, emit: Emit, measured: int) -> None:
    """For ever: let the backend look after itself, and say that it computes while it does."""
    last: int | None = None
    measure_at = time.monotonic() + MEASURE_EVERY_S
    for turn in itertools.count(1):
        await asyncio.sleep(CHECK_EVERY_S)
        backend.check()
        if (began := time.monotonic()) >= measure_at:
            measured = await asyncio.to_thread(backend.measured_memory)
            ended = time.monotonic()
            measure_at = ended + max(MEASURE_EVERY_S, MEASURE_REST * (ended - began))
        if turn % BEAT_EVERY == 0:
            progress = backend.progress()
            if progress is None or progress != last:
                emit(("beat", measured, _peak(backend, measured)))
            last = progress


def _load_failure(source: str, error: BaseException) -> EngineFailed:
    """The reason for callers, who need not know where on this machine a model lies; operators see its source too."""
    name = Path(source).name
    reason = without_places(str(error), source).replace(source, name)
    kind = OutOfMemory if is_out_of_memory(error) else EngineFailed
    message = shortened(f"{name} could not be loaded: {type(error).__name__}: {reason}", 500)
    return kind(message, cause=cause_of(error, source))


class Outbox:
    """Gathers the events of one loop iteration and sends them as one message."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._loop = asyncio.get_running_loop()
        self._events: list[Event] = []

    def emit(self, event: Event) -> None:
        if not self._events:
            self._loop.call_soon(self.flush)
        self._events.append(event)

    def flush(self) -> None:
        events, self._events = self._events, []
        try:
            self._channel.send(events)
        except Exception:  # a value that cannot be pickled: runs whose events are lost would wait for ever
            logger.exception("engine.unsendable")
            leave(1)


class MessageHandler:
    """Answers the worker's messages, and keeps prompts between `prepare` and `run`."""

    def __init__(self, backend: Backend, emit: Emit) -> None:
        self._backend = backend
        self._first = backend if isinstance(backend, PreparesFirst) else None
        self._emit = emit
        self._prompts: OrderedDict[str, tuple[RunSpec, Any, int]] = OrderedDict()
        self._tokens = 0
        self._starting: set[str] = set()
        # One thread: tokenizers are fast enough, and a second would only take cores from the model.
        self._thread = ThreadPoolExecutor(1, "prepare", without_openmp)
        self._tasks = BackgroundTasks()

    def handle(self, message: Event) -> bool:
        """One message; False when it was the last."""
        match message:
            case ("prepare", number, spec):
                if size_of(spec) <= INLINE_CHARS:
                    self._answer(number, spec, self._prepared(spec))
                else:
                    self._tasks.start(self._prepare_long(number, spec))
            case ("run", run_id):
                prompt = self._forget(run_id)
                if prompt is None:
                    self._emit(("forgotten", run_id))
                else:
                    self._run(prompt[0], prompt[1])
            case ("run_anew", spec):
                self._starting.add(spec.run_id)
                self._tasks.start(self._run_anew(spec))
            case ("cancel", run_id):
                self._starting.discard(run_id)
                if self._forget(run_id) is None:
                    self._backend.cancel(run_id)
            case _:
                return False
        return True

    async def _prepare_long(self, number: int, spec: RunSpec) -> None:
        self._answer(number, spec, await self._prepared_aside(spec))

    def _answer(self, number: int, spec: RunSpec, result: tuple[Prepared, Any] | PenstockError) -> None:
        if isinstance(result, PenstockError):
            self._emit(("prepared", number, result))
            return
        prepared, prompt = result
        images = _image_bytes(spec)
        self._remember(spec, prompt, prepared.prompt_tokens + images // IMAGE_BYTES_A_TOKEN)
        self._emit(("prepared", number, prepared))

    async def _run_anew(self, spec: RunSpec) -> None:
        result = await self._prepared_aside(spec)
        if spec.run_id not in self._starting:
            return  # cancelled
        self._starting.discard(spec.run_id)
        if isinstance(result, PenstockError):
            self._failed(spec.run_id, result, again=result.retryable or isinstance(result, OutOfMemory))
        elif spec.published is not None and not result[0].goes_on:
            self._failed(spec.run_id, EngineFailed("the run cannot continue what was published"), again=True)
        else:
            self._run(spec, result[1])

    async def _prepared_aside(self, spec: RunSpec) -> tuple[Prepared, Any] | PenstockError:
        """In the thread, which is started with the first: where memory is short the system may refuse that."""
        try:
            if self._first is not None:
                await self._first.before_prepare(spec)
            return await asyncio.get_running_loop().run_in_executor(self._thread, self._prepared, spec)
        except RuntimeError as error:
            return OutOfMemory(f"the prompt was not built: {error}")
        except Exception as error:
            return _not_prepared(error)

    def _prepared(self, spec: RunSpec) -> tuple[Prepared, Any] | PenstockError:
        try:
            return self._backend.prepare(spec)
        except Exception as error:
            return _not_prepared(error)

    def _run(self, spec: RunSpec, prompt: Any) -> None:
        try:
            self._backend.run(spec, prompt)
        except PenstockError as error:
            self._failed(spec.run_id, error, again=error.retryable)
        except Exception as error:
            logger.exception("engine.run_failed")
            failure = InternalError(f"{type(error).__name__} while the run was started")
            self._failed(spec.run_id, failure, again=False)

    def _failed(self, run_id: str, error: PenstockError, *, again: bool) -> None:
        self._emit(("failed", RunFailed(run_id=run_id, error=error, retryable_here=again)))

    def _remember(self, spec: RunSpec, prompt: Any, tokens: int) -> None:
        bare = replace(spec, messages=None, history=None, prompt=None, inputs=None, payload={}, images={}, files={})
        self._prompts[spec.run_id] = (bare, prompt, tokens)
        self._tokens += tokens
        while self._tokens > REMEMBERED_TOKENS and len(self._prompts) > 1:
            self._tokens -= self._prompts.popitem(last=False)[1][2]

    def _forget(self, run_id: str) -> tuple[RunSpec, Any, int] | None:
        prompt = self._prompts.pop(run_id, None)
        if prompt is not None:
            self._tokens -= prompt[2]
        return prompt


def _not_prepared(error: Exception) -> PenstockError:
    if isinstance(error, PenstockError):
        return error
    if isinstance(error, UnicodeEncodeError):
        return InvalidRequest("the text holds half of a surrogate pair, which is no character", param="payload")
    if is_out_of_memory(error):
        return OutOfMemory(f"the prompt was not built: {type(error).__name__}")
    logger.error("engine.prepare_failed", exc_info=error)
    return InternalError(f"{type(error).__name__} while the prompt was built")


def size_of(spec: RunSpec) -> int:
    """Characters of all texts of a spec, and bytes of its images. What has to be compiled counts as long."""
    params = spec.params
    if params.get("response_format") or params.get("tools") or params.get("logprobs") or "prompt_logprobs" in params:
        return INLINE_CHARS + 1
    past = spec.history or NO_EARLIER_MESSAGES
    texts = [message.get("content") for message in (*past.messages, *(spec.messages or ()))]
    if past.summary is not None:
        texts.append(past.summary.text)
    return _image_bytes(spec) + sum(
        len(text) for text in (*texts, spec.prompt, *(spec.inputs or ())) if isinstance(text, str)
    )


def _image_bytes(spec: RunSpec) -> int:
    return sum(image.size_bytes for image in (*spec.images.values(), *spec.files.values()))
