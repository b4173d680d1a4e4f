"""Sets up the log of a process: its form, its levels, and that all that is written to stdout and stderr has that form.

In JSON a small process of its own (`log_relay`) reads what others than `logging` write: native libraries, child
processes, crashes. It outlives this process, so that the last words of a crash are kept.
"""

from __future__ import annotations

import atexit
import logging
import os
import select
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, TextIO

from penstock.common import log_relay
from penstock.schemas.logs import JsonFormatter, LineFormatter, OncePer

LEVELS = ("debug", "info", "warning", "error", "critical")
NOISY = (
    *("aiohttp", "aiokafka", "asyncio", "ContinuousBatchingLogger", "faust", "httpcore", "httpx", "kafka", "mode"),
    "transformers",
)
"""Libraries that log each step at INFO. They begin at WARNING unless their level is set, and repeats are bounded."""
REPEATS_S = 10.0
DRAIN_S = 1.0
_RELAYED = "PENSTOCK_LOG_RELAYED"
"""Names the pipe to the relay, for child processes."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class LogConfig:
    """`level` as `levels_of` reads it."""

    format: Literal["text", "json"] = "text"
    level: str = "info"


_in_force = LogConfig()
_relay: tuple[int, int] | None = None
"""Descriptors: the stderr that was there before, and where the relay says that it has written all."""


def in_force() -> LogConfig:
    """As this process was set up, for its children."""
    return _in_force


def levels_of(text: str) -> dict[str, int]:
    """The levels of `info,penstock.gateway=debug` by logger, the general one under `""`. Raises ValueError."""
    found: dict[str, int] = {}
    for part in filter(None, (one.strip() for one in text.split(","))):
        name, _, level = part.rpartition("=")
        name, level = name.strip(), level.strip().lower()
        if level not in LEVELS:
            raise ValueError(f"{level!r} is no level: use {', '.join(LEVELS)}, as in info,penstock.gateway=debug")
        if "=" in part and not name.replace(".", "").replace("_", "").isalnum():
            raise ValueError(f"{name!r} is no module: use a name as in info,penstock.gateway=debug")
        if name in found:
            raise ValueError(f"{name or 'the general level'} is set twice")
        found[name] = logging.getLevelNamesMapping()[level.upper()]
    return found


def set_up(config: LogConfig) -> None:
    """Set up this process, unless its root logger has handlers already."""
    global _in_force
    root = logging.getLogger()
    if root.handlers:
        return
    _in_force = config
    stream = _relayed() if config.format == "json" else sys.stderr
    handler = logging.StreamHandler(stream)
    colored = config.format == "text" and stream.isatty() and not os.environ.get("NO_COLOR")
    handler.setFormatter(JsonFormatter() if config.format == "json" else LineFormatter(colored=colored))
    levels = levels_of(config.level)
    handler.addFilter(_BoundsRepeats(levels))
    root.addHandler(handler)
    for library in list(root.manager.loggerDict.values()):  # some have a handler of their own, as transformers
        if isinstance(library, logging.Logger) and any(type(one) is logging.StreamHandler for one in library.handlers):
            library.handlers, library.propagate = [], True
    _set_levels(levels)
    _log_what_nobody_catches()


def _set_levels(levels: Mapping[str, int]) -> None:
    general = levels.get("", logging.INFO)
    quiet = {name: max(logging.WARNING, general) for name in NOISY}
    for name, level in {"": general, **quiet, **levels}.items():
        logging.getLogger(name).setLevel(level)


class _BoundsRepeats(logging.Filter):
    """A filter of a logger is not inherited, so the handler has it. `chosen`: modules whose lines all pass."""

    def __init__(self, chosen: Iterable[str]) -> None:
        super().__init__()
        self._noisy, self._chosen = (tuple(f"{name}." for name in names if name) for names in (NOISY, chosen))
        self._limit = OncePer(REPEATS_S, lambda record: (record.pathname, record.lineno, str(record.msg)))

    def filter(self, record: logging.LogRecord) -> bool:
        name = f"{record.name}."
        return not name.startswith(self._noisy) or name.startswith(self._chosen) or self._limit.filter(record)


def _log_what_nobody_catches() -> None:
    """Warnings, and exceptions that end the process, a thread or a finalizer. asyncio logs those of tasks itself."""
    logging.captureWarnings(True)
    former = sys.excepthook

    def of_process(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if isinstance(error, KeyboardInterrupt):
            former(kind, error, trace)
        else:
            logger.critical("process.failed", exc_info=(kind, error, trace))

    def of_thread(args: threading.ExceptHookArgs) -> None:
        if args.exc_value is not None and not isinstance(args.exc_value, SystemExit):
            name = args.thread.name if args.thread else None
            logger.error("thread.failed thread=%s", name, exc_info=args.exc_value)

    def unraisable(args: Any) -> None:
        logger.error("object.failed in=%r: %s", args.object, args.err_msg or "", exc_info=args.exc_value)

    sys.excepthook, threading.excepthook, sys.unraisablehook = of_process, of_thread, unraisable


def _relayed() -> TextIO:
    """Where this process writes its lines. From now on stdout and stderr lead to a relay."""
    global _relay
    if os.environ.get(_RELAYED) == _name_of(2):
        sys.stderr.reconfigure(encoding="utf-8", errors="backslashreplace")  # type: ignore[union-attr]
        return sys.stderr
    own = os.dup(2)
    (reads, writes), (drained, drains) = os.pipe(), os.pipe()
    command = [sys.executable, "-I", "-S", log_relay.__file__]
    subprocess.Popen(command, stdin=reads, stdout=own, stderr=drains, start_new_session=True)
    for number in (1, 2):
        os.dup2(writes, number)
    for number in (reads, writes, drains):
        os.close(number)
    os.environ[_RELAYED] = _name_of(2)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    _relay = own, drained
    atexit.register(drain)
    return open(own, "w", encoding="utf-8", errors="backslashreplace")


def _name_of(descriptor: int) -> str:
    found = os.fstat(descriptor)
    return f"{found.st_dev}:{found.st_ino}"


def drain() -> None:
    """Wait until the relay has written all that it was sent, for `DRAIN_S` at most, and undo its place.

    Before an exit: the end of process 1 ends a container with all that is in it. Before a restart, which may change
    the form.
    """
    global _relay
    if _relay is None:
        return
    (own, drained), _relay = _relay, None
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    # A write must not wait for a relay whose target takes nothing. Child processes may keep the pipe open.
    if select.select([], [2], [], DRAIN_S)[1]:
        os.write(2, b"\n" + log_relay.DRAIN + b"\n")
        select.select([drained], [], [], DRAIN_S)
    for number in (1, 2):
        os.dup2(own, number)
    os.environ.pop(_RELAYED, None)
