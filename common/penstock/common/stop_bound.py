"""The end of a process has a bound: one that hangs in its stop says on what, and ends.

A task that goes on when it is cancelled, or a call into a library that does not return, would keep the process for
ever: out of its group or, worse, in it, and its supervisor waiting.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import threading
from collections.abc import Callable, Coroutine, Generator
from contextlib import contextmanager
from typing import Any

logger = logging.getLogger(__name__)

EXIT_HANGS = 1
GIL_S = 5.0
"""After the bound: so long the interpreter may take to say what hangs. It cannot while a library keeps its lock."""
END_S = 20.0
"""So long the interpreter may take to end once all work is done."""
_STDERR = 2


@contextmanager
def bounded_stop(event: str, within_s: float) -> Generator[None]:
    """Around a process's stop, on its event loop. After `within_s` all that waits is logged and the process ends.

    `event` names the lines of the log; the stacks of all threads follow on stderr.
    """
    loop = asyncio.get_running_loop()
    over = threading.Event()

    def watch() -> None:
        if not over.wait(within_s):
            _say_what_hangs(event, within_s, loop)
            os._exit(EXIT_HANGS)

    faulthandler.dump_traceback_later(within_s + GIL_S, exit=True, file=_STDERR)
    threading.Thread(target=watch, name="stop bound", daemon=True).start()
    try:
        yield
    finally:
        over.set()
        faulthandler.cancel_dump_traceback_later()


def run_process(
    running: Coroutine[Any, Any, int | None], new_loop: Callable[[], asyncio.AbstractEventLoop] | None = None
) -> int:
    """Run a process's work to its end; its exit code. From then on the process ends within `END_S`.

    For the very end of a process: threads that are still busy then are not waited for longer.
    """
    with asyncio.Runner(loop_factory=new_loop) as runner:
        try:
            return runner.run(running) or 0
        finally:
            faulthandler.dump_traceback_later(END_S, exit=True, file=_STDERR)


def _say_what_hangs(event: str, within_s: float, loop: asyncio.AbstractEventLoop) -> None:
    logger.critical("%s seconds=%.0f: the process ends without what is left of its stop", event, within_s)
    for task in asyncio.all_tasks(loop):
        logger.critical("%s task=%s at=%s", event, task.get_name(), " > ".join(_places(task)))
    faulthandler.dump_traceback(file=_STDERR, all_threads=True)


def _places(task: asyncio.Task[Any]) -> list[str]:
    """Where the task waits, from its outermost coroutine inwards: a task itself knows only that one."""
    places: list[str] = []
    waits: Any = task.get_coro()
    while (code := getattr(waits, "cr_code", None)) is not None:
        frame = waits.cr_frame
        line = code.co_firstlineno if frame is None else frame.f_lineno
        places.append(f"{waits.__qualname__} ({code.co_filename}:{line})")
        waits = waits.cr_await
    return places
