"""Tasks that nobody awaits: kept while they run, and heard when one fails."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

logger = logging.getLogger(__name__)

_FAULT = "penstock_fault"


class BackgroundTasks:
    """What a task raises is a fault of ours, and goes to the event loop's handler (`on_faults`)."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        """So many are under way."""
        return len(self._tasks)

    def start(self, coroutine: Coroutine[Any, Any, None], name: str | None = None) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(coroutine, name=name)
        self._tasks.add(task)  # the event loop itself holds tasks weakly
        task.add_done_callback(self._ended)
        return task

    async def cancel(self) -> None:
        """End all that are under way, and wait for that."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            context = {"message": f"{task.get_name()} failed", "exception": error, "task": task, _FAULT: True}
            task.get_loop().call_exception_handler(context)


def on_faults(loop: asyncio.AbstractEventLoop, tell: Callable[[], None]) -> None:
    """From now on call `tell` when a background task fails; what libraries leave unheard is logged as before."""

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if _FAULT not in context:
            loop.default_exception_handler(context)
            return
        logger.error("background.task_failed task=%s", context["task"].get_name(), exc_info=context["exception"])
        tell()

    loop.set_exception_handler(handle)
