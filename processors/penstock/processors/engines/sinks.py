"""A run's sink, held so that the run ends exactly once whatever the sink does.

A sink that raises must neither end the engine's task, which nobody watches, nor close the channel to its process.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from penstock.processors.engines.base import Delta, Finished, Preview, Progress, RunFailed, Sink
from penstock.schemas.errors import InternalError

logger = logging.getLogger(__name__)


class GuardedSink:
    """Passes a run's events on until its end. A sink that raises gets `on_failed` in place of what comes later."""

    __slots__ = ("_over", "_run_id", "_sink")

    def __init__(self, run_id: str, sink: Sink) -> None:
        self._run_id = run_id
        self._sink = sink
        self._over = False

    @property
    def over(self) -> bool:
        return self._over

    def delta(self, delta: Delta) -> bool:
        """False when the run is over, so that the engine need not go on with it."""
        return self._on_the_way(self._sink.on_delta, delta)

    def progress(self, progress: Progress) -> bool:
        """As `delta`."""
        return self._on_the_way(self._sink.on_progress, progress)

    def preview(self, preview: Preview) -> bool:
        """As `delta`."""
        return self._on_the_way(self._sink.on_preview, preview)

    def finished(self, finished: Finished) -> None:
        if not self._over:
            self._over = True
            if not self._tell(self._sink.on_finished, finished):
                self._fail()

    def failed(self, failed: RunFailed) -> None:
        if not self._over:
            self._over = True
            self._tell(self._sink.on_failed, failed)

    def close(self) -> None:
        """The run was cancelled, or its engine has ended: nothing more is told."""
        self._over = True

    def _on_the_way(self, function: Callable[[Any], None], event: Any) -> bool:
        if self._over:
            return False
        if not self._tell(function, event):
            self._fail()
            return False
        return True

    def _fail(self) -> None:
        self._over = True
        error = InternalError("what the engine gave could not be taken")
        self._tell(self._sink.on_failed, RunFailed(run_id=self._run_id, error=error, retryable_here=False))

    def _tell(self, function: Callable[[Any], None], event: Any) -> bool:
        try:
            function(event)
        except Exception:
            logger.exception("engine.sink_failed run=%s event=%s", self._run_id, type(event).__name__)
            return False
        return True
