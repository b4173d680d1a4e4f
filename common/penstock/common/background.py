"""Tasks that nobody awaits and callbacks that nobody looks after: what they raise is logged, and ends the process.

A process that went on without one of its tasks would hold requests for ever. What belongs to one connection or one
request ends that alone, and is logged.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, ParamSpec

from penstock.common.tasks import end_all

logger = logging.getLogger(__name__)

P = ParamSpec("P")
FAULT = "an internal error, which is logged above"
"""Why a process ends, in its log."""
_FAULT = "penstock_fault"
"""Marks a fault in what the event loop's exception handler gets."""


class BackgroundTasks:
    """What a task raises is a fault of ours, and goes to the event loop's handler (`on_faults`).

    `ends_process`: false for tasks on behalf of one request. What they raise is only logged.
    """

    def __init__(self, *, ends_process: bool = True) -> None:
        self._ends_process = ends_process
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        """How many are under way."""
        return len(self._tasks)

    def start(self, coroutine: Coroutine[Any, Any, None], name: str | None = None) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(coroutine, name=name)
        self._tasks.add(task)  # the event loop itself holds tasks weakly
        task.add_done_callback(self._ended)
        return task

    async def cancel(self) -> None:
        """End all that are under way, and wait for that."""
        await end_all(self._tasks)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            report_fault(f"background.task_failed task={task.get_name()}", error, ends_process=self._ends_process)


def report_fault(message: str, error: BaseException, *, ends_process: bool = True) -> None:
    """Give a fault of ours to the exception handler of the running loop, which logs it and may end the process."""
    context = {"message": message, "exception": error, **({_FAULT: True} if ends_process else {})}
    asyncio.get_running_loop().call_exception_handler(context)


def reporting(function: Callable[P, None]) -> Callable[P, None]:
    """The function, for callers who must neither end by what it raises nor take it for a failure of their own."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            function(*args, **kwargs)
        except Exception as error:
            report_fault(f"background.callback_failed callback={function.__qualname__}", error)

    return call


def on_faults(loop: asyncio.AbstractEventLoop, tell: Callable[[], None]) -> None:
    """From now on call `tell` at each fault that is reported, and when a callback of the loop raises.

    The loop runs what `call_soon`, `call_later`, `add_reader` and `add_done_callback` were given as a handle.
    Exceptions of libraries' tasks and transports, which have none, are only logged.
    """

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if _FAULT not in context and "handle" not in context:
            loop.default_exception_handler(context)
            return
        logger.error("%s", context["message"], exc_info=context.get("exception"))
        tell()

    loop.set_exception_handler(handle)
