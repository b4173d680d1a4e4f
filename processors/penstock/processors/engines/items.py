"""The engine of what is appended to a conversation without an answer: there is nothing to compute.

Each worker has one. So such a request is a turn like any other: it waits in its conversation's line, and is begun,
retried and cancelled by the same rules.
"""

from __future__ import annotations

from penstock.processors.engines.base import Engine, EngineInfo, EngineState, Finished, Limits, Prepared, RunSpec, Sink

SLOTS = 256


class ItemsEngine(Engine):
    """A run is over before `run` returns."""

    prepares_inline = True

    def __init__(self, model: str) -> None:
        self.model = model

    async def start(self) -> None:
        self._state = EngineState.READY

    async def stop(self) -> None:
        self._state = EngineState.STOPPED

    async def prepare(self, spec: RunSpec) -> Prepared:
        return Prepared(run_id=spec.run_id, prompt_tokens=0, need_tokens=0)

    def run(self, spec: RunSpec, prepared: Prepared, sink: Sink) -> None:
        sink.on_finished(Finished(run_id=spec.run_id, output={}, finish_reason=None))

    def cancel(self, run_id: str) -> None:
        """No run is ever under way."""

    def limits(self) -> Limits:
        return Limits(slots=SLOTS)

    def info(self) -> EngineInfo:
        return EngineInfo()
