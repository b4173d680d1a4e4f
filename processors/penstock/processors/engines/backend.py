"""A kind of model inside an engine's process, and how the process finds its class: by its name, `module:Class`.

So the process's main loop (process/child.py) knows no backend, and no backend knows the main loop.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, Protocol, runtime_checkable

from penstock.processors.engines.base import EngineInfo, Prepared, RunSpec

Event = tuple[Any, ...]
Emit = Callable[[Event], None]


class Backend(Protocol):
    """Called on the process's event loop, but for `load`, `measured_memory` and, when it is long, `prepare`."""

    def load(self) -> EngineInfo:
        """Load the model, in a thread."""
        ...

    def prepare(self, spec: RunSpec) -> tuple[Prepared, Any]:
        """The answer, and the prompt for `run`. In a thread of its own, one at a time, when it may be long."""
        ...

    def run(self, spec: RunSpec, prompt: Any) -> None:
        """`spec` comes without the texts that the prompt was made of."""
        ...

    def cancel(self, run_id: str) -> None: ...

    def check(self) -> None:
        """Called often: notice what no event reports."""
        ...

    def progress(self) -> int | None:
        """A number that changes while the computing thread moves; None when that thread has nothing to do."""
        ...

    def measured_memory(self) -> int: ...


@runtime_checkable
class WarmsUp(Protocol):
    """A backend that runs its largest batch before the engine is ready, so that its memory is known by then."""

    def warm_up(self) -> None:
        """In the thread of `load`, after it. Raises OutOfMemory when not even the smallest batch fits."""
        ...


@runtime_checkable
class PreparesFirst(Protocol):
    """A backend with something to do before `prepare` that may take seconds, such as compiling a grammar."""

    async def before_prepare(self, spec: RunSpec) -> None:
        """On the event loop, before a long `prepare`; others are prepared meanwhile. Raises PenstockError."""
        ...


@runtime_checkable
class MeasuresPeak(Protocol):
    """A backend that knows the most memory that its process has held; of others the largest measure counts."""

    def peak_memory(self) -> int:
        """Bytes. Called every second, on the event loop."""
        ...


def load_class(name: str) -> Callable[[str, Mapping[str, Any], Emit], Backend]:
    module, _, kind = name.partition(":")
    return getattr(importlib.import_module(module), kind)


def leave(code: int = 0) -> NoReturn:
    """End the process at once: native threads of a model must not hold up the end."""
    os._exit(code)
