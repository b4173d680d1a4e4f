"""A run's sink, held so that the run ends exactly once.

A sink passes events on to the worker's flow: what it raises is a fault of the worker, which ends by it. The request is
not to blame and does not fail: the next worker runs it again. The engine's task and the channel to its process go on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock.common.background import report_fault
from penstock.processors.engines.base import Delta, Finished, Preview, RunFailed, Sink, StepProgress


class GuardedSink:
    """Passes a run's events on until its end, or until the sink raises."""

    __slots__ = ("_run_id", "_sink", "over")

    def __init__(self, run_id: str, sink: Sink) -> None:
        self._run_id = run_id
        self._sink = sink
        self.over = False

    def delta(self, delta: Delta) -> bool:
        """False when the run is over, so that the engine need not go on with it."""
        return self._on_the_way(self._sink.on_delta, delta)

    def progress(self, progress: StepProgress) -> bool:
        return self._on_the_way(self._sink.on_progress, progress)

    def preview(self, preview: Preview) -> bool:
        return self._on_the_way(self._sink.on_preview, preview)

    def finished(self, finished: Finished) -> None:
        if not self.over:
            self.over = True
            self._tell(self._sink.on_finished, finished)

    def failed(self, failed: RunFailed) -> None:
        if not self.over:
            self.over = True
            self._tell(self._sink.on_failed, failed)

    def close(self) -> None:
        """The run was cancelled, or its engine has ended: no further event is passed on."""
        self.over = True

    def _on_the_way(self, function: Callable[[Any], None], event: Any) -> bool:
        if not self.over:
            self._tell(function, event)
        return not self.over

    def _tell(self, function: Callable[[Any], None], event: Any) -> None:
        try:
            function(event)
        except Exception as error:
            self.over = True
            report_fault(f"engine.sink_failed run={self._run_id} event={type(event).__name__}", error)
