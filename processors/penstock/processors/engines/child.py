"""The child side of an engine: a process that holds one model and speaks over a pipe.

It is forked from a server with torch imported. Messages to it: ("prepare", number, spec), ("run", spec), ("cancel",
run_id), ("stop",). From it come lists of ("ready", EngineInfo, bytes), ("refused", error), ("prepared", number,
Prepared | error), ("delta", Delta), ("finished", Finished), ("failed", RunFailed), ("memory", bytes): one list per engine step,
however many runs it touched.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import signal
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any, Protocol

from penstock.processors.engines.base import EngineInfo, Prepared, RunFailed, RunSpec
from penstock.schemas.errors import EngineFailed, InternalError, PenstockError

logger = logging.getLogger(__name__)

PR_SET_PDEATHSIG = 1
Event = tuple[Any, ...]


class Backend(Protocol):
    """A kind of model inside the child; called on the child's event loop."""

    def load(self) -> EngineInfo: ...
    def prepare(self, spec: RunSpec) -> Prepared: ...
    def run(self, spec: RunSpec) -> None: ...
    def cancel(self, run_id: str) -> None: ...
    def close(self) -> None: ...


Emit = Callable[[Event], None]


def measured_memory() -> int:
    """Bytes that belong to this process alone (USS): shared pages of the fork server are not counted twice."""
    import psutil

    return int(psutil.Process().memory_full_info().uss)


class Outbox:
    """Gathers events of one loop iteration and sends them as one message."""

    def __init__(self, conn: Connection, loop: asyncio.AbstractEventLoop) -> None:
        self._conn = conn
        self._loop = loop
        self._events: list[Event] = []

    def emit(self, event: Event) -> None:
        if not self._events:
            self._loop.call_soon(self._flush)
        self._events.append(event)

    def _flush(self) -> None:
        events, self._events = self._events, []
        try:
            self._conn.send(events)
        except OSError:  # the worker is gone; so are we
            os._exit(1)


def main(conn: Connection, kind: str, source: str, options: Mapping[str, Any]) -> None:
    """Entry point of the process."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the worker decides when we stop
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    logging.basicConfig(level=logging.WARNING)
    asyncio.run(serve(conn, kind, source, options))
    os._exit(0)  # native threads of a model must not hold up the end


def make_backend(kind: str, source: str, options: Mapping[str, Any], emit: Emit) -> Backend:
    if kind == "text":
        from penstock.processors.engines.text import TextBackend

        return TextBackend(source, options, emit)
    if kind == "embedding":
        from penstock.processors.engines.embedding import EmbeddingBackend

        return EmbeddingBackend(source, options, emit)
    raise ValueError(f"no backend of kind {kind}")


async def serve(conn: Connection, kind: str, source: str, options: Mapping[str, Any]) -> None:
    """Load, then answer messages until told to stop or the worker is gone."""
    loop = asyncio.get_running_loop()
    outbox = Outbox(conn, loop)
    backend = make_backend(kind, source, options, outbox.emit)
    try:
        info = await asyncio.to_thread(backend.load)
    except BaseException as error:
        logger.exception("engine.load_failed source=%s", source)
        conn.send([("refused", EngineFailed(f"{source} could not be loaded: {type(error).__name__}: {error}"[:500]))])
        return
    outbox.emit(("ready", info, measured_memory()))
    over = asyncio.Event()

    def on_readable() -> None:
        try:
            while conn.poll():
                if not handle(backend, outbox.emit, conn.recv()):
                    over.set()
                    return
        except (EOFError, OSError):
            over.set()

    loop.add_reader(conn.fileno(), on_readable)
    while not over.is_set():
        try:
            await asyncio.wait_for(over.wait(), 5)
        except TimeoutError:
            outbox.emit(("memory", measured_memory()))
    loop.remove_reader(conn.fileno())
    backend.close()


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
