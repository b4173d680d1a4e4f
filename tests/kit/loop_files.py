"""Reports each change of a file that a process makes on the thread of its event loop, with its place, on stderr."""

from __future__ import annotations

import asyncio
import os
import stat
import sys
import traceback
from collections.abc import Callable
from typing import Any

SWITCH = "PENSTOCK_TESTS_REPORT_LOOP_FILES"
EVENT = "loop.changes_file"
_CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.link", "sqlite3.connect")
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_ELSEWHERE = ("/dev/", "/proc/", "__pycache__")


def report_files_on_the_loop() -> None:
    """From now on, in this process. Writes are seen where they come through `os`, and opens in any case."""
    sys.addaudithook(_hear)
    for name in ("write", "pwrite", "fsync", "fdatasync"):
        setattr(os, name, _reported(name, getattr(os, name)))


def _hear(event: str, arguments: tuple[Any, ...]) -> None:
    if event in _CHANGES or (event == "open" and arguments[2] & _WRITES and not isinstance(arguments[0], int)):
        _report(event, str(arguments[0]))


def _reported(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(file: int, *rest: Any) -> Any:
        if stat.S_ISREG(os.fstat(file).st_mode):
            _report(f"os.{name}", str(file))
        return function(file, *rest)

    return call


def _report(event: str, path: str) -> None:
    if asyncio._get_running_loop() is None or any(one in path for one in _ELSEWHERE):
        return
    stack = " < ".join(f"{one.filename}:{one.lineno}" for one in reversed(traceback.extract_stack()[-9:-2]))
    print(f"{EVENT} event={event} path={path} at {stack}", file=sys.stderr, flush=True)
