"""The stop of a process has a bound: a process that hangs logs on what, and exits.

The bound counts from the signal, in whatever state the process is: while it starts, or while its event loop is blocked.
A task that ignores its cancellation, or a library call that does not return, would otherwise keep the process alive
(and a member of its group) while its supervisor waits.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from types import FrameType
from typing import Any, NoReturn, Self

from penstock.common.log_setup import drain
from penstock.common.process_end import exit_process

logger = logging.getLogger(__name__)

EXIT_HANGS = 1
GIL_S = 5.0
"""After the bound, the interpreter has this time to log what hangs. It cannot while a library holds its lock."""
END_S = 20.0
"""Time that the interpreter may take to exit once all work is done."""
_STDERR = 2
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_BEGIN, _END, _RESTART = b"\xff", b"\xfe", b"\xfd"
"""Sent to the watching thread beside the numbers of signals."""
_current: StopBound | None = None
_current_lock = threading.Lock()
"""Held while a byte is written for another thread: the pipe is not closed then."""
_restarts = False
"""Whether the command line of this process is executed again after the stop."""


def _noticed(number: int, frame: FrameType | None) -> None:
    """`StopBound` reads the number of the signal. After its end this handler stays until the restart."""
    global _restarts
    _restarts = False


class StopBound:
    """SIGTERM and SIGINT of this process, and the bound of the stop that they begin. Made on the event loop.

    `on_signal` is called on the event loop at each of these signals. `within_s` after the first one, or after `begin`,
    the process logs all that its tasks wait for and exits, unless it has left the context by then. The event is
    `<name>.stop_hangs`; the stacks of all threads follow on stderr. A restart begins as many seconds after `announce`,
    which any thread may call, as it returns.
    """

    def __init__(
        self, name: str, within_s: float, on_signal: Callable[[], None], announce: Callable[[], float] = lambda: 0.0
    ) -> None:
        self.announce = announce
        self._name, self._within_s, self._on_signal = name, within_s, on_signal
        self._loop = asyncio.get_running_loop()
        self._reads, self._writes = os.pipe()
        self._thread = threading.Thread(target=self._watch, name="stop bound", daemon=True)

    def __enter__(self) -> Self:
        # The C handler writes to the pipe, also while the main thread is in a call that does not return. An event
        # loop's own handlers would wait for it.
        os.set_blocking(self._writes, False)
        self._former_fd = signal.set_wakeup_fd(self._writes, warn_on_full_buffer=False)
        self._former = {number: signal.signal(number, _noticed) for number in _SIGNALS}
        self._thread.start()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)  # blocked since a restart
        global _current
        _current = self
        return self

    def __exit__(self, *_: object) -> None:
        global _current
        with _current_lock:
            _current = None
        os.write(self._writes, _END)
        self._thread.join()
        if _restarts:
            # The default action of process 1 would discard a signal. A blocked one is pending through exec.
            signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        else:
            for number, handler in self._former.items():
                signal.signal(number, handler)
        signal.set_wakeup_fd(self._former_fd)
        faulthandler.cancel_dump_traceback_later()
        os.close(self._reads)
        os.close(self._writes)

    def begin(self) -> None:
        """The stop begins without a signal."""
        self._arm()
        os.write(self._writes, _BEGIN)

    def begin_restart(self) -> None:
        """Stop as at a signal, then execute the command line again. The first signal in between cancels only that."""
        os.write(self._writes, _RESTART)

    def _arm(self) -> None:
        faulthandler.dump_traceback_later(self._within_s + GIL_S, exit=True, file=_STDERR)

    def _watch(self) -> None:
        global _restarts
        give_up: float | None = None
        restarts = False  # beside `_restarts`, which the handler may have cleared already
        while True:
            left_s = None if give_up is None else max(0.0, give_up - time.monotonic())
            if not select.select([self._reads], [], [], left_s)[0]:
                self._say_what_hangs()
                drain()
                os._exit(EXIT_HANGS)
            event = os.read(self._reads, 1)
            if event == _END:
                return
            is_signal = event not in (_BEGIN, _RESTART)
            if is_signal and event[0] not in _SIGNALS:
                continue
            begins = give_up is None
            if begins:
                give_up = time.monotonic() + self._within_s
                self._arm()
            if event == _BEGIN or not (is_signal or begins):
                continue
            cancels, restarts = restarts, not is_signal
            _restarts = restarts
            if not cancels:
                with suppress(RuntimeError):  # the loop has ended
                    self._loop.call_soon_threadsafe(self._on_signal)

    def _say_what_hangs(self) -> None:
        event = f"{self._name}.stop_hangs"
        logger.critical("%s seconds=%.0f: the process exits without the rest of its stop", event, self._within_s)
        for task in asyncio.all_tasks(self._loop):
            logger.critical("%s task=%s at=%s", event, task.get_name(), " > ".join(_places(task)))
        faulthandler.dump_traceback(file=_STDERR, all_threads=True)


def restart_process() -> bool:
    """Stop this process in order, as at SIGTERM, and execute its command line again; the pid stays. For any thread.

    False while the process does not take signals yet, or not any more. Blocks while the restart is announced.
    """
    if (bound := _current) is not None:
        time.sleep(bound.announce())
    with _current_lock:
        bound = _current
        if bound is not None:
            bound.begin_restart()
    return bound is not None


def run_process(
    running: Coroutine[Any, Any, int | None], new_loop: Callable[[], asyncio.AbstractEventLoop] | None = None
) -> NoReturn:
    """Run a process's work to its end, and exit with the code that it returns. From then on the process has `END_S`.

    Threads that are still busy then are not waited for longer. After `restart_process` it does not exit, unless the
    work failed.
    """
    with asyncio.Runner(loop_factory=new_loop) as runner:
        try:
            code = runner.run(running) or 0
        finally:
            faulthandler.dump_traceback_later(END_S, exit=True, file=_STDERR)
    exit_process(code, again=lambda: _restarts and code == 0)


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
