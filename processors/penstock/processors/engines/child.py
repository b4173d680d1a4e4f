"""The child side of an engine: a process that holds one model and speaks over a channel.

It is forked from a server with torch imported. Messages to it: ("prepare", number, spec), ("run", spec), ("cancel",
run_id), ("stop",). From it come lists of ("ready", EngineInfo, bytes), ("refused", error), ("prepared", number,
Prepared | error), ("delta", run_id, text, token_ids, first_token_index), ("finished", Finished), ("failed", RunFailed),
("memory", bytes): one list per engine step, however many runs it touched. The memory report is also its sign of life.
"""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import logging
import os
import signal
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn, Protocol

from penstock.processors.engines.base import EngineInfo, Prepared, RunFailed, RunSpec
from penstock.processors.engines.channel import Channel
from penstock.schemas.errors import EngineFailed, InternalError, PenstockError

logger = logging.getLogger(__name__)

PR_SET_PDEATHSIG = 1
CHECK_EVERY_S = 0.25
REPORT_EVERY, MEASURE_EVERY = 8, 60
"""In checks: a sign of life every 2 s, memory measured anew every 15 s."""
Event = tuple[Any, ...]
Emit = Callable[[Event], None]


class Backend(Protocol):
    """A kind of model inside the child; called on the child's event loop, but for `load` and `measured_memory`."""

    def load(self) -> EngineInfo:
        """Load the model, in a thread."""
        ...

    def prepare(self, spec: RunSpec) -> Prepared: ...
    def run(self, spec: RunSpec) -> None: ...
    def cancel(self, run_id: str) -> None: ...

    def check(self) -> None:
        """Called often: notice what no event tells."""
        ...

    def measured_memory(self) -> int: ...


class Outbox:
    """Gathers the events of one loop iteration and sends them as one message."""

    def __init__(self, channel: Channel, loop: asyncio.AbstractEventLoop) -> None:
        self._channel = channel
        self._loop = loop
        self._events: list[Event] = []

    def emit(self, event: Event) -> None:
        if not self._events:
            self._loop.call_soon(self.flush)
        self._events.append(event)

    def flush(self) -> None:
        if self._events:
            events, self._events = self._events, []
            self._channel.send(events)


def main(sock: socket.socket, kind: str, source: str, options: Mapping[str, Any]) -> None:
    """Entry point of the process."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # the fork server's end is ours; it ends with the worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the worker decides when we stop
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # Read when CUDA is first touched, which is after this: cards in NVML's order, and an allocator that fragments less.
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    logging.basicConfig(level=logging.WARNING)
    asyncio.run(serve(sock, kind, source, options))


def make_backend(kind: str, source: str, options: Mapping[str, Any], emit: Emit) -> Backend:
    if kind == "text":
        from penstock.processors.engines.text import TextBackend

        return TextBackend(source, options, emit)
    if kind == "embedding":
        from penstock.processors.engines.embedding import EmbeddingBackend

        return EmbeddingBackend(source, options, emit)
    raise ValueError(f"no backend of kind {kind}")


def leave(code: int = 0) -> NoReturn:
    """End at once: native threads of a model must not hold up the end."""
    os._exit(code)


async def serve(sock: socket.socket, kind: str, source: str, options: Mapping[str, Any]) -> None:
    """Load, then answer messages until told to stop or the worker is gone."""
    loop = asyncio.get_running_loop()
    backend: Backend | None = None

    def on_message(message: Event) -> None:
        # A backend that is not loaded yet is only ever told to stop.
        if backend is None or not handle(backend, outbox.emit, message):
            leave()

    channel = await Channel.open(sock, on_message, leave)
    outbox = Outbox(channel, loop)
    try:
        loading = make_backend(kind, source, options, outbox.emit)
        info = await asyncio.to_thread(loading.load)
    except BaseException as error:
        logger.exception("engine.load_failed source=%s", source)
        refusal = error if isinstance(error, PenstockError) else _load_failure(source, error)
        channel.send([("refused", refusal)])
        while channel.unsent_bytes:
            await asyncio.sleep(0.01)
        leave(1)
    backend = loading
    measured = backend.measured_memory()
    outbox.emit(("ready", info, measured))
    for turn in itertools.count(1):
        await asyncio.sleep(CHECK_EVERY_S)
        backend.check()
        if turn % MEASURE_EVERY == 0:  # tens of milliseconds for a gigabyte: the kernel walks every page
            measured = await asyncio.to_thread(backend.measured_memory)
        if turn % REPORT_EVERY == 0:
            outbox.emit(("memory", measured))


def _load_failure(source: str, error: BaseException) -> EngineFailed:
    """The reason for callers, who need not know where on this machine a model lies; the log has it whole."""
    name = Path(source).name
    reason = str(error).replace(source, name)
    return EngineFailed(f"{name} could not be loaded: {type(error).__name__}: {reason}"[:500])


def handle(backend: Backend, emit: Emit, message: Event) -> bool:
    """One message; False when it was the last."""
    match message:
        case ("prepare", number, spec):
            emit(("prepared", number, _prepare(backend, spec)))
        case ("run", spec):
            try:
                backend.run(spec)
            except PenstockError as error:
                emit(("failed", RunFailed(run_id=spec.run_id, error=error, retryable_here=error.retryable)))
            except Exception as error:
                logger.exception("engine.run_failed")
                failure = InternalError(f"{type(error).__name__} while the run was started")
                emit(("failed", RunFailed(run_id=spec.run_id, error=failure, retryable_here=False)))
        case ("cancel", run_id):
            backend.cancel(run_id)
        case _:
            return False
    return True


def _prepare(backend: Backend, spec: RunSpec) -> Prepared | PenstockError:
    try:
        return backend.prepare(spec)
    except PenstockError as error:
        return error
    except Exception as error:
        logger.exception("engine.prepare_failed")
        return InternalError(f"{type(error).__name__} while the prompt was built")
