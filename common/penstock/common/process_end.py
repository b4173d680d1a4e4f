"""The exit of a process whose threads may be in a native library, as OpenSSL or librdkafka.

The interpreter's own exit runs the cleanup of these libraries. It crashes the process while a daemon thread, or a
thread of a Kafka client, is in one of them.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable
from typing import NoReturn

_NOT_FLUSHED = 120
"""As the interpreter exits when what was printed cannot be written."""


def exit_process(code: int) -> NoReturn:
    """As the interpreter exits, but without the cleanup of native libraries."""
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
    atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            code = code or _NOT_FLUSHED
        except ValueError:  # it is closed
            continue
    os._exit(code)


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
