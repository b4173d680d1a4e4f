"""uvicorn as our processes run it."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import uvicorn


class Server(uvicorn.Server):
    """Without its own signal handlers: the process decides when to stop, so that clients are told first."""

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        yield
