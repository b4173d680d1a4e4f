"""Several answers of one request: a run for each, one outcome. The first streams; the others come with the outcome."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from penstock.processors.engines.backend import Emit, Event
from penstock.processors.engines.base import Finished, usage_of


class Choices:
    """The runs of one request. Give each of them `emit_of(index)`; the last one that finishes emits the outcome."""

    def __init__(self, run_id: str, answers: int, emit: Emit) -> None:
        self.run_id = run_id
        self.parts = [f"{run_id}#{index}" for index in range(answers)]
        """The ids of the runs, by the index of their answer."""
        self._emit = emit
        self._finished: dict[int, Finished] = {}

    def emit_of(self, index: int) -> Emit:
        """The sink for the run of one answer."""

        def emit(event: Event) -> None:
            match event:
                case ("delta", _, *rest):
                    if index == 0:
                        self._emit(("delta", self.run_id, *rest))
                case ("finished", finished):
                    self._finished[index] = finished
                    if len(self._finished) == len(self.parts):
                        self._emit(("finished", self._whole()))
                case _:
                    raise ValueError(f"a run has no event {event[0]}")

        return emit

    def _whole(self) -> Finished:
        answers = [self._finished[index] for index in range(len(self.parts))]
        first = answers[0]
        made = sum(answer.completion_tokens for answer in answers)
        choices: list[dict[str, Any]] = [
            {"index": index, "finish_reason": answer.finish_reason, **_of_answer(answer.output)}
            for index, answer in enumerate(answers)
        ]
        usage = usage_of(first.prompt_tokens, made)
        if first.usage is not None and "cached_tokens" in first.usage:
            usage["cached_tokens"] = first.usage["cached_tokens"]
        return replace(first, run_id=self.run_id, output={**first.output, "choices": choices}, usage=usage)


def _of_answer(output: dict[str, Any]) -> dict[str, Any]:
    """An output without what is the same for all answers."""
    return {name: value for name, value in output.items() if name != "prompt_logprobs"}
