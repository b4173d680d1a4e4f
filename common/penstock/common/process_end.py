"""The exit of a process whose threads may be in a native library, as OpenSSL or librdkafka.

The interpreter's own exit runs the cleanup of these libraries. It crashes the process while a daemon thread, or a
thread of a Kafka client, is in one of them.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

logger = logging.getLogger(__name__)

HELPERS_S = 3.0
_NOT_FLUSHED = 120
"""As the interpreter exits when what was printed cannot be written."""


def exit_process(code: int, *, again: Callable[[], bool] = lambda: False) -> NoReturn:
    """As the interpreter exits, without the cleanup of native libraries. `again`: execute the command line again."""
    if again():
        logger.warning("process.restarts")
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
    atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            code = code or _NOT_FLUSHED
        except ValueError:  # it is closed
            continue
    if again():
        _end_helpers()
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    os._exit(code)


def _end_helpers() -> None:
    """End the processes of multiprocessing: after exec nothing would wait for them, and they would become zombies.

    One that hangs is left after `HELPERS_S`.
    """

    def end() -> None:
        # In this order: the fork server writes to the resource tracker.
        for module, name in (("forkserver", "_forkserver"), ("resource_tracker", "_resource_tracker")):
            if (loaded := sys.modules.get(f"multiprocessing.{module}")) is not None:
                with suppress(OSError):  # the folder of its socket was removed at the exit
                    getattr(loaded, name)._stop()

    ending = threading.Thread(target=end, daemon=True)
    ending.start()
    ending.join(HELPERS_S)


def run_command(command: Callable[[], object]) -> NoReturn:
    """Call it, and exit with the code of its SystemExit: 0 without one, 1 after any other exception."""
    code = 0
    try:
        command()
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    exit_process(code)
