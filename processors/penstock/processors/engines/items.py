"""The engine of what is appended to a conversation without an answer: there is nothing to compute.

Each worker has one. So such a request is a turn like any other: it waits in its conversation's line, and is begun,
retried and cancelled by the same rules.
"""

from __future__ import annotations

from collections.abc import Callable

from penstock.processors.engines.base import EngineInfo, EngineState, Finished, Limits, Prepared, RunSpec, Sink

SLOTS = 256


class ItemsEngine:
    """A run is over before `run` returns."""

    prepares_inline = True

    def __init__(self, model: str) -> None:
        self.model = model
        self.state = EngineState.NEW
        self.pid: int | None = None
        self.on_died: Callable[[int], None] = lambda code: None
        self.on_busy: Callable[[float], None] = lambda seconds: None
        self.on_limits: Callable[[Limits], None] = lambda limits: None
        self.on_out_of_memory: Callable[[], None] = lambda: None

    async def start(self) -> None:
        self.state = EngineState.READY

    async def stop(self) -> None:
        self.state = EngineState.STOPPED

    async def prepare(self, spec: RunSpec) -> Prepared:
        return Prepared(run_id=spec.run_id, prompt_tokens=0, need_tokens=0)

    def run(self, spec: RunSpec, prepared: Prepared, sink: Sink) -> None:
        sink.on_finished(Finished(run_id=spec.run_id, output={}, finish_reason=None))

    def cancel(self, run_id: str) -> None:
        """No run is ever under way."""

    def limits(self) -> Limits:
        return Limits(slots=SLOTS)

    def measured_memory(self) -> int | None:
        return 0

    def peak_memory(self) -> int | None:
        return 0

    def info(self) -> EngineInfo:
        return EngineInfo()
