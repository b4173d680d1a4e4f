"""The sink of a run inside a summary: its text goes on to the summary's own sink, its outcome to who waits for it."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from penstock.processors.engines.base import Delta, Finished, Preview, Progress, RunFailed
from penstock.processors.engines.sinks import GuardedSink


class PartRun:
    """`outcome` is set once, with what the engine told."""

    def __init__(self, run_id: str, sink: GuardedSink) -> None:
        self.outcome: asyncio.Future[Finished | RunFailed] = asyncio.get_running_loop().create_future()
        self._run_id = run_id
        self._sink = sink

    def on_delta(self, delta: Delta) -> None:
        self._sink.delta(replace(delta, run_id=self._run_id))

    def on_progress(self, progress: Progress) -> None:
        """A part's own steps are not those of the summary."""

    def on_preview(self, preview: Preview) -> None:
        """Text has none."""

    def on_finished(self, finished: Finished) -> None:
        if not self.outcome.done():
            self.outcome.set_result(finished)

    def on_failed(self, failed: RunFailed) -> None:
        if not self.outcome.done():
            self.outcome.set_result(failed)
